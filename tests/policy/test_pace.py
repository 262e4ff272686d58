"""The value of time: plain at first, never below it, and bounded against hiccups."""

from __future__ import annotations

import pytest

from paceline.policy.pace import Pace


def test_the_plain_rate_at_a_cold_start_and_never_less() -> None:
    pace = Pace()
    assert pace.tokens_per_ms(4, 20.0) == pytest.approx(4 / 20.0)
    for _ in range(100):
        pace.observe(1.0, 3.0, 1.0)  # three times slower than plain
    assert pace.tokens_per_ms(4, 20.0) == pytest.approx(4 / 20.0)


def test_the_factor_follows_what_speculation_brings() -> None:
    pace = Pace()
    for _ in range(100):
        pace.observe(3.0, 1.5, 1.0)
    assert pace.factor == pytest.approx(2.0)
    for _ in range(100):
        pace.observe(1.0, 1.0, 1.0)
    assert pace.factor == pytest.approx(1.0, abs=0.02)


def test_overheads_belong_to_the_plain_step() -> None:
    pace = Pace()
    for _ in range(200):
        pace.observe_overhead(2.0)
    assert pace.plain_ms(18.0) == pytest.approx(20.0)
    pace.observe_overhead(1e6)  # the machine slept
    assert pace.overhead_ms < 2.2
    pace.observe_overhead(-5.0)  # a clock that jumped back
    assert pace.overhead_ms > 1.9


def test_no_time_is_worth_nothing() -> None:
    assert Pace().tokens_per_ms(1, 0.0) == 0.0


def test_what_a_draft_adds_to_a_step_is_told_apart() -> None:
    pace = Pace()
    for _ in range(100):
        pace.observe_overhead(2.0)
        pace.observe_drafted(3.5, 1)
    assert pace.overhead_ms == pytest.approx(2.0)
    assert pace.extra_ms(1) == pytest.approx(1.5, abs=0.01)
    assert pace.extra_ms(4) > 1.2 * pace.extra_ms(1)
    for _ in range(100):
        pace.observe_drafted(1.0, 1)
    assert pace.extra_ms(1) == pytest.approx(0.0, abs=0.01)


def test_the_first_drafts_of_a_program_do_not_tell_what_drafts_add() -> None:
    """They are slow, and a planner that believed them would see few others."""
    pace = Pace(overhead_ms=0.06)
    for _ in range(2):
        pace.observe_drafted(0.53, 4)
    assert pace.extra_ms(4) < 1.3 * Pace().extra_ms(4)
    known = Pace(overhead_ms=0.06, extra_ms=(0.02, 0.01))
    assert known.extra_ms(3) == pytest.approx(0.04)
