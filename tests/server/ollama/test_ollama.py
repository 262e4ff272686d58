"""Ollama's API: what a body asks of the chat or the completion, and what it is answered with."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from tests.server.chats import THINKING, USER, WEATHER, WEATHER_TOOL, ChatServer

CHAT, GENERATE = "/api/chat", "/api/generate"
OPTIONS = {
    "num_predict": 40,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["two"],
    "repeat_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
}
SAME = {
    **{name: value for name, value in OPTIONS.items() if name not in ("num_predict",)},
    "max_tokens": 40,
    "repetition_penalty": 1.1,
}
del SAME["repeat_penalty"]
COUNTS = ("prompt_eval_count", "eval_count")
DURATIONS = ("total_duration", "prompt_eval_duration", "eval_duration")


def ask(server: ChatServer, path: str = CHAT, status: int = 200, **fields: Any) -> Any:
    """One answer, which is one body unless the fields say otherwise."""
    subject: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "How is it?"}
    body = {"model": server.engine.info.model, "stream": False, **subject, **fields}
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(server: ChatServer, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """The pieces of a stream, which is what a body that does not say asks for."""
    subject: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "How is it?"}
    body = {"model": server.engine.info.model, **subject, **fields}
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(each) for each in response.text.splitlines()]


def test_an_answer_is_the_chats() -> None:
    ours, theirs = ChatServer("It rains."), ChatServer("It rains.")
    told = ask(ours, options=OPTIONS)
    status, chat = theirs.post([USER], **SAME)
    assert status == 200
    assert told["message"] == {"role": "assistant", "content": "It rains."}
    assert chat["choices"][0]["message"]["content"] == told["message"]["content"]
    assert ours.prompt == theirs.prompt
    assert ours.engine.calls[-1].params == theirs.engine.calls[-1].params
    assert (told["done"], told["done_reason"], told["load_duration"]) == (True, "stop", 0)
    usage = chat["usage"]
    assert [told[name] for name in COUNTS] == [usage["prompt_tokens"], usage["completion_tokens"]]
    assert all(told[name] > 0 for name in DURATIONS)
    assert told["total_duration"] >= told["prompt_eval_duration"]
    datetime.fromisoformat(told["created_at"])


def test_a_stream_is_the_answer_in_pieces() -> None:
    server = ChatServer(f"<think>Where?</think>In Rome.{WEATHER}{WEATHER}", THINKING)
    tools = [WEATHER_TOOL]
    whole = ask(server, tools=tools)
    assert list(whole["message"]) == ["role", "content", "thinking", "tool_calls"]
    called = [call["function"] for call in whole["message"]["tool_calls"]]
    arguments = {"city": "Rome"}
    assert called == [{"index": i, "name": "weather", "arguments": arguments} for i in (0, 1)]
    assert whole["done_reason"] == "stop"
    *pieces, last = stream(server, tools=tools)
    messages = [each["message"] for each in pieces]
    assert "".join(each["content"] for each in messages) == whole["message"]["content"]
    assert "".join(each.get("thinking", "") for each in messages) == whole["message"]["thinking"]
    calls = [call["function"] for each in messages for call in each.get("tool_calls", ())]
    assert calls == called
    assert not any(each["done"] for each in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert [last[name] for name in COUNTS] == [whole[name] for name in COUNTS]


def test_an_earlier_answer_comes_back_as_it_was_told() -> None:
    server, chat = ChatServer("It rains.", THINKING), ChatServer("It rains.", THINKING)
    call = {"id": "call_1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    told = {"role": "assistant", "content": "In Rome.", "thinking": "Where?", "tool_calls": [call]}
    result = {"role": "tool", "content": "Sunny.", "tool_name": "weather", "tool_call_id": "call_1"}
    ask(server, messages=[USER, told, result], tools=[{"function": WEATHER_TOOL["function"]}])
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat.post(
        [
            USER,
            {
                "role": "assistant",
                "content": "In Rome.",
                "reasoning_content": "Where?",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "Sunny.", "name": "weather", "tool_call_id": "call_1"},
        ],
        tools=[WEATHER_TOOL],
    )
    assert server.prompt == chat.prompt


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        (
            {"format": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "object"}},
                }
            },
        ),
        ({"format": ""}, {}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"options": {"seed": -1, "num_predict": -1}}, {}),
        ({"options": {"num_predict": 9000}}, {}),
        ({"options": {"top_p": 0}}, {"top_k": 1}),
        ({"options": {"num_predict": -2, "num_ctx": 64, "num_gpu": 9, "mirostat": 0}}, {}),
        ({"keep_alive": "5m"}, {}),
        ({"keep_alive": 0, "truncate": False}, {}),
        ({"keep_alive": -1, "truncate": True, "shift": True}, {}),
        ({"keep_alive": "-1s", "options": {"repeat_last_n": 128, "num_ctx": 1 << 20}}, {}),
        (
            {"options": {"num_predict": 5.0, "top_k": 3.0, "seed": 7.0, "num_ctx": 4096.0}},
            {"max_tokens": 5, "top_k": 3, "seed": 7},
        ),
        (
            {"options": {"repeat_penalty": 1.5, "repeat_last_n": 64}},
            {"repetition_penalty": 1.5},
        ),
    ],
)
def test_fields_of_both_kinds_of_requests(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    template = THINKING + "{{ enable_thinking }}{{ reasoning_effort }}"
    ours, theirs = ChatServer("{}", template), ChatServer("{}", template)
    theirs.post([USER], **chat)
    wanted = theirs.engine.calls[-1].params
    ask(ours, **fields)
    ask(ours, GENERATE, **fields)
    for call in ours.engine.calls:
        assert (call.token_ids, call.params) == (theirs.engine.calls[-1].token_ids, wanted)


def test_a_prompt_is_a_chat_of_one_message() -> None:
    ours, theirs = ChatServer("<think>So.</think>Yes.", THINKING), ChatServer("", THINKING)
    told = ask(ours, GENERATE, system="Be brief.", options=OPTIONS)
    theirs.post([{"role": "system", "content": "Be brief."}, USER], **SAME)
    assert ours.prompt == theirs.prompt
    assert ours.engine.calls[-1].params == theirs.engine.calls[-1].params
    assert (told["response"], told["thinking"]) == ("Yes.", "So.")
    pieces = stream(ours, GENERATE, system="Be brief.")
    assert "".join(each["response"] for each in pieces) == "Yes."
    assert "".join(each.get("thinking", "") for each in pieces) == "So."
    assert "context" not in pieces[-1]


def test_a_raw_prompt_is_a_completion() -> None:
    ours, theirs = ChatServer("It rains."), ChatServer("It rains.")
    told = ask(ours, GENERATE, prompt="Once", raw=True, options=OPTIONS, format="json")
    body = {"prompt": "Once", "structured_outputs": {"json_object": True}, **SAME}
    completion = theirs.http.post("/v1/completions", json=body).json()
    assert told["response"] == completion["choices"][0]["text"]
    ours_call, theirs_call = ours.engine.calls[-1], theirs.engine.calls[-1]
    assert (ours_call.token_ids, ours_call.params) == (theirs_call.token_ids, theirs_call.params)
    pieces = stream(ours, GENERATE, prompt="Once", raw=True)
    assert "".join(each["response"] for each in pieces) == told["response"]
    call = ours.engine.calls[-1]
    assert call.params.max_tokens == 2048 - len(call.token_ids)


def test_log_probabilities_are_the_chats() -> None:
    server = ChatServer("It rains.")
    told = ask(server, logprobs=True, top_logprobs=2)
    chat = server.post([USER], logprobs=True, top_logprobs=2)[1]
    assert told["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    *pieces, _ = stream(server, logprobs=True, top_logprobs=2)
    assert [one for each in pieces for one in each["logprobs"]] == told["logprobs"]


def test_a_limit_is_a_reason_to_end() -> None:
    assert ask(ChatServer("one two three"), options={"num_predict": 1})["done_reason"] == "length"
    cut = ChatServer(WEATHER.replace('"city": "Rome"}}\n</tool_call>', '"city": "Ro'))
    call = ask(cut, tools=[WEATHER_TOOL])["message"]["tool_calls"][0]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": []}), (GENERATE, {"prompt": ""})])
def test_who_asks_for_nothing_hears_that_the_model_is_loaded(path: str, fields: Any) -> None:
    server = ChatServer()
    for more, reason in (({}, "load"), ({"stream": True}, "load"), ({"keep_alive": 0}, "unload")):
        told = ask(server, path, **fields, **more)
        assert (told["done"], told["done_reason"]) == (True, reason)
    assert not server.engine.calls


def test_names_may_have_the_usual_tag() -> None:
    server = ChatServer(served_model_names=("small", "qwen3:8b"))
    for name in ("small", "small:latest", "qwen3:8b"):
        assert ask(server, model=name)["model"] == name
    listed = server.http.get("/api/tags").json()["models"]
    assert [each["name"] for each in listed] == ["small:latest", "qwen3:8b"]
    assert "not served here" in ask(server, model="other", status=404)["error"]


def test_what_the_server_says_of_itself() -> None:
    server = ChatServer(template=THINKING)
    (listed,) = server.http.get("/api/tags").json()["models"]
    (running,) = server.http.get("/api/ps").json()["models"]
    assert running["digest"] == listed["digest"]
    assert len(listed["digest"]) == 64
    assert running["context_length"] == 2048
    shown = server.http.post("/api/show", json={"model": "fake:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 2048
    assert shown["model_info"]["general.parameter_count"] == 1_234_567
    assert shown["details"]["parameter_size"] == "1.235M"
    assert shown["template"] == THINKING
    assert server.http.post("/api/show", json={"model": "no"}).status_code == 404
    assert server.http.get("/api/version").json()["version"].count(".") == 2


def test_what_a_modelfile_says_stands_before_each_chat_and_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ChatServer()
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    example = {"role": "assistant", "content": "Ahoy"}
    opening = ({"role": "system", "content": "Be a pirate."}, example)
    monkeypatch.setattr(tokenizer, "chat_opening", opening)  # all servers of the tests share it
    shown = server.http.post("/api/show", json={"model": "fake:latest"}).json()
    assert (shown["system"], shown["messages"]) == ("Be a pirate.", [example])
    server.post()
    assert server.prompt.startswith("<|im_start|>system\nBe a pirate.<|im_end|>")


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}, "the models served here read text"),
        (GENERATE, {"images": ["aGk="]}, "images is ["),
        (GENERATE, {"suffix": "end"}, "fill-in-the-middle tokens"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "--chat-template"),
        (GENERATE, {"context": [1, 2]}, "/api/chat"),
        (GENERATE, {"raw": True, "system": "x"}, "system is only allowed without raw"),
        (CHAT, {"options": {"mirostat": 2}}, "mirostat is 2"),
        (CHAT, {"options": {"top_p": -1}}, "options.top_p is -1"),
        (CHAT, {"options": {"num_predict": 1.5}}, "options.num_predict is 1.5"),
        (
            CHAT,
            {"options": {"repeat_penalty": 1.5, "repeat_last_n": 128}},
            "repeat_last_n is 128; penalties here count the whole text",
        ),
        (CHAT, {"truncate": True, "messages": [USER] * 900}, "maximum context length"),
        (CHAT, {"model": ""}, "model"),
    ],
)
def test_errors_are_one_string(path: str, fields: dict[str, Any], words: str) -> None:
    told = ask(ChatServer(), path, 400, **fields)
    assert list(told) == ["error"]
    assert words in told["error"]
    assert "response_format" not in told["error"]


def test_options_that_are_not_known_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ChatServer()
    ask(server, options={"temprature": 1, "num_predict": 5, "x\n" * 500: 1})
    assert server.engine.calls[-1].params.max_tokens == 5
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'temprature', 'x\\nx" in record.getMessage()
    assert len(record.getMessage()) < 200


def test_a_body_has_the_type_that_curl_says_unless_a_page_sends_it() -> None:
    server = ChatServer("It rains.")
    curls = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "fake", "messages": [USER], "stream": False})
    told = server.http.post(CHAT, content=body, headers=curls)
    assert told.json()["message"]["content"] == "It rains."
    page = {**curls, "origin": "https://evil.example"}
    assert server.http.post(CHAT, content=body, headers=page).status_code == 415


def test_errors_before_and_after_an_endpoint_have_the_same_shape() -> None:
    server = ChatServer(api_keys=("secret",))
    key = {"authorization": "Bearer secret"}
    body = {"model": "fake", "messages": [USER]}
    for method, path, headers, status in (
        ("POST", CHAT, {}, 401),
        ("GET", "/api/tags", {}, 401),
        ("GET", "/api/version", {}, 401),
        ("POST", "/api/pull", key, 400),
        ("POST", "/api/nothing", key, 404),
        ("GET", CHAT, key, 405),
        ("POST", CHAT, {**key, "content-type": "text/plain"}, 415),
    ):
        content = json.dumps(body) if method == "POST" else None
        response = server.http.request(method, path, content=content, headers=headers)
        assert response.status_code == status, path
        assert isinstance(response.json()["error"], str)
    foreign = ChatServer().http.get("/api/tags", headers={"host": "evil.example"})
    assert (foreign.status_code, type(foreign.json()["error"])) == (403, str)
    assert server.http.post(CHAT, json=body, headers=key).status_code == 200


def test_a_failing_stream_ends_with_the_error() -> None:
    server = ChatServer()
    server.engine.error_at = (1, RuntimeError("out of luck"))
    *pieces, last = stream(server)
    assert pieces
    assert last == {"error": "the server failed; its log says how"}


def test_the_document_describes_pieces_and_errors() -> None:
    document = ChatServer().http.get("/openapi.json").json()
    answers = document["paths"][CHAT]["post"]["responses"]
    assert "application/x-ndjson" in answers["200"]["content"]
    error = answers["400"]["content"]["application/json"]["schema"]
    assert error["properties"]["error"] == {"type": "string"}
    names = document["components"]["schemas"]["Options"]["properties"]
    assert {"num_ctx", "num_predict", "num_thread"} <= set(names)


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/api/pull", "`paceline pull NAME`"),
        ("POST", "/api/push", "published"),
        ("POST", "/api/create", "`paceline serve PATH`"),
        ("POST", "/api/blobs/sha256:1", "`paceline serve PATH`"),
        ("POST", "/api/copy", "--served-model-name"),
        ("DELETE", "/api/delete", "`paceline rm NAME`"),
    ],
)
def test_models_are_those_that_the_server_was_started_with(
    method: str, path: str, advice: str
) -> None:
    answer = ChatServer().http.request(method, path, json={"model": "other"})
    assert answer.status_code == 400
    (message,) = answer.json().values()
    assert message.startswith("the models of a server are chosen when it starts: ")
    assert advice in message
