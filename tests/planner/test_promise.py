"""What chosen drafts keep of what they promise."""

from __future__ import annotations

import pytest

from paceline.planner.acceptance import PROMISE_TRUST, Promise


def follow(promise: Promise, promised: float, accepted: int, steps: int = 1000) -> float:
    for _ in range(steps):
        promise.observe(promised, accepted)
        promise.passed(1)
    return promise.kept


def test_it_follows_what_drafts_bring() -> None:
    promise = Promise()
    assert promise.kept == 1.0
    assert 0.5 < follow(promise, 2.0, 1) < 0.6
    assert follow(promise, 2.0, 2) == pytest.approx(1.0, abs=0.05)


def test_more_than_was_promised_makes_nobody_bolder() -> None:
    assert follow(Promise(), 1.0, 5) == 1.0


def test_what_was_seen_is_forgotten_where_nothing_is_drafted() -> None:
    promise = Promise()
    assert follow(promise, PROMISE_TRUST, 0) < 0.1
    promise.passed(2000)
    assert promise.kept > 0.9


def test_chance_is_no_broken_promise() -> None:
    promise = Promise()
    promise.observe(6.0, 3)
    assert promise.kept == 1.0
