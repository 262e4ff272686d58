"""What the replays of a chat model's drafts compare with: the target's own distribution."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from paceline.request.traces import Trace
from tests.programs import module

program = module("research.chat_drafts")


def answer(rank: int, probs: tuple[float, ...], count: int = 6) -> Trace:
    """Places that all have one distribution, and tokens of one rank in it."""
    top_ids = np.tile(np.arange(len(probs), dtype=np.int32), (count, 1))
    top_logprobs = np.tile(np.log(np.array(probs, np.float32)), (count, 1))
    tokens = np.array([9, *[rank] * count], np.int32)
    return Trace(0, 1, tokens, top_logprobs[:, rank], top_ids, top_logprobs)


@pytest.mark.parametrize(("rank", "nodes", "steps"), [(0, 1, 3), (0, 2, 2), (1, 1, 6), (1, 2, 6)])
def test_the_likeliest_nodes_of_the_targets_distribution_are_verified(
    rank: int, nodes: int, steps: int
) -> None:
    """Of 0.8 and 0.2 the second node is the likelier one's child."""
    counts = program.true_length([answer(rank, (0.8, 0.2))], 1.0, nodes)
    assert counts == {"steps": steps, "tokens": 6}


def test_a_temperature_flattens_the_distribution() -> None:
    probs = program.distributions(answer(0, (0.8, 0.2)), 2.0)
    assert probs[0].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_files_are_named() -> None:
    assert program.named("8 MB=a.ngram") == ("8 MB", "a.ngram")
    with pytest.raises(argparse.ArgumentTypeError, match="not NAME=FILE"):
        program.named("a.ngram")


def test_a_line_per_arm_has_a_column_per_number_of_nodes() -> None:
    counts = {"steps": 10, "tokens": 16, "calibration_error": 0.01, "log_loss": 0.3}
    (text,) = program.tables([program.row(0.8, "suffix", 5, counts)])
    cells = text.splitlines()[-1].split()
    assert cells == ["suffix", "0.8", "-", "-", "1.60", "-", "-", "0.010", "0.300"]


def test_a_file_is_compared_by_the_steps_of_the_same_answers() -> None:
    def row(arm: str, nodes: int, *answers: list[int]) -> dict[str, Any]:
        steps, tokens = (sum(each) for each in zip(*answers, strict=True))
        counts = {"steps": steps, "tokens": tokens, "answers": [*answers]}
        return dict(program.row(0.0, arm, nodes, counts))

    own, wider = row(program.BOTH, 5, [6, 9], [6, 9]), row(program.BOTH, 8, [1, 9], [1, 9])
    file = row(f"{program.BOTH}: other", 5, [3, 9], [5, 9])
    ratio = program.over_own(file, [wider, own, file])
    assert ratio["value"] == 1.5
    assert 1.2 <= ratio["low"] <= ratio["high"] <= 2.0
    samples = program.samples_of([own, file])
    assert [each["answers"] for each in samples] == [[[6, 9], [6, 9]], [[3, 9], [5, 9]]]
    assert "answers" not in own
