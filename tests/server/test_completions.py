"""``/v1/completions``: answers whole and streamed, batches, echo, log-probs, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import EngineDeadError, RequestFailedError
from tests.server.asgi import application, complete, engine_of, events, post, refused
from tests.server.fakes import ANSWER, FakeEngine

PATH = "/v1/completions"


def streamed(app: Any, prompt: Any = "Once", **body: Any) -> list[Any]:
    response = post(app, PATH, {"prompt": prompt, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def test_an_answer_has_openais_shape() -> None:
    answer = complete(application(), "Hello", max_tokens=100)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": ANSWER,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "metrics" not in usage


def test_sixteen_tokens_are_the_default_within_the_context() -> None:
    assert complete(application())["usage"]["completion_tokens"] == 16
    app = application(FakeEngine(max_model_len=10))
    assert complete(app, [1, 2, 3])["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2), (["a"], 1)],
)
def test_prompts_are_text_or_ids_one_or_many(prompt: Any, count: int) -> None:
    app = application()
    answer = complete(app, prompt, n=2, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    calls = engine_of(app).calls
    assert len(calls) == count
    encode = engine_of(app).tokenizer.encode
    single = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    assert [c.token_ids for c in calls] == [encode(p) if isinstance(p, str) else p for p in single]
    assert answer["usage"]["prompt_tokens"] == sum(len(c.token_ids) for c in calls)
    assert answer["usage"]["completion_tokens"] == 2 * count * 3


def test_special_tokens_are_added_unless_told_otherwise() -> None:
    app = application()
    complete(app, "a", add_special_tokens=False)
    tokenizer = engine_of(app).tokenizer
    assert engine_of(app).calls[0].token_ids == tokenizer.encode("a", add_special_tokens=False)


def test_a_stream_is_the_answer_in_pieces() -> None:
    app = application()
    pieces = streamed(app, max_tokens=100)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == ANSWER
    assert [p["choices"][0]["finish_reason"] for p in pieces][-1] == "stop"
    assert all(p["choices"][0]["finish_reason"] is None for p in pieces[:-1])
    assert len({piece["id"] for piece in pieces}) == 1
    assert all("usage" not in piece for piece in pieces)


def test_a_streams_usage_comes_last_with_no_choices() -> None:
    pieces = streamed(application(), max_tokens=3, stream_options={"include_usage": True})
    assert all(piece["usage"] is None for piece in pieces[:-1])
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"return_origins": True, "echo": True},
        {"stop": ["Spain"], "prompt_logprobs": 1},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
    ],
)
def test_streams_and_bodies_say_the_same(options: dict[str, Any]) -> None:
    app = application()
    request = {"max_tokens": 9, "n": 2, **options}
    whole = complete(app, ["Once", "Twice"], **request)["choices"]
    pieces = streamed(app, ["Once", "Twice"], **request)
    for choice in whole:
        parts = [c for p in pieces for c in p["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] is not None
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        for name in choice["logprobs"] or ():
            told = [each for part in parts if part["logprobs"] for each in part["logprobs"][name]]
            assert told == choice["logprobs"][name]
        assert [t for part in parts for t in part.get("tokens", [])] == choice.get("tokens", [])
        told = [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part]
        assert told == ([choice["prompt_logprobs"]] if "prompt_logprobs" in choice else [])


def test_logprobs_are_parallel_lists_with_offsets_into_the_text() -> None:
    [choice] = complete(application(), max_tokens=20, logprobs=2)["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"][:-1]) == choice["text"]  # the last ends the text
    assert told["text_offset"][:3] == [0, len(told["tokens"][0]), len("".join(told["tokens"][:2]))]
    for token, logprob, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == -0.5
        assert len(top) == 2


def test_echo_brings_the_prompt_and_its_logprobs() -> None:
    """What an evaluation harness sends: the prompt scored, and one token that it ignores."""
    app = application()
    [choice] = complete(app, "Hello world", echo=True, max_tokens=1, logprobs=1)["choices"]
    assert choice["text"].startswith("Hello world")
    told = choice["logprobs"]
    num_prompt = len(engine_of(app).calls[0].token_ids)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert "".join(told["tokens"][:num_prompt]) == "Hello world"
    assert all(len(told[name]) == num_prompt + 1 for name in told)
    assert told["text_offset"][num_prompt] == len("Hello world")
    assert engine_of(app).calls[0].params.prompt_logprobs == 1


def test_echo_alone_answers_with_the_prompt() -> None:
    app = application()
    answer = complete(app, [[3113, 397]], echo=True, max_tokens=0, logprobs=0)
    [choice] = answer["choices"]
    assert choice["text"] == engine_of(app).tokenizer.decode([3113, 397])
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 2
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_vllms() -> None:
    [choice] = complete(application(), [7, 8], prompt_logprobs=2, max_tokens=1)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["8"] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": second["8"]["decoded_token"],
    }
    assert set(second) == {"8", "9"}


def test_origins_and_metrics_come_when_asked_for() -> None:
    answer = complete(application(), max_tokens=6, return_origins=True, include_metrics=True)
    [choice] = answer["choices"]
    assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    assert [t["origin"] for t in choice["tokens"]] == ["prompt_lookup", "target"] * 3
    told = answer["usage"]["metrics"]["speculative_decoding"]
    assert told["num_steps"] == told["num_drafts"] == told["num_accepted_tokens"] == 3
    assert told["mean_acceptance_length"] == 2.0
    assert told["acceptance_rate"] == 1.0
    assert told["accepted_per_position"] == [3]
    assert told["num_accepted_by_origin"] == {"prompt_lookup": 3}


def test_a_model_without_a_tokenizer_takes_ids() -> None:
    app = application(FakeEngine(tokenizer=None, answer=[5, 6]))
    [choice] = complete(app, [1, 2], logprobs=0, return_origins=True)["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:0"]
    assert "tokenizer" in refused(app, PATH, {"prompt": "text"})["message"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "prompt is missing", "prompt"),
        ({"prompt": "a", "top_q": 1}, "unknown field 'top_q'", "top_q"),
        ({"prompt": "a", "suffix": "b"}, "suffix is not supported: ", "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of is not supported: ", "best_of"),
        ({"prompt": []}, "prompt has 0 prompts; allowed are 1 to 4096", "prompt"),
        ({"prompt": [[]]}, "none of them empty", "prompt"),
        ({"prompt": ["a", [1]]}, "a string, a list of token ids, or a list", "prompt"),
        ({"prompt": [[1, True]]}, "token ids are whole numbers", "prompt"),
        ({"prompt": [1, -5]}, "token ids are whole numbers", "prompt"),
        ({"prompt": {"a": 1}}, "prompt must be a string", "prompt"),
        ({"prompt": 0}, "prompt must be a string", "prompt"),
        ({"prompt": [1, "a"]}, "prompt must be a string", "prompt"),
        ({"prompt": "a", "temperature": "hot"}, 'temperature is "hot"; it should', "temperature"),
        ({"prompt": "a", "temperature": -1}, "greater than or equal to 0", "temperature"),
        ({"prompt": "a", "n": 17}, "n is 17; it should be less than or equal to 16", "n"),
        ({"prompt": "a", "logprobs": 21}, "less than or equal to 20", "logprobs"),
        ({"prompt": "a", "stop": [""]}, "at least 1 character", "stop.0"),
        ({"prompt": "a", "stop": ["a"] * 33}, "at most 32", "stop"),
        (
            {"prompt": "a", "logit_bias": {"x": 1}},
            "token 'x'; keys must be token ids",
            "logit_bias",
        ),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, "the vocabulary is 0 to 4095", "logit_bias"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; that is for echo", "max_tokens"),
        ({"prompt": "a", "stream_options": {}}, "only allowed with stream", "stream_options"),
        ({"prompt": "a", "skip_special_tokens": False}, "it should be True", "skip_special_tokens"),
        ({"prompt": "a", "speculative": {"method": "magic"}}, "method is 'magic'", "method"),
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


def test_one_failure_in_a_batch_ends_all_of_it() -> None:
    app = application(FakeEngine(error_at=(2, RequestFailedError("the sampler failed"))))
    assert refused(app, PATH, {"prompt": ["a", "b", "c"]}, 500)["code"] == "request_failed"
    assert all(made.aborted for made in engine_of(app).calls)
    assert app.state.serving.admission.num_unfinished == 0


def test_a_dead_engine_refuses_with_a_500() -> None:
    app = application(FakeEngine(dies_at=0))
    assert refused(app, PATH, {"prompt": "a", "stream": True}, 500)["code"] == "engine_dead"
