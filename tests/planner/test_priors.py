"""Priors: depths fall into their ranges, and what a proposer is surer of is likelier."""

from __future__ import annotations

import pytest

from paceline.planner.priors import LEAST_DEPTHS, PRIORS, STEPS, depth_range, logits_of


def test_depths_fall_into_their_ranges() -> None:
    ranges = [depth_range(depth) for depth in (1, 2, 3, 4, 5, 8, 9, 64)]
    assert ranges == [0, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("origin", ["unknown", *PRIORS])
def test_a_surer_proposer_is_likelier_right(origin: str) -> None:
    rows = logits_of(origin)
    assert len(rows) == LEAST_DEPTHS[-1] + 1
    for row in rows:
        assert len(row) == STEPS + 1
        assert row == sorted(row)
        assert row[STEPS // 16] < row[STEPS // 2] < row[-1]
