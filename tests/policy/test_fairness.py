"""Fairness: what a request is ahead by, and that it is bounded on both sides."""

from __future__ import annotations

import pytest

from paceline.policy.fairness import AT_FIRST, FIRST_PART, MOST_AHEAD, MOST_BEHIND, Fairness
from paceline.request import Request
from tests.policy.machine import request


def one(fairness: Fairness, each: Request) -> float:
    (ahead,) = fairness.ahead([each])
    return ahead


def step(fairness: Fairness, plain_steps: float, *emitted: tuple[Request, int]) -> None:
    for each, count in emitted:
        fairness.emitted(each, count)
    fairness.passed(plain_steps)


def test_a_request_may_fall_behind_by_a_part_of_its_tokens_or_by_some() -> None:
    fairness, long, short = Fairness(0.03), request(1), request(2)
    short.max_len = short.prompt_len + 32
    assert long.remaining * FIRST_PART > AT_FIRST
    assert fairness.ahead([long, short]) == [AT_FIRST, 32 * FIRST_PART]


def test_who_gains_is_ahead_and_who_only_waits_falls_behind() -> None:
    fairness, gains, waits = Fairness(0.0), request(1), request(2)
    step(fairness, 1.5, (gains, 3), (waits, 1))
    assert fairness.ahead([gains, waits]) == [AT_FIRST + 1.5, AT_FIRST - 0.5]


@pytest.mark.parametrize("planned", [True, False])
def test_a_plain_step_returns_the_share_that_may_be_lost(planned: bool) -> None:
    fairness, each = Fairness(0.03), request(1)
    step(fairness, 4.0, (each, 1))
    before = one(fairness, each)
    for _ in range(10):
        if planned:
            step(fairness, 1.0, (each, 1))
        else:
            fairness.passed(1.0)
    assert one(fairness, each) == pytest.approx(before + 10 * 0.03)


def test_in_the_long_run_no_more_than_the_share_is_lost() -> None:
    """Neighbours take whatever a request that gains nothing has."""
    fairness, each, tokens, time = Fairness(0.03), request(1), 0, 0.0
    for _ in range(2000):
        length = 1.5 if one(fairness, each) >= 0.5 else 1.0
        step(fairness, length, (each, 1))
        tokens, time = tokens + 1, time + length
    assert tokens >= 0.97 * time - AT_FIRST
    assert tokens < 0.98 * time, "what may be taken is taken"


def test_the_past_is_bounded() -> None:
    fairness, each = Fairness(0.03), request(1)
    for _ in range(100):
        step(fairness, 1.0, (each, 5))
    assert one(fairness, each) == MOST_AHEAD
    for _ in range(100):
        step(fairness, 5.0, (each, 1))
    assert one(fairness, each) == -MOST_BEHIND


def test_a_finished_request_is_forgotten() -> None:
    fairness, each = Fairness(0.03), request(1)
    step(fairness, 3.0, (each, 1))
    fairness.finish(each)
    assert one(fairness, each) == AT_FIRST


def test_who_finishes_in_the_middle_of_a_step_leaves_nothing() -> None:
    fairness, ends, stays = Fairness(0.03), request(1), request(2)
    fairness.ahead([ends, stays])
    fairness.emitted(ends, 1)
    fairness.emitted(stays, 1)
    fairness.finish(ends)
    fairness.passed(2.0)
    assert set(fairness._ahead) == {stays.request_id}
    assert one(fairness, stays) < AT_FIRST
