"""The value of time: plain at first, never below it, and bounded against hiccups."""

from __future__ import annotations

import pytest

from paceline.planner.cost_table import NO_HOST_TIME, HostTime, StepShape
from paceline.planner.pace import USUAL_ASK_MS, Pace, StepReport


def step(
    pace: Pace,
    total_ms: float,
    emitted: float = 1.0,
    forward_ms: float = 1.0,
    nodes: int = 0,
    asked: bool = False,
    requests: int = 1,
) -> None:
    """A step of requests that all decode; its proposers took no time."""
    shape = StepShape(requests + nodes, 0, 0, requests + nodes, requests)
    report = StepReport(shape, forward_ms, total_ms, requests, round(requests * emitted))
    pace.observe(report, 1.0, 0.0, asked)


def test_the_plain_rate_at_a_cold_start_and_never_less() -> None:
    pace = Pace(NO_HOST_TIME)
    assert pace.tokens_per_ms(4, 20.0) == pytest.approx(4 / 20.0)
    for _ in range(100):
        step(pace, 3.0, forward_ms=3.0)  # three times slower than plain
    assert pace.tokens_per_ms(4, 20.0) == pytest.approx(4 / 20.0)


def test_the_factor_follows_what_speculation_brings() -> None:
    pace = Pace(NO_HOST_TIME)
    for _ in range(100):
        step(pace, 1.5, emitted=3.0, forward_ms=1.5, nodes=4, asked=True)
    assert pace.factor == pytest.approx(2.0)
    for _ in range(100):
        step(pace, 1.0)
    assert pace.factor == pytest.approx(1.0, abs=0.02)


def test_overheads_belong_to_the_plain_step() -> None:
    pace = Pace(NO_HOST_TIME)
    for _ in range(200):
        step(pace, 3.0)
    assert pace.plain_ms(18.0) == pytest.approx(20.0)
    step(pace, 1e6)  # the machine slept
    assert pace.overhead_ms < 2.2
    step(pace, -5.0)  # a clock that jumped back
    assert pace.overhead_ms > 1.9


def test_a_slow_first_step_does_not_hide_what_asking_takes() -> None:
    pace = Pace(NO_HOST_TIME)
    step(pace, 1.6)
    for _ in range(200):  # none of them without asking
        step(pace, 1.4, asked=True)
    assert pace.overhead_ms == pytest.approx(0.4, abs=0.01)
    assert pace.ask_ms == pytest.approx(USUAL_ASK_MS)
    for _ in range(200):
        step(pace, 1.25)
        step(pace, 1.4, asked=True)
    assert pace.overhead_ms == pytest.approx(0.25, abs=0.01)
    assert pace.ask_ms == pytest.approx(0.15, abs=0.01)


def test_what_a_lone_request_takes_says_nothing_of_a_plain_step_of_many() -> None:
    pace = Pace(NO_HOST_TIME)
    step(pace, 2.0, requests=8)
    for _ in range(50):
        step(pace, 1.4, asked=True)
    assert pace.overhead_ms == 1.0


def test_no_time_is_worth_nothing() -> None:
    assert Pace(NO_HOST_TIME).tokens_per_ms(1, 0.0) == 0.0


def test_what_asking_in_vain_takes_and_what_a_draft_adds_are_told_apart() -> None:
    pace = Pace(NO_HOST_TIME)
    for _ in range(100):
        step(pace, 3.0)
        step(pace, 3.25, asked=True)
        step(pace, 4.75, nodes=3, asked=True)
    assert pace.overhead_ms == pytest.approx(2.0)
    assert pace.ask_ms == pytest.approx(0.25, abs=0.01)
    assert pace.draft_ms(1) == pytest.approx(1.5, abs=0.01)
    assert pace.draft_ms(4) > 1.2 * pace.draft_ms(1)
    for _ in range(100):
        step(pace, 3.0, nodes=3, asked=True)
    assert pace.draft_ms(1) == pytest.approx(0.0, abs=0.01)


def test_the_first_drafts_of_a_program_do_not_tell_what_drafts_add() -> None:
    """They are slow, and a planner that believed them would see few others."""
    pace = Pace(HostTime(step=0.06))
    for _ in range(2):
        step(pace, 1.53 + 0.06 + USUAL_ASK_MS, nodes=3, asked=True, requests=4)
    assert pace.draft_ms(4) < 1.3 * Pace(NO_HOST_TIME).draft_ms(4)
    known = Pace(HostTime(draft=0.02, further_draft=0.01))
    assert known.draft_ms(3) == pytest.approx(0.04)
