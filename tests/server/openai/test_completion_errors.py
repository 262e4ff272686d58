"""``/v1/completions``: what is refused and what fails, with which error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.errors import (
    BusyError,
    EngineDeadError,
    RequestFailedError,
    UnservableRequestError,
)
from paceline.server.chat.response_formats import blamed
from tests.server.asgi import application, complete, engine_of, post, refused, streamed
from tests.server.fakes import FakeEngine

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "prompt is missing", "prompt"),
        ({"prompt": "a", "top_q": 1}, "unknown field 'top_q'", "top_q"),
        ({"prompt": "a", "suffix": "b"}, "cannot fill a gap before a suffix", None),
        ({"prompt": "a", "best_of": 2}, "best_of is 2; only what asks for nothing", "best_of"),
        ({"prompt": []}, "prompt has 0 prompts; allowed: 1 to 4096", "prompt"),
        ({"prompt": [[]]}, "none of them empty", "prompt"),
        ({"prompt": ["a", [1]]}, "a string, a list of token ids, or a list", "prompt"),
        ({"prompt": [[1, True]]}, "token ids are whole numbers", "prompt"),
        ({"prompt": [1, -5]}, "token ids are whole numbers", "prompt"),
        ({"prompt": {"a": 1}}, "prompt must be a string", "prompt"),
        ({"prompt": 0}, "prompt must be a string", "prompt"),
        ({"prompt": [1, "a"]}, "prompt must be a string", "prompt"),
        ({"prompt": "a", "temperature": "hot"}, 'temperature is "hot"; it should', "temperature"),
        ({"prompt": "a", "temperature": -1}, "greater than or equal to 0", "temperature"),
        ({"prompt": "a", "n": 129}, "n is 129; it should be less than or equal to 128", "n"),
        (
            {"prompt": "a", "stop": 5},
            "stop is 5; it should be a valid string, or a valid list",
            "stop",
        ),
        ({"prompt": "a", "stop": ""}, 'stop is ""; it should have at least 1 character', "stop"),
        ({"prompt": "a", "logprobs": 21}, "less than or equal to 20", "logprobs"),
        ({"prompt": "a", "stop": [""]}, "at least 1 character", "stop.0"),
        ({"prompt": "a", "stop": ["a"] * 33}, "at most 32", "stop"),
        ({"prompt": "a", "logit_bias": {"3": True}}, "numbers, and false", "logit_bias.3"),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, "the vocabulary is 0 to 4095", "logit_bias"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; that is for echo", "max_tokens"),
        ({"prompt": "a", "stream_options": {}}, "only allowed with stream", "stream_options"),
        ({"prompt": "a", "skip_special_tokens": False}, "(true, null)", "skip_special_tokens"),
        (
            {"prompt": "a", "speculative": {"method": "magic"}},
            "'magic'; allowed",
            "speculative.method",
        ),
        (
            {"prompt": "a", "speculative": {"method": ["suffix"], "methods": ["suffix"]}},
            "speculative.method is given together with speculative.methods",
            "speculative",
        ),
        (
            {"prompt": "a", "max_tokens": 4, "min_tokens": 5},
            "min_tokens is 5; allowed: values up to max_tokens, which is 4",
            "min_tokens",
        ),
        (
            {"prompt": "a", "speculative": {"k": 1}},
            "unknown field 'speculative.k'",
            "speculative.k",
        ),
        ([1], "the body is [1]; it must be a JSON object", None),
    ],
)
def test_what_cannot_be_served_is_refused(body: Any, message: str, param: str | None) -> None:
    app = application()
    error = refused(app, PATH, body)
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert engine_of(app).calls == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 512},
        {"prompt": "a" * 100_000},
        {"prompt": "a", "max_tokens": 512},
        {"prompt": "word " * 600, "max_tokens": 1},
    ],
)
def test_what_does_not_fit_into_the_context_is_refused(body: Any, stream: bool) -> None:
    error = refused(application(), PATH, {**body, "stream": stream})
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]


def test_null_means_the_default() -> None:
    body = {"suffix": None, "best_of": None, "stop": None, "seed": None, "stream": None}
    assert complete(application(), **body)["choices"][0]["text"]


def test_another_model_is_not_found() -> None:
    error = refused(application(), PATH, {"prompt": "a", "model": "gpt-5"}, 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    app = application(served_model_names=("one", "org/two"))
    assert complete(app, model="org/two")["model"] == "org/two"
    assert complete(app)["model"] == "one"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestFailedError("the sampler failed"), "request_failed"),
        (EngineDeadError("the engine died"), "engine_dead"),
        (ValueError("a secret path"), "internal_error"),
    ],
)
def test_a_failure_is_a_500_or_the_end_of_the_stream(error: Exception, code: str) -> None:
    app = application(FakeEngine(error_at=(2, error)))
    told = refused(app, PATH, {"prompt": "a"}, 500)
    assert told["type"] == "server_error"
    assert told["code"] == code
    assert "secret" not in told["message"]
    *pieces, last = streamed(app, "a")
    assert [len(piece["choices"]) for piece in pieces] == [1, 1]
    assert last["error"] == told


def test_a_request_that_cannot_be_served_to_its_end_is_a_400_or_the_end_of_the_stream() -> None:
    error = UnservableRequestError("no token is left at position 3")
    app = application(FakeEngine(error_at=(2, error)))
    told = refused(app, PATH, {"prompt": "a"}, 400)
    assert told["type"] == "invalid_request_error"
    assert told["code"] == "unservable_request"
    assert streamed(app, "a")[-1]["error"] == told


def test_a_machine_that_is_too_busy_is_asked_again() -> None:
    """Whatever the time was needed for: clients retry a 503, and give up at a 400."""
    busy = BusyError("structured_outputs.regex cannot be used: it took longer than 10 s; try again")
    response = post(application(FakeEngine(error_at=(1, busy))), PATH, {"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["code"] == "busy"
    assert blamed(busy, "response_format") is busy


def test_one_failure_in_a_batch_ends_all_of_it() -> None:
    app = application(FakeEngine(error_at=(2, RequestFailedError("the sampler failed"))))
    assert refused(app, PATH, {"prompt": ["a", "b", "c"]}, 500)["code"] == "request_failed"
    assert all(made.aborted for made in engine_of(app).calls)
    assert app.state.models.first.admission.num_unfinished == 0


def test_a_dead_engine_refuses_with_a_500() -> None:
    app = application(FakeEngine(dies_at=0))
    assert refused(app, PATH, {"prompt": "a", "stream": True}, 500)["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("x", "a valid integer, or -1"),
        (-3, "greater than or equal to 1, or -1"),  # and no other type than the one that it has
    ],
)
def test_all_that_a_value_may_be_is_told(value: Any, wanted: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": value}
    error = refused(application(), "/v1/chat/completions", body)
    assert error["message"] == f"max_tokens is {json.dumps(value)}; it should be {wanted}"
    assert error["param"] == "max_tokens"


def test_a_list_without_items_is_told_how_many_it_needs() -> None:
    error = refused(application(), "/v1/chat/completions", {"messages": []})
    assert error["message"] == "messages is []; it should have at least 1 item"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": {"type": 5}}, "tool_choice.type is 5; it should be 'function'"),
        ({"tool_choice": {}}, "tool_choice.type is missing"),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "messages.0.content.0 is 5; it should be a valid object",
        ),
        ({"stop": ["a", 5]}, "stop.1 is 5; it should be a valid string"),
    ],
)
def test_what_has_the_form_of_a_type_is_told_what_that_type_lacks(
    fields: dict[str, Any], message: str
) -> None:
    """Not that it should be of another type, which was tried first."""
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    error = refused(application(), "/v1/chat/completions", body)
    assert error["message"] == message
    assert error["param"] == message.split(" is ")[0]
