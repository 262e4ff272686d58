"""What exploring may cost: a share of the time since something was last explored."""

from __future__ import annotations

import pytest

from paceline.planner.value import SAVED, SHARE, Exploration


def test_it_takes_its_share_of_the_time_and_no_more() -> None:
    exploration, spent, steps, cost = Exploration(), 0.0, 20_000, 0.7
    for _ in range(steps):
        if exploration.covers("a proposer", cost):
            exploration.spend("a proposer", cost)
            spent += cost
        exploration.passed(1.0)
    assert 0.9 * SHARE * steps < spent <= SHARE * steps


def test_what_is_cheap_leaves_what_is_dear_its_share() -> None:
    exploration, dear = Exploration(), 0
    for _ in range(20_000):
        for name, cost in (("lookup", 0.2), ("draft_model", 8.0)):
            if exploration.covers(name, cost):
                exploration.spend(name, cost)
                dear += cost == 8.0
        exploration.passed(1.0)
    assert dear == pytest.approx(SHARE * 20_000 / 8.0, abs=1.0)


def test_what_is_saved_lasts_for_few() -> None:
    exploration = Exploration()
    assert not exploration.covers("it", 1.0)
    exploration.passed(1e5)
    times = 0
    while exploration.covers("it", 1.0):
        exploration.spend("it", 1.0)
        times += 1
    assert times == SAVED


@pytest.mark.parametrize("jump", [float("nan"), float("inf"), -1e12, 1e12])
def test_a_clock_that_jumps_neither_ends_exploring_nor_pays_for_it(jump: float) -> None:
    exploration = Exploration()
    exploration.passed(jump)
    assert not exploration.covers("it", 1.0)
    exploration.passed(1.0 / SHARE)
    assert exploration.covers("it", 1.0)
