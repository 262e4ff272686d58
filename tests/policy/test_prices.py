"""Prices of further drafting: the hull of the cost ahead, and when a level meets them."""

from __future__ import annotations

from paceline.policy.prices import FREE, Prices, cheapest_ahead


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
    assert prices.are_met([(0.9, 1)]) == [True]  # 0.81 - 0.3 > 0.4
    assert prices.are_met([(0.8, 1)]) == [False]  # 0.64 - 0.3 is not
    # Together they pay for the level; who does not pay for a node of its own is left out.
    assert prices.are_met([(0.8, 1), (0.8, 1), (0.1, 1)]) == [True, True, False]
    assert FREE.are_met([(0.01, 3)]) == [True]
