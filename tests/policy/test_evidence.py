"""Cells: no two kinds of evidence share one, and what a proposer is surer of is likelier."""

from __future__ import annotations

import pytest

from paceline.policy.evidence import (
    CELLS_PER_ORIGIN,
    LEAST_DEPTHS,
    MAX_DEPTH,
    PRIORS,
    STEPS,
    bucket_of,
    depth_range,
    logits_of,
    rows_of,
)


def test_depths_fall_into_their_ranges() -> None:
    ranges = [depth_range(depth) for depth in (1, 2, 3, 4, 5, 8, 9, 64)]
    assert ranges == [0, 1, 2, 2, 3, 3, 4, 4]


def test_a_cell_is_one_origin_one_range_of_depths_and_one_bucket() -> None:
    found: dict[int, set[tuple[int, int, int]]] = {}
    for number in (0, 1, 7):
        for depth, row in enumerate(rows_of("unknown", number)[1:], start=1):
            for cell, logit in row:
                # As proposed: its log-odds are the estimate's own.
                what = (number, depth_range(depth), bucket_of(logit))
                found.setdefault(cell, set()).add(what)
                assert number * CELLS_PER_ORIGIN <= cell < (number + 1) * CELLS_PER_ORIGIN
    assert all(len(kinds) == 1 for kinds in found.values())
    assert len(found) > 3 * len(LEAST_DEPTHS) * 8


@pytest.mark.parametrize("origin", ["unknown", *PRIORS])
def test_a_surer_proposer_is_likelier_right(origin: str) -> None:
    rows = rows_of(origin, 0)
    assert len(rows) == MAX_DEPTH + 1
    for row in rows:
        logits = [logit for _, logit in row]
        assert len(logits) == STEPS + 1
        assert logits == sorted(logits)
        assert logits[STEPS // 16] < logits[STEPS // 2] < logits[-1]


def test_a_cell_stands_for_the_mean_of_its_log_odds() -> None:
    rows = rows_of("unknown", 3)
    means = logits_of(rows)
    assert len(means) == CELLS_PER_ORIGIN
    for row in rows:
        for cell, logit in row:
            assert bucket_of(means[cell % CELLS_PER_ORIGIN]) == bucket_of(logit)
