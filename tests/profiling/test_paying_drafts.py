"""Which drafts pay for being checked, by a cost table, against a look at every length."""

from __future__ import annotations

import random

import pytest

from paceline.planner.cost_table import CostPoint, CostTable, HostTime
from paceline.profiling.profile import (
    MOST_TOKENS,
    PayingDrafts,
    checking_cost,
    draft_sentences,
    paying_drafts,
)


def table(ratios: list[float], host: HostTime | None = None) -> CostTable:
    points = [CostPoint(1, 0, width, width, ms) for width, ms in enumerate(ratios, start=1)]
    return CostTable("a", points, host=host or HostTime())


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([1.0, 1.1, 1.2, 1.9, 2.1], PayingDrafts(3, 1)),  # 1.9 is less than 2 tokens
        ([1.0, 1.1, 1.2, 2.0, 1.9], PayingDrafts(2, 1)),  # no gap, although 4 would pay
        ([1.0, 2.5, 2.6, 2.9, 3.0], PayingDrafts(3, 2)),  # one right token is never enough
        ([1.0, 2.0, 3.0, 4.0, 5.0], None),
        ([1.0], None),
        ([1.0] * 100, PayingDrafts(MOST_TOKENS, 1)),
    ],
)
def test_the_longest_that_pay_with_the_fewest_right(
    ratios: list[float], found: PayingDrafts | None
) -> None:
    assert paying_drafts(table(ratios)) == found


def test_all_that_are_said_to_pay_do() -> None:
    drawn = random.Random(0)
    for _ in range(100):
        ratios = [1.0]
        for _ in range(20):
            ratios.append(ratios[-1] + drawn.choice([0.0, 0.1, 0.6, 1.1, 2.0]))
        costs = table(ratios)
        found = paying_drafts(costs)
        pays = {
            (count, right)
            for count in range(1, 21)
            for right in range(1, count + 1)
            if checking_cost(costs, count) < 1 + right
        }
        if found is None:
            assert not pays
            continue
        longest, needed = found
        assert needed == min(right for _, right in pays)
        assert {(count, needed) for count in range(needed, longest + 1)} <= pays
        assert (longest + 1, needed) not in pays


def test_the_host_counts() -> None:
    host = HostTime(step=1.0, draft=0.5, node=0.25, ask=0.5)
    assert checking_cost(table([1.0, 1.0, 1.0], host), 2) == pytest.approx((2.0 + 1.5) / 2.0)


@pytest.mark.parametrize(
    ("ratios", "sentences"),
    [
        (
            [1.0, 1.1, 1.2, 1.2, 1.25, 1.3, 2.5],
            [
                "Checking 4 tokens costs 1.25 plain steps here.",
                "Drafts of up to 5 tokens pay when 1 of them is right.",
            ],
        ),
        (
            [1.0, 2.5, 2.6, 2.9],
            [
                "Checking 3 tokens costs 2.90 plain steps here.",
                "Drafts of up to 3 tokens pay when 2 of them are right.",
            ],
        ),
        (
            [1.0, 1.5],
            [
                "Checking 1 token costs 1.50 plain steps here.",
                "A draft of 1 token pays when it is right.",
            ],
        ),
        (
            [1.0, 3.0, 5.0],
            [
                "Checking 2 tokens costs 5.00 plain steps here.",
                "No draft pays here, even if all of it is right.",
            ],
        ),
        ([1.0], []),
    ],
)
def test_sentences(ratios: list[float], sentences: list[str]) -> None:
    assert draft_sentences(table(ratios)) == sentences
