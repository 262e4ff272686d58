"""An estimate: certain as far as it was seen lately, else its prior."""

from __future__ import annotations

import pytest

from paceline.planner.corrections import Estimate


def test_a_prior_that_is_worth_more_moves_less() -> None:
    firm, loose = Estimate(0.0, 9.0, 100.0), Estimate(0.0, 1.0, 100.0)
    for each in (firm, loose):
        each.learn(1.0)
    assert firm.mean() == pytest.approx(0.1)
    assert loose.mean() == pytest.approx(0.5)


def test_it_follows_what_is_seen_and_forgets_it_with_age() -> None:
    each = Estimate(0.0, 1.0, 6.0, memory=50.0)
    for now in range(100):
        each.learn(2.0, float(now))
    assert each.mean(99.0) == pytest.approx(2.0 * 6 / 7, rel=0.02)
    means = [each.mean(99.0 + age) for age in (0, 50, 200, 1e4)]
    variances = [each.state(99.0 + age)[1] for age in (0, 50, 200, 1e4)]
    assert means == sorted(means, reverse=True)
    assert variances == sorted(variances)
    assert means[-1] == pytest.approx(0.0, abs=1e-9)
    assert variances[-1] == pytest.approx(1.0)


def test_what_it_saw_counts_for_so_much_at_most() -> None:
    each = Estimate(0.0, 1.0, 4.0)
    for value in [1.0] * 100 + [0.0] * 20:
        each.learn(value)
    assert each.mean() < 0.02
    each.forget(0.0)
    assert each.state()[1] == 1.0
