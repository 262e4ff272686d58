"""Harmony: channels become thoughts, words and calls in every API; what is forced is enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.chat.answer import OfferedTool, ToolUse
from paceline.server.chat.answer_parts import CallArguments, CallOpening, Part
from paceline.server.chat.answer_requirements import harmony_constraint
from paceline.server.chat.harmony import Harmony, HarmonyParser, HarmonyPlace, words_of
from paceline.structured.grammar import GrammarCompiler
from paceline.text.chat_templates import HARMONY
from paceline.text.detokenizer import TextStream
from paceline.text.gguf_tokenizer import end_ids
from paceline.text.tokenizer import Tokenizer
from tests.server.answer_parts import added_up, in_order
from tests.server.chats import ADD_TOOL, CHATML, HARMONY_CHAT, TOOLS, USER, WEATHER_TOOL, ChatServer
from tests.text.vocabularies import byte_level_json

NAMES = ("weather", "add")
BEGIN = Harmony("<|start|>assistant")
NEXT = "<|end|><|start|>assistant"
THINK = f"<|channel|>analysis<|message|>Rome? 1 < 2.{NEXT}"
LOOK = f"<|channel|>commentary<|message|>I look.{NEXT}"
ARGUMENTS = '{"city": "Rome"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
TO_FIRST = f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
FINAL = "<|channel|>final<|message|>It rains."
WEATHER = ("weather", ARGUMENTS)


def read(text: str, *cuts: int, begun: Harmony = BEGIN, max_calls: int | None = None) -> Any:
    """The parts of an answer that comes in pieces."""
    parser, found = HarmonyParser(begun, NAMES, max_calls), list[Part]()
    ends = [*sorted(cuts), len(text)]
    for first, last in zip([0, *ends], ends, strict=False):
        found += parser.push(text[first:last])
    return found + parser.push("", final=True)


CASES = [
    ("", "", "", []),
    (THINK + FINAL, "Rome? 1 < 2.", "It rains.", []),
    (THINK + FINAL + "<|return|>", "Rome? 1 < 2.", "It rains.", []),
    (THINK + CALL + "<|call|>", "Rome? 1 < 2.", "", [WEATHER]),
    (THINK + LOOK + CALL, "Rome? 1 < 2.", "I look.", [WEATHER]),
    (THINK + TO_FIRST, "Rome? 1 < 2.", "", [WEATHER]),
    (TO_FIRST, "", "", [WEATHER]),
    (THINK + THINK + FINAL, "Rome? 1 < 2.\n\nRome? 1 < 2.", "It rains.", []),
    (LOOK + THINK + FINAL, "Rome? 1 < 2.", "I look.\n\nIt rains.", []),
    (CALL + NEXT + CALL, "", "", [WEATHER, WEATHER]),
    # calls in another channel, under a bare name, with white space before the arguments
    ("<|channel|>analysis to=weather <|message|> {}<|call|>", "", "", [("weather", "{}")]),
    # what is said to others is no call
    ("<|channel|>analysis to=python<|message|>1+1<|end|>", "1+1", "", []),
    ("<|channel|>commentary to=functions.other json<|message|>{}", "", "{}", []),
    ("<|channel|>commentary to=functions.add<|message|>1, 2<|end|>", "", "1, 2", []),
    ("<|channel|>commentary to=functions.add json<|message|><|call|>", "", "", []),
    # cut short
    ("<|channel|>fin", "", "", []),
    (THINK.partition(" 2")[0], "Rome? 1 <", "", []),
    (THINK + CALL[:-3], "Rome? 1 < 2.", "", [("weather", '{"city": "Rom')]),
    (FINAL + "<|en", "", "It rains.<|en", []),
    # marks left out
    (FINAL + "<|start|>assistant" + FINAL, "", "It rains.\n\nIt rains.", []),
    (THINK.removesuffix(NEXT) + FINAL, "Rome? 1 < 2.", "It rains.", []),
    ("<|message|>Yes.", "", "Yes.", []),
    ("It rains, doesn't it?", "", "It rains, doesn't it?", []),
    (" to rain < or not", "", " to rain < or not", []),
    ("<", "", "<", []),
]


@pytest.mark.parametrize(("text", "thoughts", "content", "calls"), CASES)
def test_what_is_read(text: str, thoughts: str, content: str, calls: list[Any]) -> None:
    assert added_up(read(text)) == (thoughts, content, calls)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_do_not_matter(data: st.DataObject) -> None:
    parts = [THINK, LOOK, CALL, FINAL, TO_FIRST, NEXT, "{", "<|", "<|end|>", " words "]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=6)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert in_order(read(text, *cuts)) == in_order(read(text))


def test_a_call_is_told_as_it_is_written() -> None:
    at = THINK.__len__() + len(CALL) - len(ARGUMENTS)
    called, *told = read(THINK + CALL, *range(at, at + len(ARGUMENTS)))[-len(ARGUMENTS) - 1 :]
    assert isinstance(called, CallOpening)
    assert called.name == "weather"
    assert told == [CallArguments(0, character) for character in ARGUMENTS]


def test_further_calls_are_dropped_where_one_is_allowed() -> None:
    assert added_up(read(CALL + NEXT + CALL, max_calls=1))[2] == [WEATHER]


@pytest.mark.parametrize(
    ("begun", "text", "found"),
    [
        ("<|start|>assistant<|channel|>final<|message|>It ", "rains.", ("", "rains.", [])),
        ("<|start|>assistant<|channel|>analysis<|message|>It ", f"may.{NEXT}{FINAL}",
         ("may.", "It rains.", [])),
        ("<|start|>user<|message|>Hi<|end|>", "<|start|>assistant" + FINAL, ("", "It rains.", [])),
        ("<|start|>assistant<|channel|>final", "<|message|>Yes.", ("", "Yes.", [])),
    ],
)  # fmt: skip
def test_answers_that_the_prompt_has_begun(begun: str, text: str, found: Any) -> None:
    assert added_up(read(text, begun=Harmony(begun))) == found


def test_what_a_conversation_remembers() -> None:
    """Templates refuse contents with channels."""
    assert words_of(THINK + FINAL) == "It rains."
    assert words_of("<think>Rome?</think>It rains.") == "<think>Rome?</think>It rains."


# --- every API ------------------------------------------------------------------------------------


def served(answer: str, **config: Any) -> ChatServer:
    return ChatServer(answer, HARMONY_CHAT, **config)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(stream: bool) -> None:
    server = served(THINK + LOOK + CALL)
    if stream:
        chunks = server.stream(tools=TOOLS)
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        thoughts = "".join(getattr(c.delta, "reasoning_content", "") or "" for c in choices)
        words = "".join(each.delta.content or "" for each in choices)
        calls = [call.function for each in choices for call in each.delta.tool_calls or ()]
        name, arguments = calls[0].name, "".join(call.arguments for call in calls)
        reason = choices[-1].finish_reason
    else:
        choice = server.ask(tools=TOOLS).choices[0]
        thoughts, words = choice.message.reasoning_content, choice.message.content
        function = choice.message.tool_calls[0].function
        name, arguments, reason = function.name, function.arguments, choice.finish_reason
    assert (thoughts, words) == ("Rome? 1 < 2.", "I look.")
    assert (name, arguments, reason) == (*WEATHER, "tool_calls")


def test_without_tools_a_call_is_words() -> None:
    message = served(THINK + CALL).ask().choices[0].message
    assert (message.content, message.tool_calls) == (ARGUMENTS, None)


def test_responses() -> None:
    server = served(THINK + LOOK + CALL)
    tool = {"type": "function", "strict": False, **WEATHER_TOOL["function"]}  # type: ignore[dict-item]
    body = {"model": "m", "input": "Hi", "tools": [tool]}
    body["model"] = server.engine.info.model
    items = server.http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"][0]["text"] == "Rome? 1 < 2."
    assert items[1]["content"][0]["text"] == "I look."
    assert (items[2]["name"], items[2]["arguments"]) == WEATHER


def test_anthropics_messages() -> None:
    server = served(THINK + LOOK + CALL)
    function: Any = WEATHER_TOOL["function"]
    tool = {"name": "weather", "input_schema": function["parameters"]}
    body = {"model": server.engine.info.model, "max_tokens": 500, "messages": [USER]}
    told = server.http.post("/v1/messages", json={**body, "tools": [tool]}).json()
    thinking, text, call = told["content"]
    assert (thinking["thinking"], text["text"]) == ("Rome? 1 < 2.", "I look.")
    assert (call["name"], call["input"]) == ("weather", json.loads(ARGUMENTS))
    assert told["stop_reason"] == "tool_use"


def test_ollama() -> None:
    server = served(THINK + LOOK + CALL)
    model = server.engine.info.model
    body = {"model": model, "stream": False, "messages": [USER], "tools": TOOLS}
    message = server.http.post("/api/chat", json=body).json()["message"]
    assert (message["thinking"], message["content"]) == ("Rome? 1 < 2.", "I look.")
    assert message["tool_calls"][0]["function"]["arguments"] == json.loads(ARGUMENTS)
    shown = server.http.post("/api/show", json={"model": model}).json()
    assert {"tools", "thinking"} <= set(shown["capabilities"])


@pytest.mark.parametrize(
    ("template", "config", "is_read"),
    [
        (HARMONY_CHAT, {}, True),
        (HARMONY_CHAT, {"reasoning_parser": "none"}, False),
        (HARMONY_CHAT, {"tool_call_parser": "hermes"}, False),
        (CHATML, {}, False),
        (CHATML, {"reasoning_parser": "openai_gptoss"}, True),
        (CHATML, {"tool_call_parser": "openai"}, True),
    ],
)
def test_which_models_answer_so(template: str, config: dict[str, Any], is_read: bool) -> None:
    message = ChatServer(THINK + FINAL, template, **config).ask().choices[0].message
    assert (message.content == "It rains.") is is_read


def test_earlier_thoughts_are_where_the_template_has_them() -> None:
    """With a call a message has thoughts or words, and not both."""
    function = {"name": "weather", "arguments": ARGUMENTS}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    earlier = {"role": "assistant", "reasoning_content": "Rome?"}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "wet"}
    server = served(FINAL)
    server.ask([USER, {**earlier, "content": "I look.", "tool_calls": calls}, result])
    wanted = f"<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant{TO_FIRST}"
    assert wanted in server.prompt
    assert "I look." not in server.prompt
    server.ask([USER, {**earlier, "content": "Wet."}, USER], reasoning_effort="high")
    assert (
        "<|message|>Rome?<|end|><|start|>assistant<|channel|>final<|message|>Wet." in server.prompt
    )
    assert "Reasoning: high" in server.prompt


def test_a_message_is_continued() -> None:
    server = served("rains.")
    words = {"role": "assistant", "content": "It "}
    message = server.ask([USER, words], continue_final_message=True).choices[0].message
    assert message.content == "rains."


# --- grammars -------------------------------------------------------------------------------------


def harmony_vocabulary() -> Tokenizer:
    """Bytes and the marks, each a special token, as gpt-oss has them."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    marks = [*sorted(HARMONY), "<|return|>", "<|call|>"]
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    ids = [backend.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    return Tokenizer(backend, special_tokens={"eos_token": "<|return|>"}, eos_token_ids=ids)


TOKENIZER = harmony_vocabulary()


def matches(spec: StructuredOutputs | None, text: str) -> bool:
    """Whether a text may be a whole answer: its marks as tokens, the rest letter by letter."""
    pytest.importorskip("llguidance")
    assert spec is not None
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_token_ids)
    try:
        (constraint,) = compiler.constraints(spec, 1)
    finally:
        compiler.close()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        bits = int.from_bytes(constraint.mask(()), "little")
        if not bits >> token & 1:
            return False
        constraint.advance(token)
    bits = int.from_bytes(constraint.mask(()), "little")
    return constraint.is_complete or all(bits >> end & 1 for end in TOKENIZER.eos_token_ids)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OFFERED = [
    OfferedTool("weather", {**WEATHER_TOOL["function"]["parameters"]}, strict=True),  # type: ignore[index, dict-item]
    OfferedTool("add", {"type": "object"}),
]
JSON = StructuredOutputs(json=SCHEMA)
FINAL_JSON = '<|channel|>final<|message|>{"a": 1}'
TO_CALL = TO_FIRST.replace(" json", " <|constrain|>json").removesuffix("<|call|>")
OTHER = CALL.replace("city", "town")


def use(must_call: bool = False) -> ToolUse:
    return ToolUse(None, OFFERED, must_call)


@pytest.mark.parametrize(
    ("tool_use", "response", "good", "bad"),
    [
        (None, JSON, [FINAL_JSON, THINK + FINAL_JSON, THINK + LOOK + FINAL_JSON],
         [FINAL, THINK + FINAL, THINK, '{"a": 1}', THINK + CALL]),
        (use(must_call=True), None, [CALL, THINK + CALL, THINK + LOOK + CALL, THINK + TO_CALL],
         [FINAL, OTHER, THINK, CALL + " and"]),
        (use(), JSON, [THINK + CALL, THINK + FINAL_JSON], [FINAL, OTHER]),
        (use(), None, [FINAL, THINK + FINAL, THINK + CALL], [OTHER]),
    ],
)  # fmt: skip
def test_what_an_answer_must_match(
    tool_use: ToolUse | None, response: StructuredOutputs | None, good: list[str], bad: list[str]
) -> None:
    spec = harmony_constraint(BEGIN, tool_use, response)
    assert [text for text in good if not matches(spec, text)] == []
    assert [text for text in bad if matches(spec, text)] == []


@pytest.mark.parametrize(
    ("begun", "good"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", '{"a": 1}'),
        ("<|start|>assistant<|channel|>analysis<|message|>", f"Hm.{NEXT}{FINAL_JSON}"),
        ("<|start|>user<|message|>Hi<|end|>", f"<|start|>assistant{FINAL_JSON}"),
    ],
)
def test_formats_of_answers_that_the_prompt_has_begun(begun: str, good: str) -> None:
    spec = harmony_constraint(Harmony(begun), None, JSON)
    assert matches(spec, good)
    assert not matches(spec, good.replace('"a"', '"b"'))


def test_nothing_is_enforced_that_nobody_asked_for() -> None:
    assert harmony_constraint(BEGIN, None, None) is None
    assert harmony_constraint(BEGIN, ToolUse(None, OFFERED[1:]), None) is None


def test_requests_are_held_to_their_demands() -> None:
    server = served(CALL)
    server.ask(tools=[WEATHER_TOOL, ADD_TOOL], tool_choice="required")
    assert matches(server.grammar, THINK + CALL)
    assert not matches(server.grammar, THINK + FINAL)
    served_json = served(FINAL_JSON)
    message = served_json.ask(response_format={"type": "json_object"}).choices[0].message
    assert message.content == '{"a": 1}'
    assert matches(served_json.grammar, THINK + FINAL_JSON)


# --- tokens ---------------------------------------------------------------------------------------


def test_marks_are_shown_and_ends_are_not() -> None:
    stream = TextStream(TOKENIZER, TOKENIZER.encode("<|start|>assistant"))
    for token in TOKENIZER.encode(THINK + CALL + "<|call|>", add_special_tokens=False):
        stream.push(token)
    assert stream.take_text(final=True) == THINK + CALL


def test_an_end_of_a_message_ends_no_turn() -> None:
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 1,
    }
    assert end_ids(metadata) == [2, 3]
    metadata["tokenizer.ggml.tokens"] = ["a", "<|end|>", "<|return|>", "b"]
    assert end_ids(metadata) == [2, 1]


def test_where_a_prompt_ends() -> None:
    assert HarmonyParser(BEGIN).place is HarmonyPlace.HEAD
