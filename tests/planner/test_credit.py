"""Credits: what a request is ahead by, and that it is bounded on both sides."""

from __future__ import annotations

import pytest

from paceline.planner.pace import AT_FIRST, FIRST_PART, MOST_AHEAD, Credits
from paceline.request.request import Request
from tests.planner.machine import request


def one(credit: Credits, each: Request) -> float:
    (ahead,) = credit.ahead([each])
    return ahead


def step(
    credit: Credits, plain_steps: float, *emitted: tuple[Request, int], slowdown: float = 0.03
) -> None:
    for each, count in emitted:
        credit.emitted(each, count)
    credit.passed(plain_steps, slowdown)


def test_a_request_may_fall_behind_by_a_part_of_its_tokens_or_by_some() -> None:
    credit, long, short = Credits(), request(1), request(2)
    short.max_len = short.prompt_len + 32
    assert long.remaining * FIRST_PART > AT_FIRST
    assert credit.ahead([long, short]) == [AT_FIRST, 32 * FIRST_PART]


def test_who_gains_is_ahead_and_who_only_waits_falls_behind() -> None:
    credit, gains, waits = Credits(), request(1), request(2)
    step(credit, 1.5, (gains, 3), (waits, 1), slowdown=0.0)
    assert credit.ahead([gains, waits]) == [AT_FIRST + 1.5, AT_FIRST - 0.5]


@pytest.mark.parametrize("planned", [True, False])
def test_a_plain_step_returns_the_share_that_may_be_lost(planned: bool) -> None:
    credit, each = Credits(), request(1)
    step(credit, 4.0, (each, 1))
    before = one(credit, each)
    for _ in range(10):
        if planned:
            step(credit, 1.0, (each, 1))
        else:
            credit.passed(1.0, 0.03)
    assert one(credit, each) == pytest.approx(before + 10 * 0.03)


def test_in_the_long_run_no_more_than_the_share_is_lost() -> None:
    """Neighbours take whatever a request that gains nothing has."""
    credit, each, tokens, time = Credits(), request(1), 0, 0.0
    for _ in range(2000):
        length = 1.5 if one(credit, each) >= 0.5 else 1.0
        step(credit, length, (each, 1))
        tokens, time = tokens + 1, time + length
    assert tokens >= 0.97 * time - AT_FIRST
    assert tokens < 0.98 * time, "what may be taken is taken"


def test_what_a_request_gains_is_bounded() -> None:
    credit, each = Credits(), request(1)
    for _ in range(100):
        step(credit, 1.0, (each, 5))
    assert one(credit, each) == MOST_AHEAD


def test_a_finished_request_is_forgotten() -> None:
    credit, each = Credits(), request(1)
    step(credit, 3.0, (each, 1))
    credit.finish(each)
    assert one(credit, each) == AT_FIRST


def test_who_finishes_in_the_middle_of_a_step_leaves_nothing() -> None:
    credit, ends, stays = Credits(), request(1), request(2)
    credit.ahead([ends, stays])
    credit.emitted(ends, 1)
    credit.emitted(stays, 1)
    credit.finish(ends)
    credit.passed(2.0, 0.03)
    assert one(credit, ends) == AT_FIRST
    assert one(credit, stays) < AT_FIRST
