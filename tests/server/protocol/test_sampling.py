"""Fields of bodies against what the engine is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.core.errors import RequestError
from paceline.request.sampling_params import (
    FROM_FILES,
    LLAMA_CPP,
    NEUTRAL,
    OLLAMA,
    SamplingDefaults,
    SamplingParams,
    SpeculativeParams,
)
from paceline.request.structured_outputs import StructuredOutputs
from paceline.server.chat.response_formats import response_shape
from paceline.server.http.errors import ApiError
from paceline.server.ollama.request import GenerateRequest, Options, completion_of
from paceline.server.protocol.completions import CompletionRequest
from paceline.server.protocol.sampling import sampling_params
from tests.server.fakes import FakeEngine, embedded_tokenizer

TOKENIZER = embedded_tokenizer()
HELLO = TOKENIZER.encode("hello", add_special_tokens=False)
OFF = SpeculativeParams(enabled=False)


def params_of(defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    info = FakeEngine(sampling=SamplingDefaults(defaults or NEUTRAL, FROM_FILES)).info
    wish = CompletionRequest.model_validate({"prompt": "a", **fields})
    shape, _ = response_shape(wish)
    return sampling_params(wish, info, TOKENIZER, max_tokens=5, structured=shape)


def test_nothing_said_is_the_engines_default() -> None:
    assert params_of() == SamplingParams(max_tokens=5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": 4, "min_p": 0.1}, {"top_p": 0.5, "top_k": 4, "min_p": 0.1}),
        ({"presence_penalty": -2, "frequency_penalty": 2.0}, None),
        ({"repetition_penalty": 1.5, "seed": -3, "n": 128}, None),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"], "include_stop_str_in_output": True}, {
            "stop": ("x", "y"), "include_stop_str_in_output": True}),
        ({"stop_token_ids": [3], "allowed_token_ids": [3, 4]}, {
            "stop_token_ids": (3,), "allowed_token_ids": (3, 4)}),
        ({"bad_words": ["a", "b c"]}, {"bad_words": ("a", "b c")}),
        ({"logit_bias": {"17": -100, "4": 2.5}}, {"logit_bias": {17: -100, 4: 2.5}}),
        # As llama.cpp b11549 reads it, tools/server/server-schema.cpp.
        ({"logit_bias": {"17": False, "4": 0}}, {"logit_bias": {4: 0}, "banned_token_ids": (17,)}),
        ({"logit_bias": [[17, -1], [4.0, False], [17, 3]]}, {
            "logit_bias": {17: 2}, "banned_token_ids": (4,)}),
        ({"logit_bias": [["hello", -1.5]]}, {"logit_bias": dict.fromkeys(HELLO, -1.5)}),
        ({"logit_bias": {"hello": False}}, {"banned_token_ids": tuple(HELLO)}),
        ({"top_p": 0, "top_k": 9}, {"top_p": 1.0, "top_k": 1}),
        ({"seed": -1}, {"seed": None}),
        # As llama.cpp b11549 draws it; its /props names this one (LLAMA_DEFAULT_SEED).
        ({"seed": 2**32 - 1}, {"seed": None}),
        ({"seed": 2**32 - 2}, None),
        ({"top_k": 4.0, "min_tokens": 2.0, "seed": 3.0}, {"top_k": 4, "min_tokens": 2, "seed": 3}),
        ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2}),
        ({"repeat_penalty": 1.0, "repeat_last_n": 64}, {"repetition_penalty": 1.0}),
        ({"ignore_eos": True, "min_tokens": 2, "prompt_logprobs": 3}, None),
        ({"speculative": {"enabled": False}}, {"speculative": OFF}),
        ({"disable_spec_decode": True}, {"speculative": OFF}),
        ({"disable_spec_decode": True, "speculative": {"enabled": False}}, {"speculative": OFF}),
        ({"speculative": {"method": ["ngram"], "num_speculative_tokens": 2}}, {
            "speculative": SpeculativeParams(True, ("prompt_lookup",), 2)}),
        ({"speculative": {"methods": ["ngram", "suffix"]}}, {
            "speculative": SpeculativeParams(methods=("prompt_lookup", "suffix"))}),
        ({"speculative": {"methods": []}}, {"speculative": SpeculativeParams(methods=())}),
        ({"num_speculative_tokens": 0}, {
            "speculative": SpeculativeParams(num_speculative_tokens=0)}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {
            "structured_outputs": StructuredOutputs(choice=("a", "b"))}),
        ({"structured_outputs": {"json": {"type": "object"}, "json_object": False}}, {
            "structured_outputs": StructuredOutputs(json={"type": "object"})}),
        ({"structured_outputs": {}}, {}),
        ({"user": "me", "cache_salt": "s"}, {}),
    ],
)  # fmt: skip
def test_each_field_arrives(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert params_of(**fields) == SamplingParams(
        max_tokens=5, **(fields if expected is None else expected)
    )


def test_a_model_that_states_nothing_is_sampled_as_the_api_is_used_to() -> None:
    info = FakeEngine(sampling=SamplingDefaults(LLAMA_CPP)).info
    plain = CompletionRequest.model_validate({"prompt": "a", "top_k": 3})
    ollamas = completion_of(GenerateRequest(model="m", prompt="a", options=Options(top_k=3)), "m")
    for wish, usual in ((plain, LLAMA_CPP), (ollamas, OLLAMA)):
        params = sampling_params(wish, info, TOKENIZER, max_tokens=5, structured=None)
        expected = {**NEUTRAL, **usual, "top_k": 3}
        assert {name: getattr(params, name) for name in NEUTRAL} == expected


def test_the_makers_defaults_hold_unless_something_is_said() -> None:
    makers = {"temperature": 0.6, "top_k": 20, "do_sample": True}
    assert params_of(makers).temperature == 0.6
    assert params_of(makers, temperature=0.0, top_k=0) == SamplingParams(
        max_tokens=5, temperature=0
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"disable_spec_decode": True, "speculative": {"enabled": True}}, "contradicts"),
        ({"num_speculative_tokens": 1, "speculative": {"num_speculative_tokens": 2}}, "contradict"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        (
            {"logit_bias": {TOKENIZER.decode([i, i + 1]): 1 for i in range(500, 2500, 2)}},
            "at most 1024 are allowed",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"min_tokens": 6}, "min_tokens is 6; allowed: values up to max_tokens, which is 5"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((RequestError, ApiError), match=message):
        params_of(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"repeat_penalty": 1.1, "repeat_last_n": 64},
        {"presence_penalty": 0.5, "repeat_last_n": 0},
        {"repeat_penalty": 1.1, "repetition_penalty": 1.1},
        {"logit_bias": {"17": True}},
        {"logit_bias": [[17]]},
        {"logit_bias": [[17, "x"]]},
        {"logit_bias": [["", 1]]},
        {"top_k": 4.5},
    ],
)
def test_what_would_mean_something_else_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        params_of(**fields)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0, 100)),
        ("min_p", (0, 1)),
        ("top_k", (-1, 1 << 30)),
        ("repetition_penalty", (1e-3, 100)),
        ("presence_penalty", (-2, 2)),
        ("frequency_penalty", (-2, 2)),
        ("seed", (-(2**63), 2**63 - 1)),
        ("n", (1, 128)),
    ],
)
def test_what_the_fields_allow_the_engine_takes(name: str, values: tuple[float, float]) -> None:
    for value in values:
        assert getattr(params_of(**{name: value}), name) == value
