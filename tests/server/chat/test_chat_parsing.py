"""Thoughts, words and tool calls are told apart, however the text is cut into pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request.structured_outputs import ThoughtMarks
from paceline.server.chat.answer import AnswerParser, OfferedTool, ToolUse, Wrapping
from paceline.server.chat.answer_formats import TOOL_FORMATS
from paceline.server.chat.answer_parts import CallArguments, CallOpening, Part, Words
from paceline.server.chat.tool_calls.format import ToolFormat
from paceline.server.chat.tool_calls.json_calls import HERMES, LLAMA
from tests.server.answer_parts import added_up, in_order

NAMES = ("weather", "add")
POSSIBLE = ThoughtMarks(("<think>",), ("</think>",))
OPENED = replace(POSSIBLE, opened=True)


def tool_use(form: ToolFormat, max_calls: int | None = None) -> ToolUse:
    return ToolUse(form, [OfferedTool(name, {}) for name in NAMES], max_calls=max_calls)


def told(text: str, parser: AnswerParser) -> tuple[str, str, list[Any]]:
    """Thoughts, words and calls of an answer that comes in one piece."""
    return added_up(parser.push(text, final=True))


def read(text: str, form: ToolFormat, max_calls: int | None = None) -> tuple[str, list[Any]]:
    """Words and calls of a whole answer."""
    _, words, calls = told(text, AnswerParser(None, tool_use(form, max_calls)))
    return words, calls


WEATHER = ("weather", '{"city": "Rome"}')
ADD = ("add", '{"a":[1,{"b":"}<\\"]"}]}')
H_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
H_ADD = '<tool_call>{"name":"add","arguments":{"a":[1,{"b":"}<\\"]"}]}}</tool_call>'
L_WEATHER = '{"name": "weather", "parameters": {"city": "Rome"}}'
L_ADD = '{"name":"add","parameters":{"a":[1,{"b":"}<\\"]"}]}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        (" plain <b> {words} ", " plain <b> {words} ", []),
        (H_WEATHER, "", [WEATHER]),
        (f"\n\n{H_WEATHER}\n{H_ADD}\n", "", [WEATHER, ADD]),
        (f"{H_WEATHER}{H_ADD}", "", [WEATHER, ADD]),
        (f"I look.\n{H_WEATHER}", "I look.\n", [WEATHER]),
        (f"{H_WEATHER}\nDone.", "\nDone.", [WEATHER]),
        (f"{H_WEATHER[:-3]}", "", [WEATHER]),
        # other orders, other members, arguments under Llama's key
        (
            '<tool_call>{"arguments": {"a": "é"}, "name": "add"}</tool_call>',
            "",
            [("add", '{"a": "é"}')],
        ),
        ('<tool_call>{"name": "add", "arguments": {}, "id": {"x": 1}}</tool_call>', "",
         [("add", "{}")]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        # one that never closes is one all the same; a tag ends arguments that are no JSON
        (f'<tool_call>{{"name": "add", "arguments": {{"a": 1}}}}\n{H_WEATHER}', "",
         [("add", '{"a": 1}'), WEATHER]),
        ('<tool_call>{"name": "add", "arguments": {"a": oh}</tool_call> dear', " dear",
         [("add", '{"a": oh}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": [</tool_call>', "",
         [("add", '{"a": [')]),
        ('<tool_call>{"name": "add", "arguments": {"a": "x\\', "", [("add", '{"a": "x\\')]),
        ('<tool_call>{"name": "add", "arguments": {"a": "x\\\\"}}', "",
         [("add", '{"a": "x\\\\"}')]),
        # no calls: unknown tool, no object, no JSON, cut short
        *(
            (text, text, [])
            for text in (
                '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>',
                '<tool_call>{"name": ["add"], "arguments": {"a": 1}}</tool_call>',
                '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
                '<tool_call>{"name": "add"}</tool_call> and so on',
                "<tool_call>{what}</tool_call>",
                "<tool_call>[1]</tool_call>",
                "<tool_call>add(1)</tool_call>",
                '<tool_call>{"name": "add", "argum',
                "a <tool_call> in words, </tool_call> too",
                "<tool_call>",
                "<tool_cal",
            )
        ),
        ('<tool_call>{"name": <tool_call>{"name": "add", "arguments": {}}</tool_call>',
         '<tool_call>{"name": ', [("add", "{}")]),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str, calls: list[Any]) -> None:
    assert read(text, HERMES) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (L_WEATHER, "", [WEATHER]),
        (f"<|python_tag|>{L_WEATHER}", "", [WEATHER]),
        (f" {L_WEATHER}; {L_ADD}\n{L_WEATHER}", "", [WEATHER, ADD, WEATHER]),
        (f"I look: <|python_tag|>{L_WEATHER};{L_ADD}", "I look: ", [WEATHER, ADD]),
        (f"{L_WEATHER} is how it goes", " is how it goes", [WEATHER]),
        ('{"name": "add", "arguments": {}}', "", [("add", "{}")]),
        *(
            (text, text, [])
            for text in (
                f"Use {L_WEATHER}",
                '{"name": "Alice", "parameters": {}}',
                '{"city": "Rome"} {"name": "add", "parameters": {}}',
                "<|python_tag|>print(1)",
                "{",
                "<|python",
            )
        ),
    ],
)
def test_llama(text: str, content: str, calls: list[Any]) -> None:
    assert read(text, LLAMA) == (content, calls)


def test_further_calls_are_dropped_where_one_is_allowed() -> None:
    assert read(H_WEATHER + H_ADD, HERMES, max_calls=1) == ("", [WEATHER])


@pytest.mark.parametrize(
    ("text", "thoughts", "reasoning", "content"),
    [
        ("<think>\nHm, 1 < 2.\n</think>\n\nYes.", POSSIBLE, "Hm, 1 < 2.", "Yes."),
        ("\nHm.</think>Yes. </think>", OPENED, "Hm.", "Yes. </think>"),
        ("\n<think> Hm.</think> Yes. ", OPENED, "Hm.", "Yes. "),
        (" No <think>ing</think>.", POSSIBLE, "", " No <think>ing</think>."),
        ("<think>\n\n</think>\n\nYes.", POSSIBLE, "", "Yes."),
        ("cut short </thi", OPENED, "cut short </thi", ""),
        ("<thi", POSSIBLE, "", "<thi"),
        ("<thi", OPENED, "<thi", ""),
        ("<think>a</think>b", None, "", "<think>a</think>b"),
        ("a </think> ", OPENED, "a", ""),
    ],
)
def test_thoughts(text: str, thoughts: ThoughtMarks | None, reasoning: str, content: str) -> None:
    assert told(text, AnswerParser(thoughts, None)) == (reasoning, content, [])


def test_calls_inside_of_thoughts_are_thoughts() -> None:
    parser = AnswerParser(POSSIBLE, tool_use(HERMES))
    assert told(f"<think>{H_WEATHER}</think>{H_ADD}", parser) == (H_WEATHER, "", [ADD])


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"),
        *(H_WEATHER, H_ADD, L_WEATHER, L_ADD, '{"arguments": {"a": 2}, "name": "add"}'),
        *('{"name": "add", "arguments": ', '{"a": 1}', "}", "{", '"', "\\", "<", "t"),
        *(" ", "\n", ";", "é"),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(alphabet='{}"\\<>/ a;:,', max_size=4), max_size=12).map(
    "".join
)


@settings(max_examples=120, deadline=None)
@given(
    text=TEXTS,
    sizes=st.lists(st.integers(1, 9), min_size=1),
    form=st.sampled_from([*TOOL_FORMATS.values(), None]),
    thoughts=st.sampled_from([None, POSSIBLE, OPENED]),
    max_calls=st.sampled_from([None, 1]),
)
def test_pieces_add_up_to_the_whole(
    text: str,
    sizes: list[int],
    form: ToolFormat | None,
    thoughts: ThoughtMarks | None,
    max_calls: int | None,
) -> None:
    def parser() -> AnswerParser:
        return AnswerParser(thoughts, form and tool_use(form, max_calls))

    streamed, parts, position, count = parser(), list[Part](), 0, 0
    while position < len(text):
        size = sizes[count % len(sizes)]
        parts += streamed.push(text[position : position + size])
        position, count = position + size, count + 1
    parts += streamed.push("", final=True)
    whole = parser().push(text, final=True)
    assert in_order(parts) == in_order(whole)
    assert places(parts) == places(whole)
    assert max_calls is None or len(added_up(parts)[2]) <= max_calls


def places(parts: list[Part]) -> list[int]:
    """Where each character of the words stood."""
    return [
        at
        for part in parts
        if isinstance(part, Words)
        for start, end in part.places
        for at in range(start, end)
    ]


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, form=st.sampled_from([*TOOL_FORMATS.values(), None]))
def test_words_know_where_they_stood(text: str, form: ToolFormat | None) -> None:
    parser = AnswerParser(POSSIBLE, form and tool_use(form), Wrapping("<a>", "</a>"))
    text = f"<think>a</think> <a> {text} </a> a"
    parts = parser.push(text, final=True)
    assert "".join(text[at] for at in places(parts)) == added_up(parts)[1]


def test_arguments_stream_as_they_come() -> None:
    parser = AnswerParser(None, tool_use(HERMES))
    parts = [part for character in H_WEATHER for part in parser.push(character)]
    assert isinstance(parts[0], CallOpening)
    assert parts[0].name == "weather"
    assert parts[1:] == [CallArguments(0, character) for character in WEATHER[1]]


@settings(max_examples=25, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.none(), max_size=3),
    is_llama=st.booleans(),
)
def test_any_arguments_arrive_as_they_were(arguments: dict[str, Any], is_llama: bool) -> None:
    call = json.dumps({"name": "add", "parameters" if is_llama else "arguments": arguments})
    text, form = (call, LLAMA) if is_llama else (f"<tool_call>{call}</tool_call>", HERMES)
    _, calls = read(text, form)
    assert [(name, json.loads(told)) for name, told in calls] == [("add", arguments)]


def test_long_answers_are_read_in_linear_time() -> None:
    """A quadratic reader would need a minute."""
    parser = AnswerParser(OPENED, tool_use(HERMES))
    for _ in range(20_000):
        parser.push(" <")
    parser.push('</think><tool_call>{"name": "add", "arguments": {"a": "')
    for _ in range(20_000):
        parser.push("<{")
    assert parser.has_calls
