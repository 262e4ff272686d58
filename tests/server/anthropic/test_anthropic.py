"""Anthropic's Messages API: what a body asks of the chat, and what it is answered with."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paceline.server.anthropic.messages import stop_of
from tests.server.chats import THINKING, ChatServer

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hello."}
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def post(server: ChatServer, path: str = PATH, status: int = 200, **fields: Any) -> Any:
    model = server.engine.info.model
    body = {"model": model, "max_tokens": 200, "messages": [USER], **fields}
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(server: ChatServer, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": server.engine.info.model, "max_tokens": 200, "messages": [USER]}
    text = server.http.post(PATH, json={**body, "stream": True, **fields}).text
    events = []
    for each in text.strip().split("\n\n"):
        name, _, data = each.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def content_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the events of a stream add up to."""
    blocks: list[dict[str, Any]] = []
    text_of = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    arguments = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            assert event["index"] == len(blocks) - 1
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
                continue
            name = text_of[delta["type"]]
            blocks[-1][name] += delta[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments or "{}")
    return blocks


def test_a_message_has_the_words_of_the_chat() -> None:
    server = ChatServer("It rains.")
    told = post(server, system=[{"type": "text", "text": "Be brief."}], temperature=0.5, top_k=3)
    assert told["content"] == [{"type": "text", "text": "It rains."}]
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)
    assert (told["type"], told["role"], told["id"][:4]) == ("message", "assistant", "msg_")
    usage, params = told["usage"], server.engine.calls[-1].params
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert read == len(server.engine.calls[-1].token_ids)
    assert usage["output_tokens"] > 0
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 200)
    assert "Be brief." in server.prompt
    plain = ChatServer("It rains.")
    plain.post([{"role": "system", "content": "Be brief."}, USER])
    assert plain.prompt == server.prompt


def test_a_stream_is_the_message_in_order() -> None:
    answer = f"<think>Where?</think>In Rome.{CALL}{CALL}"
    server = ChatServer(answer, THINKING)
    whole = post(server, tools=[TOOL])
    assert [block["type"] for block in whole["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert whole["content"][2]["input"] == {"city": "Rome"}
    assert whole["stop_reason"] == "tool_use"
    events = stream(server, tools=[TOOL])
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    told = content_of(events)
    for block in (*told, *whole["content"]):
        block.pop("id", None)
    assert told == whole["content"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "tool_use", "id": "a", "name": "weather", "input": {}}),
        ("user", {"type": "thinking", "thinking": "Where?"}),
        ("user", {"type": "redacted_thinking", "data": "?"}),
        ("assistant", {"type": "tool_result", "tool_use_id": "a", "content": "Sunny."}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_a_block_in_a_message_of_the_other_role_is_refused(
    role: str, block: dict[str, Any]
) -> None:
    """The API refuses it too; here such a block was lost, and a message of it alone failed."""
    server = ChatServer("It rains.", THINKING)
    messages = [USER, {"role": role, "content": [block]}]
    error = post(server, status=400, messages=messages, tools=[TOOL])["error"]
    assert block["type"] in error["message"]
    assert error["message"].startswith("messages")


KINDS = "text, thinking, redacted_thinking, tool_use, tool_result"


@pytest.mark.parametrize(
    ("block", "place", "words"),
    [
        ({"text": "a"}, ".type", "is missing"),
        (5, "", "is 5; it should be a valid object"),
        ({"type": 5}, "", f"content blocks of type 5 are not supported.*; allowed: {KINDS}$"),
        ({"type": None}, "", f"content blocks of type null are not .*; allowed: {KINDS}$"),
        ({"type": "image"}, "", f"content blocks of type 'image' are not .*; allowed: {KINDS}$"),
        ({"type": "text"}, ".text", "is missing"),
    ],
)
def test_a_block_of_no_known_type_is_refused(block: Any, place: str, words: str) -> None:
    """Where several forms are allowed, the error tells them, and the block's own place."""
    error = post(ChatServer(), status=400, messages=[{"role": "user", "content": [block]}])["error"]
    place = f"messages.0.content.0{place}"
    whole = words if words.startswith("content blocks") else f"{place} {words}"
    assert re.match(whole, error["message"]) is not None


@pytest.mark.parametrize("kind", [5, "image", "tool_use"])
def test_a_result_and_a_system_prompt_take_text_alone(kind: object) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": kind}]}
    for fields in (
        {"messages": [{"role": "user", "content": [result]}]},
        {"system": [{"type": kind}]},
    ):
        error = post(ChatServer(), status=400, **fields)["error"]
        assert error["message"].endswith("the models served here read text; allowed: text")


def test_a_place_has_no_names_of_types() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}
    messages = [{"role": "user", "content": [result]}]
    error = post(ChatServer(), status=400, messages=messages)["error"]
    assert error["message"] == "messages.0.content.0.content.0.text is missing"


def test_an_earlier_answer_comes_back_as_it_was_told() -> None:
    server = ChatServer(f"<think>Where?</think>In Rome.{CALL}", THINKING)
    answer = post(server, tools=[TOOL])
    call = answer["content"][-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Sunny."}
    dropped = {"type": "redacted_thinking", "data": "?"}
    history = [
        USER,
        {"role": "assistant", "content": [dropped, *answer["content"]]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    post(server, messages=history, tools=[TOOL])
    chat = ChatServer("It rains.", THINKING)
    called = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat.post(
        [
            USER,
            {
                "role": "assistant",
                "content": "In Rome.",
                "reasoning_content": "Where?",
                "tool_calls": [{"id": call["id"], "type": "function", "function": called}],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."},
            {"role": "user", "content": "So?"},
        ],
        tools=[{"type": "function", "function": {**_function(), "description": WEATHER_WORDS}}],
    )
    assert server.prompt == chat.prompt


WEATHER_WORDS = TOOL["description"]


def _function() -> dict[str, Any]:
    return {"name": TOOL["name"], "parameters": TOOL["input_schema"]}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "tool", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ],
)
def test_choices_of_tools(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    ours, theirs = ChatServer(CALL), ChatServer(CALL)
    ours_tools = [{"type": "function", "function": {**_function(), "description": WEATHER_WORDS}}]
    post(ours, tools=[TOOL], **fields)
    theirs.post([USER], tools=ours_tools, max_tokens=200, **chat)
    assert ours.engine.calls[-1].params == theirs.engine.calls[-1].params
    assert ours.prompt == theirs.prompt


def test_schemas_effort_thinking_and_a_last_word_to_go_on_from() -> None:
    template = THINKING + "{{ enable_thinking }}{{ reasoning_effort }}"
    server = ChatServer('{"city": "Rome"}', template)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    output = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    post(server, output_config=output, thinking={"type": "disabled"})
    assert server.prompt.endswith("Falselow")
    assert server.engine.calls[-1].params.structured_outputs is not None
    post(server, messages=[USER, {"role": "assistant", "content": "It"}])
    assert server.prompt.endswith("It")


def test_why_an_answer_ended() -> None:
    server = ChatServer("one two three")
    assert post(server, max_tokens=1)["stop_reason"] == "max_tokens"
    post(server, stop_sequences=["two"])
    assert server.engine.calls[-1].params.stop[0] == "two"
    ended = {"finish_reason": "stop", "stop_reason": "two"}
    assert stop_of(ended, ["two"]) == {"stop_reason": "stop_sequence", "stop_sequence": "two"}
    assert stop_of(ended, [])["stop_reason"] == "end_turn"  # a stop string of the template


def test_tokens_are_counted_without_an_answer() -> None:
    server = ChatServer()
    count = server.http.post(
        f"{PATH}/count_tokens", json={"model": server.engine.info.model, "messages": [USER]}
    ).json()
    assert not server.engine.calls
    post(server)
    assert count == {"input_tokens": len(server.engine.calls[-1].token_ids)}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "of type 'image' are not"),
        ({"model": "claude"}, 404, "model 'claude' is not served here"),
        ({"max_tokens": 0}, 400, "max_tokens is 0"),
        ({"messages": []}, 400, "messages"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "the server calls no tools itself"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools.0"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
            400,
            "tool_choice is 'other'",
        ),
    ],
)
def test_errors_have_anthropics_shape(fields: dict[str, Any], status: int, words: str) -> None:
    error = post(ChatServer(), status=status, **fields)
    assert error["type"] == "error"
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert error["error"]["type"] == kind
    assert words in error["error"]["message"]
    assert error["request_id"]


def test_fields_of_betas_are_taken_and_a_failing_stream_says_so() -> None:
    server = ChatServer()
    post(server, context_management={"edits": []}, service_tier="auto", metadata={"user_id": "x"})
    server.engine.error_at = (1, RuntimeError("out of luck"))
    events = stream(server)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


def test_a_key_may_come_by_anthropics_header() -> None:
    server = ChatServer(api_keys=("secret",))
    body = {"model": server.engine.info.model, "max_tokens": 5, "messages": [USER]}
    for headers, status in (({}, 401), ({"x-api-key": "no"}, 401), ({"x-api-key": "secret"}, 200)):
        assert server.http.post(PATH, json=body, headers=headers).status_code == status
