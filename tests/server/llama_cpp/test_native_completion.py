"""``POST /completion``: the form of llama.cpp's server, and what its fields ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.asgi import application, complete, engine_of, post, refused
from tests.server.fakes import ANSWER, embedded_tokenizer

PATH = "/completion"
# What /completion of llama.cpp b11549 (xllamacpp 2026.10.11549) answers {"prompt": "Once upon a
# time", "n_predict": 4, "temperature": 0, "seed": 1, "n_probs": 1}: names and types of its fields.
WHOLE: dict[str, type] = {
    "index": int,
    "content": str,
    "tokens": list,
    "id_slot": int,
    "stop": bool,
    "model": str,
    "tokens_predicted": int,
    "tokens_evaluated": int,
    "generation_settings": dict,
    "prompt": str,
    "has_new_line": bool,
    "truncated": bool,
    "stop_type": str,
    "stopping_word": str,
    "tokens_cached": int,
    "timings": dict,
    "completion_probabilities": list,
}
PIECE = ["index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"]
TIMINGS = [
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
]
DRAFTS = ["draft_n", "draft_n_accepted"]  # where there were some
SETTINGS: dict[str, Any] = {
    "seed": 1,
    "temperature": 0.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "stop": [],
    "max_tokens": 4,
    "n_predict": 4,
    "n_keep": 0,
    "n_discard": 0,
    "ignore_eos": False,
    "stream": False,
    "logit_bias": [],
    "n_probs": 1,
    "min_keep": 0,
    "grammar": "",
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "chat_format": "Content-only",
    "reasoning_format": "deepseek",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": [
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
        "temperature",
    ],
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}
OTHERS_HERE = {"repeat_last_n", "reasoning_format", "samplers"}
FILTERED = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}


def answered(app: Any, prompt: Any = "Once", **fields: Any) -> Any:
    response = post(app, PATH, {"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(app: Any, prompt: Any = "Once", **fields: Any) -> list[dict[str, Any]]:
    text = post(app, PATH, {"prompt": prompt, "stream": True, **fields}).text
    *blocks, last = text.split("\n\n")
    assert last == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_the_form_is_llama_cpps() -> None:
    whole = answered(application(), n_predict=4, temperature=0, seed=1, n_probs=1, **FILTERED)
    assert {name: type(value) for name, value in whole.items()} == WHOLE
    assert list(whole["timings"]) == [*TIMINGS, *DRAFTS]
    settings = whole["generation_settings"]
    assert settings.keys() == SETTINGS.keys()
    assert {name for name in settings if settings[name] != SETTINGS[name]} == OTHERS_HERE
    (first, *_) = whole["completion_probabilities"]
    assert list(first) == ["id", "token", "bytes", "logprob", "top_logprobs"]
    assert list(first["top_logprobs"][0]) == ["id", "token", "bytes", "logprob"]
    assert first["token"].encode() == bytes(first["bytes"])
    assert "".join(entry["token"] for entry in whole["completion_probabilities"]) == ANSWER[:12]
    assert whole["tokens_cached"] == whole["tokens_evaluated"] + 4 - 1


def test_the_form_of_a_stream_is_llama_cpps() -> None:
    app = application()
    whole = answered(app, n_predict=4)
    *pieces, last = streamed(app, n_predict=4, n_probs=1)
    assert [list(piece) for piece in pieces] == [[*PIECE, "completion_probabilities"]] * 4
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["tokens_predicted"] for piece in pieces] == [1, 2, 3, 4]
    assert last.keys() == whole.keys()
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    *pieces, _ = streamed(app, n_predict=2, timings_per_token=True)
    assert [list(piece["timings"]) for piece in pieces] == [TIMINGS, [*TIMINGS, *DRAFTS]]


def test_what_is_generated_is_the_completion_s() -> None:
    app = application()
    text = complete(app, max_tokens=6)["choices"][0]["text"]
    for path in (PATH, "/completions"):
        assert post(app, path, {"prompt": "Once", "n_predict": 6}).json()["content"] == text
    first, *others = [call.token_ids for call in engine_of(app).calls]
    assert others == [first, first]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Once", ["Once"]),
        ({"prompt_string": "Once"}, ["Once"]),
        (["Once"], ["Once"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        (["Once", {"prompt_string": "Twice"}], ["Once", "Twice"]),
    ],
)
def test_prompts_are_texts(prompt: Any, texts: list[str]) -> None:
    app = application()
    told = answered(app, prompt, n_predict=1)
    assert isinstance(told, list) == (len(texts) > 1)
    told = told if isinstance(told, list) else [told]
    assert [each["prompt"] for each in told] == texts
    assert [each["index"] for each in told] == [*range(len(texts))]


def test_prompts_are_ids_or_both() -> None:
    app, encode = application(), embedded_tokenizer().encode
    ids = encode("Once")
    for prompt, asked in (
        (ids, [ids]),
        ([*ids, " upon"], [[*ids, *encode(" upon")]]),
        (["Once", *ids], [[*ids, *ids]]),
        (["Once", ids, ["a", *ids]], [ids, ids, [*encode("a"), *ids]]),
    ):
        answered(app, prompt, n_predict=1)
        assert [call.token_ids for call in engine_of(app).calls[-len(asked) :]] == asked


@pytest.mark.parametrize("prompt", [[], [["a", "b"]], [[]], [1.5], [-1], {"text": "a"}, None, 3])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    assert refused(application(), PATH, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "stop_type", "word"),
    [
        ({"n_predict": 2}, "limit", ""),
        ({"max_tokens": 2}, "limit", ""),
        ({"n_predict": 0}, "limit", ""),
        ({"n_predict": -1}, "eos", ""),
        ({"stop": ["stays"]}, "word", "stays"),
    ],
)
def test_why_an_answer_ends(fields: dict[str, Any], stop_type: str, word: str) -> None:
    app = application()
    for told in (answered(app, **fields), streamed(app, **fields)[-1]):
        assert (told["stop_type"], told["stopping_word"]) == (stop_type, word)
    if fields.get("n_predict") == 0:
        assert answered(app, **fields)["content"] == ""
        assert len(streamed(app, **fields)) == 1


def test_tokens_are_told_where_they_are_asked_for() -> None:
    app = application()
    ids = embedded_tokenizer().encode(ANSWER, add_special_tokens=False)[:3]
    assert answered(app, n_predict=3)["tokens"] == []
    assert answered(app, n_predict=3, return_tokens=True)["tokens"] == ids
    pieces = streamed(app, n_predict=3)
    assert [token for piece in pieces for token in piece["tokens"]] == ids


def test_only_chosen_parts_are_told() -> None:
    told = answered(
        application(), n_predict=4, response_fields=["content", "a", "timings/prompt_n"]
    )
    assert told == {"content": ANSWER[:12], "timings/prompt_n": told["timings/prompt_n"]}


def test_a_request_may_keep_to_itself() -> None:
    app = application()
    for fields in ({}, {"cache_prompt": True}, {"cache_prompt": False}, {"cache_prompt": False}):
        answered(app, n_predict=1, **fields)
    usual, same, *own = [call.cache_salt for call in engine_of(app).calls]
    assert usual == same
    assert len({usual, *own}) == 3


def test_an_empty_grammar_is_none_and_an_empty_schema_any_object() -> None:
    app = application()
    answered(app, grammar="", n_predict=1)
    answered(app, json_schema={}, n_predict=1)
    none, any_object = [call.params.structured_outputs for call in engine_of(app).calls]
    assert none is None
    assert json.loads(any_object.source) == {"type": "object"}


def test_several_answers_are_a_list() -> None:
    told = answered(application(), n_predict=2, n_cmpl=2)
    assert [each["index"] for each in told] == [0, 1]
    assert {each["prompt"] for each in told} == {"Once"}


def test_settings_that_are_told_may_be_sent_back() -> None:
    app = application()
    settings = answered(app, n_predict=4)["generation_settings"]
    assert answered(app, **settings)["generation_settings"] == settings


@pytest.mark.parametrize(
    "fields",
    [
        {"post_sampling_probs": True},
        {"return_progress": True},
        {"mirostat": 2},
        {"lora": [{"id": 0, "scale": 1.0}]},
        {"n_probs": 21},
        {"echo": True},
        {"return_token_ids": True},
        {"samplers": ["dry"]},
        {"repeat_penalty": 1.1, "repeat_last_n": 64},
        {"n_predict": 3, "max_tokens": 4},
        {"t_max_predict_ms": 100},
    ],
)
def test_what_is_not_here_is_refused_by_name(fields: dict[str, Any]) -> None:
    error = refused(application(), PATH, {"prompt": "a", **fields})
    name = list(fields)[-1] if "repeat_penalty" in fields else next(iter(fields))
    assert name in f"{error['param']} {error['message']}"
