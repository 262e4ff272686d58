"""Forced and strict calls are held to the format of the model and to the schema of the tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.chat.answer import OfferedTool, ToolCallReader, ToolUse
from paceline.server.chat.answer_formats import TOOL_FORMATS, tool_format
from paceline.server.chat.answer_parts import PlacedText, Words
from paceline.server.chat.answer_requirements import constraint
from tests.server.chat.tool_calls.tool_samples import BARE, SAMPLES, SCHEMAS
from tests.server.chats import PHI4_CHAT, chat_tokenizer
from tests.server.grammars import close, marked_tokenizer, matches, matches_in_tokens


@pytest.fixture(scope="module", autouse=True)
def compiler_ends() -> Iterator[None]:
    yield
    close()


def grammar(
    name: str, schemas: Any = SCHEMAS, forced: bool = True, max_calls: int | None = None
) -> StructuredOutputs:
    tools = [OfferedTool(each, schema, strict=True) for each, schema in schemas.items()]
    found = constraint(ToolUse(TOOL_FORMATS[name], tools, forced, max_calls), None, None)
    assert found is not None
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_forced_calls(name: str) -> None:
    forced, text = grammar(name), SAMPLES[name]
    assert matches(forced, text)
    assert not matches(forced, f"Well. {text}")
    assert not matches(forced, text.replace("weather", "rm"))
    assert not matches(forced, text.replace("3", "three"))
    assert not matches(forced, text.replace("city", "town"))
    assert not matches(grammar(name, max_calls=1), text)


@pytest.mark.parametrize("name", SAMPLES)
def test_strict_calls(name: str) -> None:
    strict, text = grammar(name, forced=False), SAMPLES[name]
    assert matches(strict, text)
    assert matches(strict, "Well, no.")
    assert name in BARE or matches(strict, f"Well.\n{text}")
    assert not matches(strict, text.replace("3", "three"))


@pytest.mark.parametrize("name", SAMPLES)
def test_marks_that_are_one_token_are_written_as_that(name: str) -> None:
    tokenizer, text = marked_tokenizer(), SAMPLES[name]
    for words in ("",) if name in BARE else ("", "Well <b>.\n"):
        token_ids = tokenizer.encode(words + text, add_special_tokens=False)
        assert tokenizer.decode(token_ids) == words + text
        assert matches_in_tokens(grammar(name), token_ids) is not bool(words)
        assert matches_in_tokens(grammar(name, forced=False), token_ids)


DSML = (
    '<|DSML|function_calls>\n<|DSML|invoke name="f">\n<|DSML|parameter name="s" string="%s">%s'
    "</|DSML|parameter>\n</|DSML|invoke>\n</|DSML|function_calls>"
).replace("|", "\uff5c")
RAW = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\n%s\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm47": "<tool_call>f<arg_key>s</arg_key><arg_value>%s</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">%s</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "deepseek_v32": DSML.replace("%s", "true", 1),
    "gemma4": '<|tool_call>call:f{s:<|"|>%s<|"|>}<tool_call|>',
}
"""A call with one string, as formats write it that have strings without quotation marks."""
QWEN = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"
S = "<parameter=s>\n%s\n</parameter>\n"
MINICPM = '<function name="f"><param name="s">%s</param></function>'
CDATA = "<![CDATA[%s]]>"
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
LISTS = {
    "type": "object",
    "properties": {
        "l": {"type": "array", "items": {"$ref": "#/$defs/pair"}},
        "m": {"type": "array", "prefixItems": [NUMBER, TEXT]},
    },
    "$defs": {
        "pair": {"type": "object", "properties": {"a": TEXT, "b": NUMBER}, "required": ["b"]}
    },
}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("name", "schema", "good", "bad"),
    [
        # a string is what it is, with or without the line breaks around it
        ("qwen3_coder", of(s=TEXT), [QWEN % (S % 'a\n "<b>" </'), QWEN % (S % "")], [QWEN % ""]),
        # a schema that names nothing takes any parameters
        ("qwen3_coder", {"type": "object"}, [QWEN % "", QWEN % (S % 1 + S % "x")], [QWEN % "x"]),
        ("qwen3_coder", {"$ref": "#/$defs/f", "$defs": {"f": of(s=NUMBER)}},
         [QWEN % (S % 1)], [QWEN % (S % "x"), QWEN % ""]),
        ("qwen3_coder", {"anyOf": [of(s=NUMBER), of(t=NUMBER)]},
         [QWEN % (S % 1)], [QWEN % "x"]),
        # types that may be strings are free, other types are JSON
        ("qwen3_coder", of(s={"type": ["string", "null"]}), [QWEN % (S % "null")], []),
        ("qwen3_coder", of(s={"type": ["integer", "null"]}), [QWEN % (S % "null")],
         [QWEN % (S % "x")]),
        ("qwen3_coder", of(s={"enum": ["a", "b"]}), [QWEN % (S % "a")], [QWEN % (S % "c")]),
        ("qwen3_coder", of(s={"enum": ["a", 1]}), [QWEN % (S % "a"), QWEN % (S % 1)],
         [QWEN % (S % "b")]),
        ("qwen3_coder", of(s={"pattern": "^a$", "type": "string"}), [QWEN % (S % "a")],
         [QWEN % (S % "ab")]),
        ("qwen3_coder", {"type": "object", "additionalProperties": NUMBER}, [QWEN % (S % 1)],
         [QWEN % (S % "x")]),
        # a text with characters of XML stands in a section, and only such a one
        ("minicpm5", of(s=TEXT),
         [MINICPM % "a b", MINICPM % "", MINICPM % CDATA % "a\n<b> & </param>"],
         [MINICPM % "a<b", MINICPM % "a\nb", MINICPM % "a&b", MINICPM % "<![CDATA[a"]),
        ("minicpm5", of(s={"enum": ["a", "b&", 3]}),
         [MINICPM % "a", MINICPM % CDATA % "b&", MINICPM % "3"],
         [MINICPM % "b&", MINICPM % CDATA % "a", MINICPM % "4"]),
        ("minicpm5", of(s={**TEXT, "pattern": "^[a-z<]{2}$"}),
         [MINICPM % "ab", MINICPM % CDATA % "a<"], [MINICPM % "a<", MINICPM % CDATA % "a"]),
        ("minicpm5", of(s=NUMBER), [MINICPM % "-7"], [MINICPM % "x", MINICPM % CDATA % "7"]),
        # the string says whether it is one
        ("deepseek_v32", of(s={"type": ["string", "integer"], "minLength": 2, "minimum": 5}),
         [DSML % ("true", "12"), DSML % ("false", "12")],
         [DSML % ("true", "1"), DSML % ("false", "1"), DSML % ("false", "ab")]),
        ("qwen3_coder", of(s={"type": "array", "items": TEXT}), [QWEN % (S % '["a", "b"]')],
         [QWEN % (S % "[1]")]),
        ("glm45", of(s=TEXT), [
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\n<b></arg_value>\n</tool_call>"
        ], ["<tool_call>f\n</tool_call>"]),
        ("pythonic", of(s=TEXT, b={"type": "boolean"}), ['[f(s="a\\n\\"", b=True)]'],
         ['[f(s="a", b=true)]', '[f(b=True, s="a")]', "[f()]"]),
        ("pythonic", {"type": "object"}, ["[f()]", '[f(x=1, y_2="a")]'], ["[f(1)]"]),
        ("pythonic", {"properties": {"a": NUMBER, "b": NUMBER}}, ["[f()]", "[f(b=1, a=2)]"],
         ["[f(c=1)]", "[f(a=1,)]"]),
        ("gemma4", LISTS, [
            '<|tool_call>call:f{l:[{b:1,a:<|"|>x"<|"|>},{b:2}],m:[1, "a"]}<tool_call|>',
            "<|tool_call>call:f{l:[]}<tool_call|>",
        ], [
            "<|tool_call>call:f{l:[{}]}<tool_call|>",
            "<|tool_call>call:f{l:[{b:1}{b:1}]}<tool_call|>",
            '<|tool_call>call:f{m:["a", 1]}<tool_call|>',
        ]),
        ("gemma4", of(s={"enum": ["a", "b"]}), ['<|tool_call>call:f{s:<|"|>a<|"|>}<tool_call|>'],
         ['<|tool_call>call:f{s:<|"|>c<|"|>}<tool_call|>']),
    ],
)  # fmt: skip
def test_schemas_in_formats_of_their_own(
    name: str, schema: Any, good: list[str], bad: list[str]
) -> None:
    forced = grammar(name, {"f": schema})
    assert [text for text in good if not matches(forced, text)] == []
    assert [text for text in bad if matches(forced, text)] == []
    for text in good:  # what the grammar allows is read as a call
        reader = ToolCallReader(TOOL_FORMATS[name], {"f": schema})
        parts = reader.push(PlacedText(text), final=True)
        assert not any(isinstance(part, Words) for part in parts)
        assert reader.num_calls == 1


@pytest.mark.parametrize(
    ("name", "template", "marks"),
    [
        ("mistral", "{{ tools }}[TOOL_CALLS]{{ calls }}", ("[TOOL_CALLS]", "")),
        ("phi4_mini_json", PHI4_CHAT, ("<|tool_call|>", "<|/tool_call|>")),
    ],
)
def test_the_way_that_the_template_shows_is_forced(
    name: str, template: str, marks: tuple[str, str]
) -> None:
    form = tool_format(name, chat_tokenizer(template))
    assert form is not None
    tools = [OfferedTool(name, schema) for name, schema in SCHEMAS.items()]
    forced = constraint(ToolUse(form, tools, must_call=True), None, None)
    assert forced is not None
    assert matches(forced, SAMPLES["xlam"].join(marks))
    assert not matches(forced, SAMPLES[name])


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(
    ("rules", "good", "bad"),
    [
        ({"pattern": "^[a-z]+$"}, ["abc"], ["", "ab1", "ab\n"]),
        ({"pattern": "b"}, ["b", "a\nbc\n"], ["", "ac"]),
        ({"pattern": "^a|b$"}, ["ac", "cb"], ["cbc", "ca"]),
        ({"pattern": "^.*$"}, ["<b> </"], ["a\nb"]),
        ({"minLength": 2, "maxLength": 3}, ["é\n", "abc"], ["a", "abcd"]),
        ({"pattern": "^[a-z]+$", "minLength": 2}, ["ab"], ["a", "12"]),
        ({"format": "date"}, ["2024-02-29"], ["2024-13-01", "today"]),
        ({"format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["0123"]),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ab", "a b"], ["a", "b"]),
        ({"anyOf": [{"enum": ["(x)", "y"]}, {"pattern": "^z+$"}]}, ["(x)", "zz"], ["x", ""]),
        ({"const": "a.b"}, ["a.b"], ["axb"]),
    ],
)
def test_bare_strings_are_held_to_their_schema(
    name: str, rules: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    forced = grammar(name, {"f": of(s={**TEXT, **rules})})
    assert [text for text in good if not matches(forced, RAW[name] % text)] == []
    assert [text for text in bad if matches(forced, RAW[name] % text)] == []
    assert TOOL_FORMATS[name].call.forced("f", of(s={**TEXT, **rules})).unenforced == frozenset()


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "deepseek_v32"])
def test_a_bare_string_ends_where_it_is_read_to_end(name: str) -> None:
    forced = grammar(name, {"f": of(s={**TEXT, "minLength": 1})})
    closing = {"glm47": "</arg_value>", "deepseek_v32": "</\uff5cDSML\uff5cparameter>"}
    assert not matches(forced, RAW[name] % f"a{closing.get(name, '</parameter>')}b")


@pytest.mark.parametrize(
    "rules", [{"type": ["string", "null"]}, {"anyOf": [TEXT, {"type": "null"}]}]
)
def test_a_bare_string_may_be_null(rules: dict[str, Any]) -> None:
    forced = grammar("qwen3_coder", {"f": of(s={**rules, "pattern": "^a$"})})
    found = [matches(forced, RAW["qwen3_coder"] % text) for text in ("a", "null", "b")]
    assert found == [True, True, False]


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"format": "ipv6"}, {"format"}),
        ({"pattern": "(^a|b)c"}, {"pattern"}),
        ({"maxLength": 100_000}, {"maxLength"}),
        ({"anyOf": [{"minLength": 2, "pattern": "^a"}, {"pattern": "^b"}]}, {"anyOf"}),
        ({"anyOf": [{"minLength": 2}, {}]}, set()),
        ({"description": "A city.", "title": "City", "default": "Rome"}, set()),
    ],
)
def test_what_bare_strings_are_not_held_to_is_named(
    name: str, rules: dict[str, Any], left: set[str]
) -> None:
    schema = of(s={**TEXT, **rules})
    assert TOOL_FORMATS[name].call.forced("f", schema).unenforced == left
    assert matches(grammar(name, {"f": schema}), RAW[name] % "c")
    assert TOOL_FORMATS["hermes"].call.forced("f", schema).unenforced == frozenset()


@pytest.mark.parametrize(
    ("name", "schema", "left"),
    [
        ("qwen3_coder", of(s={"type": ["string", "integer"], "minimum": 3}), {"minimum"}),
        ("deepseek_v32", of(s={"type": ["string", "integer"], "minimum": 3}), set()),
        ("qwen3_coder", of(s={"type": "integer", "minimum": 3}), set()),
        ("qwen3_coder", {"anyOf": [of(s=TEXT), of(t=TEXT)]}, {"anyOf"}),
        ("qwen3_coder", {"type": "object", "minProperties": 1}, {"minProperties"}),
        ("pythonic", {"type": "object", "minProperties": 1}, {"minProperties"}),
        ("gemma4", of(s={"type": "array", "minItems": 1}), set()),
        ("gemma4", of(s={"type": "array", "maxItems": 2}), {"maxItems"}),
        ("gemma4", of(s=of(t={**TEXT, "format": "uri"})), {"format"}),
        ("lfm2", of(s={**TEXT, "format": "uri"}), set()),
    ],
)
def test_what_calls_are_not_held_to_is_named(name: str, schema: Any, left: set[str]) -> None:
    assert TOOL_FORMATS[name].call.forced("f", schema).unenforced == left
