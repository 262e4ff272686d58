"""``/v1/chat/completions``: whole answers, streams, log-probabilities, usage, refusals.

Every answer passes the strict validation of OpenAI's own client.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from paceline.core.errors import EngineDeadError, ShapeError
from paceline.server.chat import answer_formats
from paceline.server.http.config import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from paceline.text.chat_templates import BUILT_IN
from tests.server.chats import USER, WEATHER, WEATHER_TOOL, ChatServer

HICCUP: dict[str, Any] = {"type": "hiccup"}
HICCUP_FORMAT: dict[str, Any] = {"type": "json_schema", "schema": HICCUP}


@pytest.fixture(scope="module")
def server() -> ChatServer:
    return ChatServer()


def test_an_answer(server: ChatServer) -> None:
    answer = server.ask()
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert answer.system_fingerprint.endswith("-float32-reference")
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.prompt_tokens == len(server.engine.calls[-1].token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream(server: ChatServer) -> None:
    chunks = server.stream(stream_options={"include_usage": True})
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in [*middle, last])
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == "It rains."
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(middle) + 1  # the end-of-sequence token
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_usage_has_none(server: ChatServer) -> None:
    body = {"messages": [USER], "stream": True}
    text = server.http.post("/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    assert all(event["choices"] and "usage" not in event for event in events)


@pytest.mark.parametrize(
    "limit", [{"max_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 9}]
)
def test_limits(server: ChatServer, limit: dict[str, int]) -> None:
    answer = server.ask(**limit)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2
    assert server.stream(**limit)[-1].choices[0].finish_reason == "length"


def test_an_answer_may_fill_the_context_and_no_more(server: ChatServer) -> None:
    server.ask()
    call = server.engine.calls[-1]
    room = server.engine.info.max_model_len - len(call.token_ids)
    assert call.params.max_tokens == room
    status, body = server.post(max_tokens=room + 1)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


def test_samples_have_their_index(server: ChatServer) -> None:
    assert [choice.index for choice in server.ask(n=3).choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in server.stream(n=3):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["It rains."] * 3


def test_logprobs(server: ChatServer) -> None:
    answer = server.ask(logprobs=True, top_logprobs=3, max_tokens=4)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == b"It rains."
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    streamed = server.stream(logprobs=True, top_logprobs=3, max_tokens=4)
    told = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [entry for each in told for entry in each.content] == entries


def test_logprobs_without_alternatives_and_none(server: ChatServer) -> None:
    entry = server.ask(logprobs=True).choices[0].logprobs.content[0]
    assert entry.top_logprobs == []
    assert server.ask().choices[0].logprobs is None


def test_no_token_is_lost_while_text_is_held_back() -> None:
    """The stop string holds text back; its tokens' figures come all the same."""
    server = ChatServer("Rain, rain, rain")
    chunks = server.stream(logprobs=True, return_origins=True, stop=["rain, rain, snow"])
    told = [chunk.choices[0] for chunk in chunks]
    spelled = [entry.token for c in told if c.logprobs for entry in c.logprobs.content]
    tokens = [token for c in told for token in getattr(c, "tokens", [])]
    assert "".join(spelled[:-1]) == "Rain, rain, rain"
    assert "".join(token["text"] for token in tokens) == "Rain, rain, rain"
    assert {token["origin"] for token in tokens} == {"target", "prompt_lookup"}
    assert server.ask(return_origins=True).choices[0].tokens[0]["text"] == tokens[0]["text"]


def test_speculation_is_reported_when_asked(server: ChatServer) -> None:
    metrics = server.ask(include_metrics=True).usage.metrics["speculative_decoding"]
    assert metrics["mean_acceptance_length"] > 1
    assert "metrics" not in server.ask().usage.to_dict()


def test_prompt_logprobs(server: ChatServer) -> None:
    entries = server.ask(prompt_logprobs=1).prompt_logprobs
    assert len(entries) == len(server.engine.calls[-1].token_ids)
    assert entries[0] is None


IGNORED = {
    "user": "me",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "modalities": ["text"],
    "tools": [],
    "tool_choice": None,
    "response_format": {"type": "text"},
    "functions": None,
    "parallel_tool_calls": True,
    "logprobs": False,
}


def test_what_cannot_change_an_answer_is_taken(server: ChatServer) -> None:
    for choice in (None, "auto", "none"):
        status, body = server.post(**IGNORED | {"tool_choice": choice})
        assert status == 200, body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hello."}, "messages"),
        ({"messages": [123]}, "messages.0"),
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": 123}]}, "messages.0.role"),
        ({"messages": [{"role": "system", "content": 123}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages.1"),
        ({"messages": [{**USER, "audio": {"id": "x"}}]}, "messages.0"),
        ({"messages": [{**USER, "tool_calls": []}]}, "messages.0"),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages.0"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{**USER, "content": []}]}, "messages.0.content"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ],
)
def test_refusals_name_the_field(server: ChatServer, fields: dict[str, Any], param: str) -> None:
    status, body = server.post(**{"messages": (USER,), **fields})
    assert status == 400, body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    assert param.rpartition(".")[2] in body["error"]["message"] or param.startswith("messages")


def test_a_model_without_a_chat_template() -> None:
    status, body = ChatServer(template=None).post()
    assert (status, body["error"]["code"]) == (400, "no_chat_template")
    assert "/v1/completions" in body["error"]["message"]


def test_an_unknown_model(server: ChatServer) -> None:
    with pytest.raises(openai.NotFoundError):
        server.openai.chat.completions.create(model="gpt-9", messages=[USER])


def test_a_template_that_refuses() -> None:
    server = ChatServer(template="{{ raise_exception('roles must alternate') }}")
    status, body = server.post()
    assert status == 400
    assert "roles must alternate" in body["error"]["message"]


def test_errors_of_the_engine(server: ChatServer) -> None:
    broken = ChatServer()
    broken.engine.error_at = (2, EngineDeadError("the engine died"))
    assert broken.post()[0] == 500
    with pytest.raises(openai.APIError, match="the engine died"):
        broken.stream()
    text = broken.http.post(
        "/v1/chat/completions", json={"messages": [USER], "stream": True}
    ).text.split("\n\n")
    assert "error" in json.loads(text[-3][6:])
    assert text[-2] == "data: [DONE]"


def refused_by_its_grammar(monkeypatch: pytest.MonkeyPatch) -> ChatServer:
    server = ChatServer()

    def refuse(*_: Any) -> None:
        raise ShapeError("json", "cannot be used", "no such type: hiccup")

    monkeypatch.setattr(server.engine, "_check", refuse)
    return server


def test_a_refused_grammar_is_laid_to_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    server = refused_by_its_grammar(monkeypatch)
    wish = {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}
    for stream in (False, True):
        status, body = server.post(response_format=wish, stream=stream)
        assert (status, body["error"]["param"]) == (400, "response_format")
        told = "response_format cannot be served: no such type: hiccup"
        assert body["error"]["message"] == told


@pytest.mark.parametrize(
    ("path", "name", "wish"),
    [
        ("/api/chat", "format", {"format": HICCUP}),
        ("/v1/messages", "output_config.format", {"output_config": {"format": HICCUP_FORMAT}}),
        ("/v1/responses", "text.format", {"text": {"format": {**HICCUP_FORMAT, "name": "x"}}}),
        ("/v1/completions", "guided_json", {"guided_json": HICCUP}),
    ],
)
def test_every_protocol_names_its_own_field(
    path: str, name: str, wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = refused_by_its_grammar(monkeypatch)
    words = {"input": "a"} if path == "/v1/responses" else {"messages": [USER]}
    words = {"prompt": "a"} if path == "/v1/completions" else words
    limit = {"max_tokens": 5} if path == "/v1/messages" else {}
    answer = server.http.post(path, json={"model": "fake", **words, **limit, **wish})
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (answer.status_code, message) == (
        400,
        f"{name} cannot be served: no such type: hiccup",
    )


def test_formats_are_found_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ChatServer(WEATHER)

    def search(*_: Any) -> None:
        raise AssertionError("a request looks for the model's formats")

    for name in ("tool_format", "reasoning_format"):
        monkeypatch.setattr(answer_formats, name, search)
    status, body = server.post(tools=[WEATHER_TOOL])
    assert status == 200, body
    (called,) = body["choices"][0]["message"]["tool_calls"]
    assert called["function"]["name"] == "weather"


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_options_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ServerConfig(**{name: "guess"})
    allowed = TOOL_CALL_PARSERS if name == "tool_call_parser" else REASONING_PARSERS
    for value in allowed:
        ServerConfig(**{name: value})


def test_under_the_plain_template_an_answer_ends_before_the_next_turn() -> None:
    talk = " It rains.\n\nUser: Really?\n\nAssistant: Yes. END"
    server = ChatServer(talk, BUILT_IN["plain"])
    choice = server.ask().choices[0]
    assert (choice.message.content, choice.finish_reason) == (" It rains.\n", "stop")
    assert server.ask(stop=["rains"]).choices[0].message.content == " It "
    stops = [f"no {i}" for i in range(32)]
    assert server.ask(stop=stops).choices[0].finish_reason == "stop"
    _, answer = server.post(ignore_eos=True, max_tokens=20)
    assert "User:" in answer["choices"][0]["message"]["content"]
    chosen = ChatServer(talk, BUILT_IN["chatml"])
    assert chosen.ask().choices[0].message.content == talk
