"""Every answer says the same in four protocols, wherever it is cut into pieces, and streamed as
whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from tests.server.chats import CHATML, HARMONY_CHAT, LLAMA_CHAT, THINKING, USER, ChatServer
from tests.server.protocols import PROTOCOLS, Asked


class Case(NamedTuple):
    """An answer and what it is, in order: thoughts, words, and names with arguments."""

    answer: str
    items: list[Any]
    template: str = CHATML
    config: dict[str, Any] = {}  # noqa: RUF012


LOOK = 'I look.\n<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ("get", {"city": "Paris"})
F = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {"x": 1}}\n</tool_call>'
NEXT = "<|end|><|start|>assistant"
QWEN = (
    "<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
)
CASES = {
    "words-behind-a-call": Case(
        f"{LOOK}\nNow wait.", [("words", "I look.\n"), PARIS, ("words", "\nNow wait.")]
    ),
    "two-calls-with-words": Case(
        f"A\n{F}\nB\n{G}\nC",
        [("words", "A\n"), ("f", {}), ("words", "\nB\n"), ("g", {"x": 1}), ("words", "\nC")],
    ),
    "thoughts": Case(
        f"<think>\nHm </thin.\n</think>\n\nÉtés 😀 <b>{F}{G} <tool",
        [("thoughts", "Hm </thin."), ("words", "Étés 😀 <b>"), ("f", {}), ("g", {"x": 1}),
         ("words", " <tool")],
        THINKING,
    ),
    "no-words": Case(f"<think>Hm.</think>{F}\n", [("thoughts", "Hm."), ("f", {})], THINKING),
    "words": Case(" No <call>. ", [("words", " No <call>. ")]),
    "no-tool": Case(
        'A <tool_call>{"name": "h"}</tool_call> B',
        [("words", 'A <tool_call>{"name": "h"}</tool_call> B')],
    ),
    "llama": Case(
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}} C',
        [("f", {}), ("g", {"x": 1}), ("words", " C")],
        LLAMA_CHAT,
        {"tool_call_parser": "llama3_json"},
    ),
    "parameters": Case(
        f"A {QWEN}\n{QWEN} B",
        [("words", "A "), PARIS, PARIS, ("words", " B")],
        config={"tool_call_parser": "qwen3_coder"},
    ),
    "harmony": Case(
        f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>commentary<|message|>A.{NEXT}"
        '<|channel|>commentary to=functions.g <|constrain|>json<|message|>{"x": 1}'
        f"<|call|><|start|>assistant<|channel|>final<|message|>B < C.",
        [("thoughts", "Hm."), ("words", "A."), ("g", {"x": 1}), ("words", "\n\nB < C.")],
        HARMONY_CHAT,
    ),
    "wrapped": Case(
        f"<think>Hm.</think>\n<response>\nA. </response>\n{F} B",
        [("thoughts", "Hm."), ("words", "A."), ("f", {}), ("words", " B")],
        f"{THINKING}{{# <response> #}}",
        {"reasoning_parser": "ernie45", "tool_call_parser": "hermes"},
    ),
}  # fmt: skip


def said(case: Case) -> dict[str, Any]:
    """What protocols without an order make of a case."""
    texts: dict[str, Any] = {"thoughts": "", "words": "", "calls": []}
    for kind, value in case.items:
        if kind in texts:
            texts[kind] += value
        else:
            texts["calls"].append((kind, value))
    return texts


def items_of(protocol: str, whole: Any) -> Any:
    """What a whole answer consists of: items in order, or all texts and calls where none is."""
    if protocol == "responses":
        return [_item(each) for each in whole["output"]]
    if protocol == "messages":
        return [_block(each) for each in whole["content"]]
    message = whole["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "thoughts": message.get("reasoning_content", message.get("thinking", "")),
        "words": message["content"] or "",
        "calls": [(call["name"], _arguments(call["arguments"])) for call in calls],
    }


def _item(item: Any) -> tuple[str, Any]:
    if item["type"] == "function_call":
        return item["name"], json.loads(item["arguments"])
    return ("words" if item["type"] == "message" else "thoughts"), item["content"][0]["text"]


def _block(block: Any) -> tuple[str, Any]:
    if block["type"] == "tool_use":
        return block["name"], block["input"]
    kind = block["type"]
    return ("words", block["text"]) if kind == "text" else ("thoughts", block[kind])


def _arguments(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def asked(case: Case) -> Asked:
    return Asked(case.answer, case.template, **case.config)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", CASES)
def test_a_whole_answer_has_its_items_in_order(name: str, protocol: str) -> None:
    case, in_order = CASES[name], protocol in ("responses", "messages")
    whole = asyncio.run(asked(case).told(protocol, streams=False))
    assert items_of(protocol, whole) == (case.items if in_order else said(case))


@pytest.mark.parametrize("name", CASES)
def test_logprobs_of_responses_are_those_of_the_words(name: str) -> None:
    """A token is a character here, so these are the words themselves."""
    case = CASES[name]
    whole = asyncio.run(asked(case).told("responses", streams=False))
    for item in whole["output"]:
        if item["type"] == "message":
            part = item["content"][0]
            words = part["text"].removeprefix("\n\n" if case.template == HARMONY_CHAT else "")
            told = b"".join(bytes(each["bytes"]) for each in part["logprobs"])
            assert told.decode() == words


@pytest.mark.parametrize("name", CASES)
def test_logprobs_of_chats_are_those_of_all_tokens(name: str) -> None:
    case, server = CASES[name], asked(CASES[name])
    whole = asyncio.run(server.told("chat", streams=False))
    told = b"".join(bytes(each["bytes"]) for each in whole["logprobs"]["content"])
    assert told.decode().startswith(case.answer)
    assert len(whole["logprobs"]["content"]) == len(server.ids) + 1, "the end has one too"


async def differing(case: Case, protocol: str, cuts: Iterable[Sequence[int]]) -> list[Any]:
    """Those cuts with which the answer, whole or streamed, is another than without any."""
    server, found = asked(case), []
    server.engine.cuts = ()
    whole = await server.told(protocol, streams=False)
    for each in cuts:
        server.engine.cuts = each
        for streams in (False, True):
            if await server.told(protocol, streams) != whole:
                found.append((each, streams))
    return found


def every_cut(case: Case) -> Iterator[Sequence[int]]:
    """In two pieces, in all ways; in pieces of equal size; and each token by itself."""
    size = len(asked(case).ids)
    yield from ((at,) for at in range(size + 1))
    yield from (range(0, size, each) for each in (1, 2, 3, 5, 7, 16))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_words_behind_a_call_are_told_behind_it_wherever_they_are_cut(protocol: str) -> None:
    case = CASES["words-behind-a-call"]
    assert asyncio.run(differing(case, protocol, [*every_cut(case)][::3])) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", CASES)
def test_pieces_of_several_tokens_add_up_to_the_whole(name: str, protocol: str) -> None:
    case = CASES[name]
    assert asyncio.run(differing(case, protocol, [[*range(0, 400, each)] for each in (1, 9)])) == []


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", CASES)
def test_every_cut_adds_up_to_the_whole(name: str, protocol: str) -> None:
    case = CASES[name]
    assert asyncio.run(differing(case, protocol, every_cut(case))) == []


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_openais_package_adds_up_is_the_whole(size: int) -> None:
    case = CASES["two-calls-with-words"]
    server = ChatServer(asked(case).ids, case.template)
    server.engine.cuts = range(0, 1000, size)
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    asking: Any = {"model": "fake", "messages": [USER], "tools": tools}
    with server.openai.chat.completions.stream(**asking) as stream:
        message = stream.get_final_completion().choices[0].message
    calls = [
        (each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls
    ]
    assert {"thoughts": "", "words": message.content, "calls": calls} == said(case)
    tools = [
        {"type": "function", "parameters": {}, "strict": False, **tool["function"]}
        for tool in tools
    ]
    with server.openai.responses.stream(model="fake", input="Hi.", tools=tools) as stream:
        response = stream.get_final_response()
    assert [_item(item.model_dump()) for item in response.output] == case.items
