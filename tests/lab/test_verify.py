"""Differences between two outputs and the verdict on them, by hand-made outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.request.request import TokenLogprobs
from paceline_lab.verify.verification import Difference, Regrets, Tally, difference


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = "stop"
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@pytest.mark.parametrize(
    ("plain", "speculative", "position", "count", "wrong_length"),
    [
        (Output([1, 2, 3]), Output([1, 9, 3]), 1, 1, False),
        (Output([1, 2, 3]), Output([1, 9, 3, 4, 5]), 1, 3, False),
        (Output([1, 2, 3]), Output([1, 2]), 2, 1, True),
        (Output([1, 2], "length"), Output([1, 2, 3], "length"), 2, 1, True),
        (Output([1, 2], "length"), Output([1, 4, 3], "length"), 1, 2, True),
        (Output([1, 2], "length"), Output([1, 4, 3], "stop"), 1, 2, False),
        (Output([1, 2], "length"), Output([1, 2], "stop"), 2, 1, True),
    ],
)
def test_difference(
    plain: Output, speculative: Output, position: int, count: int, wrong_length: bool
) -> None:
    found = difference(4, plain, speculative)
    assert found == Difference(4, position, count, wrong_length)
    assert difference(4, plain, Output(list(plain.token_ids), plain.finish_reason)) is None


def with_logprobs(*pairs: tuple[int, float]) -> Output:
    return Output(
        [token for token, _ in pairs], logprobs=[TokenLogprobs(t, x, 1, ()) for t, x in pairs]
    )


def test_logprobs_differ_up_to_the_first_other_token() -> None:
    one = with_logprobs((1, -0.5), (2, -0.25), (3, -1.0))
    tally = Tally()
    tally.add(one, with_logprobs((1, -0.5), (2, -0.26), (4, -2.0)), regrets([0.0, 0.0, 0.0]))
    assert (tally.num_logprob_tokens, tally.num_logprob_differences) == (2, 1)
    assert not tally.figures()["identical"]
    assert "1 log-probabilities differ" in tally.failures(True, 0.0)
    assert not tally.failures(False, 0.5)


def test_missing_logprobs_are_differences() -> None:
    tally = Tally()
    tally.add(Output([1, 2]), with_logprobs((1, -0.5), (2, -0.25)), regrets([0.0, 0.0]))
    assert tally.num_logprob_differences == 2


def regrets(inner: list[float], boundary: list[float] | None = None) -> Regrets:
    return Regrets(np.array(inner, float), np.array(boundary or [], float))


def test_figures_are_those_of_all_tokens() -> None:
    tally = Tally()
    tally.add(Output([1, 2, 3]), Output([1, 2, 3]), regrets([0.0, 0.0, 0.0]))
    tally.add(Output([1, 2, 3]), Output([1, 4, 5]), regrets([0.0, 0.25], [2.0]))
    tally.add(Output(list(range(200))), Output(list(range(200))), regrets([0.0] * 199 + [1.0]))
    figures = tally.figures()
    assert figures["identical"] is False
    assert figures["num_tokens"] == 206
    assert figures["num_differences"] == 2
    assert figures["num_differing_prompts"] == 1
    assert figures["max_regret"] == 1.0
    assert figures["p99_regret"] == 0.0  # one of 205 is less than one per cent
    assert figures["mean_regret"] == pytest.approx(1.25 / 205)
    assert figures["num_regret_tokens"] == 2
    assert figures["num_boundary_tokens"] == 1
    assert figures["max_boundary_excess"] == 2.0
    assert figures["first_differences"] == [{"prompt_index": 1, "position": 1}]


def test_nothing_compared_has_figures_too() -> None:
    assert Tally().figures()["p99_regret"] == 0.0
    assert not Tally().failures(True, 0.0)


@pytest.mark.parametrize(
    ("plain", "found", "scores", "strict", "loose"),
    [
        ([1, 2], [1, 2], regrets([0.0, 0.0]), [], []),
        ([1, 2], [1, 3], regrets([0.0, 0.1]), ["1 positions differ", "1 tokens have regret"], []),
        ([1, 2], [1, 2], regrets([0.0, 0.1]), ["1 tokens have regret"], []),
        (
            [1, 2],
            [1, 3],
            regrets([0.0, 3.0]),
            ["1 positions differ", "1 tokens have regret"],
            ["the largest regret is 3, above 0.5"],
        ),
        ([1, 2], [1, 2], regrets([0.0], [0.2]), ["1 tokens are outside a filter"], []),
        (
            [1, 2],
            [1, 2],
            regrets([0.0], [float("inf")]),
            ["1 tokens are outside a filter"],
            ["a token is inf outside a filter, more than 0.5"],
        ),
        (
            [1, 2],
            [1],
            regrets([0.0]),
            ["1 positions differ"],
            ["1 outputs have the wrong length"],
        ),
    ],
)
def test_failures(
    plain: list[int], found: list[int], scores: Regrets, strict: list[str], loose: list[str]
) -> None:
    tally = Tally()
    tally.add(Output(plain), Output(found), scores)
    assert tally.failures(True, 0.5) == strict
    assert tally.failures(False, 0.5) == loose
