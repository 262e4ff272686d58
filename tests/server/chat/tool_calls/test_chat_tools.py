"""Tool calls and thoughts through HTTP: whole, streamed, forced, cut short."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.chats import ADD, CHATML, THINKING, TOOLS, USER, WEATHER, ChatServer


def final(server: ChatServer, **fields: Any) -> Any:
    """A stream as OpenAI's own helper adds it up."""
    with server.openai.chat.completions.stream(model="fake", messages=[USER], **fields) as stream:
        stream.until_done()
        return stream.get_final_completion()


def shown(choice: Any) -> dict[str, Any]:
    """A choice without the random ids of its calls."""
    told = choice.to_dict()
    for key in ("logprobs", "stop_reason"):  # OpenAI's helper adds the one, drops the other
        told.pop(key, None)
    for call in told["message"].get("tool_calls") or []:
        for key in ("id", "index", "type"):
            call.pop(key, None)
        call["function"].pop("parsed_arguments", None)
    message = {key: value for key, value in told["message"].items() if value not in (None, "")}
    message.pop("parsed", None)
    return {**told, "message": message}


def test_calls_whole_and_streamed() -> None:
    server = ChatServer(f"I look.\n{WEATHER}\n{ADD}")
    choice = server.ask(tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    first, second = choice.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("weather", '{"city": "Rome"}')
    assert (second.function.name, second.function.arguments) == ("add", "{}")
    assert first.id.startswith("call_")
    assert first.id != second.id
    assert shown(final(server, tools=TOOLS).choices[0]) == shown(choice)


def test_deltas_of_a_call() -> None:
    chunks = ChatServer(WEATHER).stream(tools=TOOLS)
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "weather"
    assert calls[0].type == "function"
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    assert len(calls) > 2
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Rome"}


def test_a_call_that_is_cut_short_ends_by_length() -> None:
    choice = ChatServer(WEATHER).ask(tools=TOOLS, max_tokens=20).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "weather"


def test_forced_calls_leave_no_words() -> None:
    server = ChatServer(f"{WEATHER}\n{ADD}")
    for limit in range(1, 90, 4):
        choice = server.ask(tools=TOOLS, tool_choice="required", max_tokens=limit).choices[0]
        assert not choice.message.content
    assert choice.finish_reason == "tool_calls"
    message = choice.message
    assert len(message.tool_calls) == 2


QWEN_XML = """<tool_call>
<function=weather>
<parameter=city>
42
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_in_the_format_of_the_template(choice: str) -> None:
    template = CHATML + "{# <function=name> <parameter=key> #}"
    server = ChatServer(f"I look.\n{QWEN_XML}" if choice == "auto" else QWEN_XML, template)
    told = server.ask(tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = told.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "42"}')
    assert told.finish_reason == "tool_calls"
    assert shown(final(server, tools=TOOLS, tool_choice=choice).choices[0]) == shown(told)
    assert (server.grammar is None) == (choice == "auto")


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text(fields: dict[str, Any]) -> None:
    choice = ChatServer(WEATHER).ask(**fields).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (WEATHER, None)
    assert choice.finish_reason == "stop"


def test_one_call_where_calls_are_not_parallel() -> None:
    message = (
        ChatServer(WEATHER + ADD).ask(tools=TOOLS, parallel_tool_calls=False).choices[0].message
    )
    assert [call.function.name for call in message.tool_calls] == ["weather"]


@pytest.mark.parametrize(
    ("answer", "options", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", {}, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", {"open_thoughts": True}, "Hm.", "Yes."),
        ("Hm, hm", {"open_thoughts": True}, "Hm, hm", ""),
        ("Yes.", {"enable_thinking": False}, None, "Yes."),
        ("<think>Hm.</think>", {"enable_thinking": False}, None, "<think>Hm.</think>"),
        ("Yes.", {}, None, "Yes."),
    ],
)
def test_thoughts(answer: str, options: Any, reasoning: str | None, content: str) -> None:
    server = ChatServer(answer, THINKING)
    choice = server.ask(chat_template_kwargs=options).choices[0]
    assert choice.message.content == content
    assert getattr(choice.message, "reasoning_content", None) == reasoning
    deltas = [c.choices[0].delta for c in server.stream(chat_template_kwargs=options)]
    assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == (reasoning or "")
    assert "".join(d.content or "" for d in deltas) == content


def test_thoughts_are_left_alone_where_nobody_tells_them() -> None:
    answer = "<think>Hm.</think>Yes."
    for server in (ChatServer(answer), ChatServer(answer, THINKING, reasoning_parser="none")):
        assert server.ask().choices[0].message.content == answer


@pytest.mark.parametrize(
    ("words", "reasoning"), [("<think>Hm", ", hm."), ("<think>Hm</think>", None), ("Hm", None)]
)
def test_thoughts_that_go_on(words: str, reasoning: str | None) -> None:
    server = ChatServer(", hm.</think> Yes.", THINKING)
    messages = [USER, {"role": "assistant", "content": words}]
    message = server.ask(messages, continue_final_message=True).choices[0].message
    assert getattr(message, "reasoning_content", None) == reasoning


thinking_server = functools.cache(lambda: ChatServer(template=THINKING))
ANSWERS = st.lists(
    st.sampled_from(
        [WEATHER, ADD, "<think>", "</think>", "<tool_call>", " so ", "\n", "{", "é", "<"]
    ),
    max_size=6,
).map("".join)


@settings(max_examples=15, deadline=None)
@given(answer=ANSWERS, opened=st.booleans())
def test_streams_add_up_to_the_whole_answer(answer: str, opened: bool) -> None:
    server = thinking_server()
    server.engine.answer = answer
    options = {"chat_template_kwargs": {"open_thoughts": opened}}
    whole = server.ask(tools=TOOLS, **options).choices[0]
    assert shown(final(server, tools=TOOLS, extra_body=options).choices[0]) == shown(whole)
