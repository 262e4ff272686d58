"""How a model is sampled where a request says nothing: whose word goes first."""

from __future__ import annotations

import logging
from dataclasses import asdict

import pytest

from paceline import LLM, SamplingParams
from paceline.loading.catalogue import catalogue
from paceline.request.sampling_params import (
    FROM_CARD,
    FROM_FILES,
    LLAMA_CPP,
    UNSTATED,
    SamplingDefaults,
    sampling_defaults,
)

CARD = {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("files", "card", "expected"),
    [
        ({}, {}, SamplingDefaults(LLAMA_CPP, UNSTATED)),
        ({"eos_token_id": 2, "do_sample": True}, {}, SamplingDefaults(LLAMA_CPP, UNSTATED)),
        ({"eos_token_id": 2}, CARD, SamplingDefaults(CARD, FROM_CARD)),
        ({"top_k": 64}, CARD, SamplingDefaults({"top_k": 64}, FROM_FILES)),
    ],
)
def test_files_go_first_then_the_card_then_llama_cpps(
    files: dict[str, float], card: dict[str, float], expected: SamplingDefaults
) -> None:
    assert sampling_defaults(files, card) == expected


def test_values_that_no_request_can_have_are_told_to_the_log_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    makers = {"temperature": 0.6, "top_p": None, "top_k": "20", "min_p": 2, "do_sample": True}
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(makers).values == {"temperature": 0.6}
    told = " ".join(caplog.messages)
    assert "top_k is '20'" in told
    assert "min_p is 2" in told
    assert "top_p" not in told


def test_llama_cpps_are_those_of_b11549() -> None:
    """``common_params_sampling`` in common/common.h; /props of its server reports the same."""
    assert LLAMA_CPP == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def test_smollm2_has_its_model_cards() -> None:
    """The card's example calls ``generate`` with these."""
    assert catalogue()["smollm2"].sampling == CARD


def test_a_person_reads_what_changes_anything() -> None:
    assert str(SamplingDefaults(CARD, FROM_CARD)) == "temperature 0.2, top-p 0.9 (its model card)"
    assert str(SamplingDefaults({"top_k": 4}, "as asked")) == "temperature 1, top-k 4 (as asked)"


def test_python_without_parameters_samples_as_the_model_says_and_to_the_end() -> None:
    with LLM("embedded", speculative_config=[], max_model_len=64) as llm:
        assert llm.sampling_defaults == SamplingDefaults(LLAMA_CPP, UNSTATED)
        wished = llm.sampling_defaults.params()
        assert {**asdict(SamplingParams()), **LLAMA_CPP, "max_tokens": None} == asdict(wished)
        answer = llm.generate("def add(a, b):")
        assert answer.finish_reason == "stop" or len(answer.token_ids) > 16
        drawn = {tuple(llm.generate("def add(a, b):").token_ids) for _ in range(8)}
        assert len(drawn) > 1
        assert len(llm.generate("def add(a, b):", SamplingParams(max_tokens=3)).token_ids) <= 3
