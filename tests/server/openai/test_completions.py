"""``/v1/completions``: answers whole and streamed, batches, echo, log-probs, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.asgi import application, complete, engine_of, refused, streamed
from tests.server.fakes import ANSWER, FakeEngine

PATH = "/v1/completions"


def test_an_answer_has_openais_shape() -> None:
    answer = complete(application(), "Hello", max_tokens=100)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["system_fingerprint"].endswith("-float32-reference")
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
    refusal = refused(app, PATH, {"prompt": "text"})
    assert "the model has no tokenizer; send token ids" in refusal["message"]
    assert refusal["param"] is None
