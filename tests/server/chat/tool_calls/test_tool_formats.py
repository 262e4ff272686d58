"""Calls are read in the format of every family, however the text is cut into pieces."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.chat.answer import ToolCallReader
from paceline.server.chat.answer_formats import TOOL_FORMATS, tool_format
from paceline.server.chat.answer_parts import CallArguments, CallOpening, Part, PlacedText
from paceline.server.http.config import TOOL_CALL_PARSERS
from paceline.text.chat_templates import MARK_FAMILIES, SHOWN_MARKS
from tests.server.answer_parts import added_up, in_order
from tests.server.chat.tool_calls.tool_samples import BARE, CALLS, SAMPLES, SCHEMAS, deepseek
from tests.server.chats import TOOLS, ChatServer, chat_tokenizer


def read(name: str, pieces: Iterable[str], tools: Any = SCHEMAS) -> tuple[str, list[Any]]:
    """Words and calls, as text of JSON."""
    _, words, calls = added_up(parts_of(name, pieces, tools))
    return words, calls


def parts_of(name: str, pieces: Iterable[str], tools: Any = SCHEMAS) -> Iterator[Part]:
    reader = ToolCallReader(TOOL_FORMATS[name], tools)
    for piece in pieces:
        yield from reader.push(PlacedText(piece), final=False)
    yield from reader.push(PlacedText(), final=True)


def parsed(calls: list[Any]) -> list[Any]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_name_has_its_format() -> None:
    assert sorted([*TOOL_FORMATS, "auto", "openai"]) == sorted(
        TOOL_CALL_PARSERS
    )  # Harmony, by itself
    assert {form.name for form in TOOL_FORMATS.values()} == set(SAMPLES)
    assert all(TOOL_FORMATS[name].name == name for name in SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_are_read_however_they_are_cut(name: str) -> None:
    for lead in ("", " \n") if name in BARE else ("", "\n", "I look.\n"):
        text = lead + SAMPLES[name]
        words, calls = read(name, [text])
        assert (words, parsed(calls)) == (lead if lead.strip() else "", CALLS)
        whole = in_order(parts_of(name, [text]))
        assert in_order(parts_of(name, text)) == whole
        for at in range(1, len(text)):
            assert in_order(parts_of(name, [text[:at], text[at:]])) == whole


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        # As llama.cpp's parser of the format reads them (common/parsers/minicpm5.cpp, b11549).
        ("<param name='q'><![CDATA[a < b &\n</param>]]></param>", {"q": "a < b &\n</param>"}),
        ("<param name='q'><![CDATA[]]></param><param name='n'>3</param>", {"q": "", "n": 3}),
        ("<param name='n'><![CDATA[5]]></param>", {"n": 5}),
        ("<param name='q'>a]]> b</param>", {"q": "a]]> b"}),
        ("<param name='q'><!</param> <param name='n'>-1</param>", {"q": "<!", "n": -1}),
        ("<param name='l'>[\"</param>\", True]</param>", {"l": ["</param>", True]}),
        ("<param name='u'><![CDATA[x<y]]></param>", {"u": "x<y"}),
    ],
)
def test_texts_in_sections_are_read_however_they_are_cut(parameters: str, arguments: Any) -> None:
    types = {"q": "string", "n": "integer", "l": "array", "u": ["string", "null"]}
    tools = {"get": {"properties": {key: {"type": kind} for key, kind in types.items()}}}
    parameters = re.sub(r"name='(\w)'", r'name="\1"', parameters)
    text = f'Look.\n<function name="get">{parameters}</function>'
    whole = in_order(parts_of("minicpm5", [text], tools))
    assert parsed(read("minicpm5", [text], tools)[1]) == [("get", arguments)]
    for pieces in (text, *([text[:at], text[at:]] for at in range(1, len(text)))):
        assert in_order(parts_of("minicpm5", pieces, tools)) == whole


@pytest.mark.parametrize("name", SAMPLES)
def test_tools_that_were_not_offered_stay_words(name: str) -> None:
    text = SAMPLES[name]
    assert read(name, [text], {}) == (text, [])
    assert read(name, text, {}) == (text, [])
    words, calls = read(name, text, {"weather": SCHEMAS["weather"]})
    assert parsed(calls) == CALLS[:1]
    assert "add" in words


@pytest.mark.parametrize("name", SAMPLES)
def test_a_text_that_is_cut_short_adds_up_too(name: str) -> None:
    text, form = SAMPLES[name], TOOL_FORMATS[name]
    reader, told = ToolCallReader(form, SCHEMAS), list[Part]()
    for end, character in enumerate(text):
        # Read up to here one character after the other, it ends here, and goes on as well.
        ending = copy.deepcopy(reader, {id(form): form, id(SCHEMAS): SCHEMAS})
        _, words, calls = added_up([*told, *ending.push(PlacedText(), final=True)])
        assert (words, calls) == read(name, [text[:end]])
        told += reader.push(PlacedText(character), final=False)


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - {*BARE, "olmo3", "lfm2"}))
def test_words_between_and_behind_calls(name: str) -> None:
    text = SAMPLES[name]
    words, calls = read(name, [f"{text} And then:\n{text}"])
    assert (words.strip(), parsed(calls)) == ("And then:", CALLS * 2)


WORDS = st.text(alphabet="<>[](){}|\"'\\=:, \nabt/_", max_size=5)


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_pieces_of_anything_add_up(name: str, data: st.DataObject) -> None:
    sample = SAMPLES[name]
    place = st.integers(0, len(sample))
    part = st.tuples(place, place).map(lambda ends: sample[min(ends) : max(ends)])
    text = "".join(data.draw(st.lists(part | WORDS, max_size=6)))
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert read(name, pieces) == read(name, [text])


ANYTHING = {"f": {"type": "object", "properties": {"s": {"type": "string"}}}}
QWEN = "<tool_call>\n<function=f>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</tool_call>"
DSML = (
    '<|DSML|tool_calls><|DSML|invoke name="f">\n\n'
    '<|DSML|parameter name="%s"%s>%s</|DSML|parameter>\n</|DSML|invoke>'
).replace("|", "\uff5c")
GLM = "<tool_call>f\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet='<>/p\n\\"é{ 1', max_size=12))
@pytest.mark.parametrize(("name", "form"), [("qwen3_coder", QWEN), ("glm45", GLM)])
def test_strings_between_tags_are_what_was_written(name: str, form: str, text: str) -> None:
    assert parsed(read(name, form % ("s", text), ANYTHING)[1]) == [("f", {"s": text})]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "3", 3),
        ({"type": "number"}, " 2.5 ", 2.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "integer"}, "three", "three"),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "array"}, '["</parameter>", "</arg_value>"]', ["</parameter>", "</arg_value>"]),
        ({"type": "array"}, "[oh]", "[oh]"),
        ({"type": "array"}, "[oh", "[oh"),
        ({"type": "object"}, '{"a": {"b": [1]}}', {"a": {"b": [1]}}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1", "[1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "2"]}, "1", 1),
        ({"$ref": "#/$defs/text"}, "3", "3"),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, "3", "3"),
        ({}, "3", 3),
        ({}, "three", "three"),
        ({}, "NaN", "NaN"),
        (None, "true", True),
    ],
)
def test_values_between_tags_have_the_types_of_the_schema(
    schema: Any, written: str, value: Any
) -> None:
    properties = {} if schema is None else {"x": schema}
    tools = {"f": {"properties": properties, "$defs": {"text": {"type": "string"}}}}
    for name, form in (("qwen3_coder", QWEN), ("glm45", GLM)):
        assert parsed(read(name, form % ("x", written), tools)[1]) == [("f", {"x": value})]


@pytest.mark.parametrize(
    ("schema", "kind", "written", "value"),
    [
        ({"type": ["string", "integer"]}, "true", "3", "3"),
        ({"type": ["string", "integer"]}, "false", "3", 3),
        ({"type": ["string", "integer"]}, None, "3", 3),
        ({"type": "string"}, "false", "3", "3"),
        ({"type": "integer"}, "true", "3", 3),
        ({}, "true", "null", "null"),
        ({}, "false", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_deepseek_says_what_is_a_string(
    schema: Any, kind: str | None, written: str, value: Any
) -> None:
    tools = {"f": {"properties": {"x": schema}}}
    text = DSML % ("x", f' string="{kind}"' if kind else "", written)
    for pieces in ([text], text):
        assert parsed(read("deepseek_v32", pieces, tools)[1]) == [("f", {"x": value})]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        # leaner and richer than the form that is forced
        ("qwen3_coder", "<function=f><parameter=s>a</parameter></function>", {"s": "a"}),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>", {}),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "a"}, "id": "x"}]', {"s": "a"}),
        ("mistral", '[TOOL_CALLS]f{"s": "a"}', {"s": "a"}),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]1[ARGS]{"s": "a"}', {"s": "a"}),
        ("deepseek_v3", deepseek('<|tool call begin|>f<|tool sep|>{"s": "a"}'), {"s": "a"}),
        ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {"s": "a"}}]<|/tool_call|>',
         {"s": "a"}),
        ("cohere_command3", '<|START_ACTION|>[\n    {"tool_name": "f", "parameters": {}}\n]', {}),
        ("cohere_command3", '<|START_ACTION|>{"parameters": {}, "tool_name": "f"}', {}),
        ("granite", '<|tool_call|> {"name": "f", "arguments": {"s": "a"}}', {"s": "a"}),
        ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"s": "a"}}]', {"s": "a"}),
        ("pythonic", "[f(s='it\\'s', n=-1.5, b=True, x=None, l=[1, (2,)], d={'k': \"v\"})]",
         {"s": "it's", "n": -1.5, "b": True, "x": None, "l": [1, [2]], "d": {"k": "v"}}),
        ("pythonic", '[f(s="""a "b")] c""",)]', {"s": 'a "b")] c'}),
        ("pythonic", '[f(s="\\ud83d\\ude00\\n\\d")]', {"s": "\U0001f600\n\\d"}),
        ("gemma4", '<|tool_call>call:f{s:<|"|>a"}\\<|"|>,o:{l:[<|"|>x<|"|>,2],b:true}}<tool_call|>',
         {"s": 'a"}\\', "o": {"l": ["x", 2], "b": True}}),
        ("gemma4", '<|tool_call>call:f{"s":"a\\"}"}', {"s": 'a"}'}),
    ],
)  # fmt: skip
def test_other_spellings(name: str, text: str, arguments: Any) -> None:
    for pieces in ([text], text):
        assert parsed(read(name, pieces, ANYTHING)[1]) == [("f", arguments)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", f"<tool_call>{'x' * 300}"),
        ("glm45", "<tool_call>f(s=1)</tool_call>"),
        ("mistral", "[TOOL_CALLS] so it is"),
        ("phi4_mini_json", "import functools"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(s=g())]"),
        ("pythonic", "[f(s=1"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "f(s=1)"),
        ("gemma4", "<|tool_call>call:f{s}<tool_call|>"),
    ],
)
def test_no_calls(name: str, text: str) -> None:
    for pieces in ([text], text):
        assert read(name, pieces, ANYTHING) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[f()]\n[f(), f()]"),
        ("xlam", '[{"name": "f", "arguments": {}}] [{"name": "f", "arguments": {}}, '
         '{"name": "f", "arguments": {}}]'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]\n'
         '[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'),
        ("lfm2", "<|tool_call_start|>[f()]\n[f(), f()]<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_a_second_list_of_calls(name: str, text: str) -> None:
    for pieces in ([text], text):
        assert read(name, pieces, ANYTHING) == ("", [("f", "{}")] * 3)


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.get_weather:0", "get_weather"),
        ("functions.functions.a:12", "functions.a"),
        ("get_weather:0", "get_weather"),  # vLLM 0.14 reads these four
        ("functions.get_weather", "get_weather"),
        ("tool.get_weather:1", "get_weather"),
        ("chatcmpl-tool-functions.a:0", "a"),
        ("functions_get_weather_1", "get_weather"),  # of clients that allow [A-Za-z0-9_-] alone
        ("functions.get_weather:x", "get_weather"),
        ("functions-functions-a-0", "functions.a"),
        ("functions.rm:0", None),
        ("functions.rm.a:0", None),
        ("call_0Xaf3", None),
    ],
)
def test_ids_of_kimis_calls(call_id: str, name: str | None) -> None:
    tools: Any = {key: {} for key in ("weather", "get_weather", "a", "functions.a")}
    text = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = f"<|tool_call_section_begin|>{text}<|tool_call_section_end|>"
    for pieces in ([text], text):
        assert read("kimi_k2", pieces, tools)[1] == ([(name, "{}")] if name else [])
    only = read("kimi_k2", text, {"get_weather": {}})[1]
    assert bool(only) is (name == "get_weather" or call_id.startswith("call_"))


def test_strings_between_tags_stream_as_they_come() -> None:
    parts = [*parts_of("qwen3_coder", QWEN % ("s", "a long text"), ANYTHING)]
    assert len(parts) > len("a long text")
    assert isinstance(parts[0], CallOpening)
    assert parts[1] == CallArguments(0, "{")


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "gemma4", "mistral"])
def test_long_arguments_are_read_in_linear_time(name: str) -> None:
    """A quadratic reader would need minutes."""
    begin = SAMPLES[name].partition("Rome")[0]
    reader = ToolCallReader(TOOL_FORMATS[name], SCHEMAS)
    reader.push(PlacedText(begin), False)
    for _ in range(20_000):
        reader.push(PlacedText('\\" <'), False)
    assert reader.push(PlacedText(SAMPLES[name].removeprefix(begin + "Rome")), True)


TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>{...}</tool_call>",
    "longcat": "{{ tools }}<longcat_tool_call>",
    "llama": "{{ tools }}<|start_header_id|>ipython<|end_header_id|>",
    "internlm": "{{ tools }}<|action_start|><|plugin|>",
    "granite": "{{ tools }} answer with <|tool_call|> and a list of calls",
    "phi4_mini_json": "{{ message['tools'] }}<|tool|>...<|/tool|>",
    "hunyuan_a13b": "{{ tools }}<tool_calls>[...]</tool_calls>",
    "cohere_command3": "{{ tools }}<|START_ACTION|>[...]<|END_ACTION|>",
    "apertus": "{{ tools }}<|tools_prefix|>",
    "mistral": "{{ tools }}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}",
    "deepseek_v3": deepseek("{{ tools }}<|tool calls begin|>```json"),
    "deepseek_v31": deepseek("{{ tools }}<|tool calls begin|>"),
    "deepseek_v32": "{{ tools }}{% set dsml = '\uff5cDSML\uff5c' %}<{{ dsml }}function_calls>",
    "deepseek_v4": "{{ tools }}<\uff5cDSML\uff5ctool_calls>",
    "kimi_k2": "{{ tools }}<|tool_calls_section_begin|>",
    "qwen3_coder": "{{ tools }}<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>",
    "seed_oss": "{{ tools }}<seed:tool_call><function=f><parameter=x>",
    "glm45": "{{ tools }}<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>",
    "glm47": "{{ tools }}<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>",
    "minimax_m2": "{{ tools }}<minimax:tool_call><invoke name={{ name }}>",
    "minicpm5": """{{ tools }}{% if '<tool_sep>' in x %}<function name="f"><param name="k">""",
    "functionary_v31": "{{ tools }}<|start_header_id|><function={{ name }}>{...}</function>",
    "nemotron_json": "{{ tools }}<TOOLCALL>[...]</TOOLCALL>",
    "gigachat3": "{{ tools }}function call<|role_sep|>",
    "hy_v3": "{% set h = ':opensource' %}{{ tools }}{{ '<tool_sep{}>'.format(h) }}<arg_key>",
    "kimi_k3": "{{ tools }}<|open|>tools<|sep|><|close|><|end_of_msg|>",
    "pythonic": "{{ tools }} as [func_name1(params_name1=params_value1)]",
    "olmo3": "{{ tools }}<function_calls>{{ calls }}</function_calls>",
    "lfm2": "{{ tools }}<|tool_call_start|>",
    "gemma4": "{{ tools }}<|tool_call>call:{{ name }}",
    "functiongemma": "{{ tools }}<start_function_call>call:{{ name }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_found_by_its_template(name: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    for choice in ("auto", name):
        form = tool_format(choice, tokenizer)
        assert form is not None
        assert form.name == name
    assert tool_format("auto", chat_tokenizer(TEMPLATES[name].replace("tools", "t"))) is None
    other = tool_format("xlam", tokenizer)
    assert other is TOOL_FORMATS["xlam"]


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = ']<]minimax[>[' %}{{ tools }}{{ ns ~ '<tool_call>' }}",
        "{{ tools }}<|start_header_id|>>>>all\n>>>{{ name }}\n{{ arguments }}",
    ],
    ids=["minimax-m3", "functionary-3.2"],
)
def test_formats_that_are_not_read_are_not_taken_for_others(template: str) -> None:
    assert tool_format("auto", chat_tokenizer(template)) is None
    assert ChatServer(template=template).post(tools=TOOLS)[0] == 400


def test_the_template_says_how_a_format_is_written() -> None:
    old = tool_format("mistral", chat_tokenizer("{{ tools }}[TOOL_CALLS]{{ calls }}"))
    assert old is not None
    assert old is not TOOL_FORMATS["mistral"]
    assert tool_format("mistral", chat_tokenizer("{{ tools }}")) is TOOL_FORMATS["mistral"]


@pytest.mark.parametrize("name", SAMPLES)
def test_marks_of_calls_are_shown_where_a_vocabulary_calls_them_special(name: str) -> None:
    marks = re.findall(
        r"\uff5cDSML\uff5c|<[^<>=\uff5c]+>|<\uff5c[^<>=]+\uff5c>|\[[A-Z_/]{4,}\]", SAMPLES[name]
    )
    plain = {"</parameter>", "</function>", "</invoke>"}
    shown = {mark.strip() for mark in SHOWN_MARKS.union(*MARK_FAMILIES)}
    assert {mark for mark in marks if " name=" not in mark} - shown <= plain
