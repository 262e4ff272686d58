"""Prices of further drafting: the hull of the cost ahead, and when a level meets them."""

from __future__ import annotations

from paceline.planner.choice import cheapest_ahead
from paceline.planner.drafts import FREE, Prices


def test_the_cheapest_way_ahead_looks_over_cliffs() -> None:
    growth = [10.0, 18.8, 27.1, 21.1, 24.7]
    slopes = cheapest_ahead(growth)
    assert slopes[0] == (24.7 - 10.0) / 4  # not the 8.8 of the next node
    assert abs(slopes[1] - (21.1 - 18.8) / 2) < 1e-12
    assert slopes[2] == 0.0  # downhill is free, not a gift
    assert abs(slopes[3] - 3.6) < 1e-12
    assert slopes[4] == slopes[3]
    assert cheapest_ahead([10.0]) == [0.0]


def test_brute_force_agrees() -> None:
    growth = [float(ms) for ms in (5, 9, 6, 7, 15, 15, 15, 30, 17, 40)]
    for n, slope in enumerate(cheapest_ahead(growth)[:-1]):
        ahead = [(growth[m] - growth[n]) / (m - n) for m in range(n + 1, len(growth))]
        assert abs(slope - max(0.0, min(ahead))) < 1e-12


def test_a_level_has_to_pay_for_its_nodes_and_itself() -> None:
    prices = Prices(nodes=[0.3, 0.3], level=0.4)
    assert prices.are_met([(0, [0.9])]) == [True]  # 0.81 - 0.3 > 0.4
    assert prices.are_met([(0, [0.8])]) == [False]  # 0.64 - 0.3 is not
    # Together they pay for the level; who does not pay for a node of its own is left out.
    assert prices.are_met([(0, [0.8]), (1, [0.8]), (2, [0.1])]) == [True, True, False]
    assert FREE.are_met([(0, [0.3, 0.2, 0.2])]) == [True]


def test_what_was_learnt_of_a_depth_counts_on_the_way_down() -> None:
    prices = Prices([0.3], 0.0, lambda index, depth, prob: prob if depth == 1 else 0.1 * index)
    # 0.9 and then 0.5: a third one would be reached at 0.45 ** 1.5 = 0.302; with 0.4, 0.216.
    assert prices.are_met([(5, [0.9, 0.7]), (4, [0.9, 0.7])]) == [True, False]
