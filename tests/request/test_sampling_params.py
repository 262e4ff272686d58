"""What callers may ask of a request: vLLM's defaults are taken, and others are typed errors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import RequestError
from paceline.request.sampling_params import SamplingParams, SpeculativeParams


@pytest.mark.parametrize(
    "name",
    [
        *("stop", "stop_token_ids", "bad_words", "bad_words_ids", "logit_bias", "speculative"),
        *("allowed_token_ids", "banned_token_ids", "logprob_token_ids"),
    ],
)
def test_none_is_the_default(name: str) -> None:
    asked: dict[str, Any] = {name: None}
    assert SamplingParams(**asked) == SamplingParams()


def test_a_string_is_one_item_of_a_list() -> None:
    assert SamplingParams(bad_words="abc") == SamplingParams(bad_words=["abc"])
    assert SamplingParams(stop="abc") == SamplingParams(stop=["abc"])


def test_a_mapping_says_what_is_speculated() -> None:
    asked: Any = {"methods": "suffix", "num_speculative_tokens": 2}
    wish = SpeculativeParams(methods=("suffix",), num_speculative_tokens=2)
    assert SamplingParams(speculative=asked) == SamplingParams(speculative=wish)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop": 5}, "stop has 5 where a list is needed"),
        ({"stop_token_ids": 5}, "stop_token_ids has 5"),
        ({"allowed_token_ids": 5}, "allowed_token_ids has 5"),
        ({"logprob_token_ids": 5}, "logprob_token_ids has 5"),
        ({"bad_words": [5]}, "bad_words holds '5'"),
        ({"bad_words_ids": [1]}, "bad_words_ids has 1"),
        ({"bad_words_ids": [None]}, "bad_words_ids holds an empty list"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; allowed: mappings"),
        ({"speculative": True}, "speculative is True; allowed: SpeculativeParams"),
        (
            {"speculative": {"method": "suffix"}},
            r"'method' \(did you mean methods\?\); allowed: en",
        ),
        (
            {"temprature": 0.5},
            r"no field 'temprature' \(did you mean temperature\?\); allowed: max_",
        ),
        ({"xyz": 1}, "SamplingParams has no field 'xyz'; allowed: max_tokens, min_tokens, temp"),
        ({"speculative": {"methods": 5}}, "speculative.methods has 5"),
        ({"speculative": {"enabled": 1}}, "speculative.enabled is 1"),
    ],
)
def test_other_values_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**asked)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"top_p": 2.0}, "top_p"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {1: 1000.0}}, "logit_bias"),
        ({"speculative": {"methods": "nobody's"}}, "speculative.method"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"temprature": 0.5}, "temprature"),
    ],
)
def test_an_error_has_the_name_of_its_field(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**asked)
    assert caught.value.param == param
    assert pickle.loads(pickle.dumps(caught.value)).param == param


def test_parameters_can_be_copied_and_compared() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert replace(params) == pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(RequestError, match="did you mean temperature"):
        replace(params, temprature=1.0)  # type: ignore[call-arg]
