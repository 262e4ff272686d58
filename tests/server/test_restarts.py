"""The budget of restarts: pauses that grow, and what gives the budget back."""

from __future__ import annotations

from paceline.server.engine_process.life import (
    LONGEST_PAUSE,
    SETTLED_SECONDS,
    STEADY_SECONDS,
    Restarts,
)


def test_pauses_grow_until_the_budget_is_spent() -> None:
    restarts = Restarts(budget=9, clock=lambda: 0.0)
    pauses = []
    while (pause := restarts.next_pause()) is not None:
        pauses.append(pause)
        restarts.note_serving()
    assert pauses == [0, 1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert restarts.next_pause() is None


def test_no_budget_is_no_restart() -> None:
    assert Restarts(budget=0).next_pause() is None


def test_an_engine_that_served_for_long_gives_the_budget_back() -> None:
    now = [0.0]
    restarts = Restarts(budget=1, clock=lambda: now[0])
    for _ in range(5):
        restarts.note_serving()
        now[0] += STEADY_SECONDS
        assert restarts.next_pause() == 0


def test_an_engine_that_served_for_a_while_is_replaced_at_once() -> None:
    now = [0.0]
    restarts = Restarts(budget=7, clock=lambda: now[0])
    pauses = []
    for seconds in (0, 0, 0, SETTLED_SECONDS, 0, 0, SETTLED_SECONDS):
        restarts.note_serving()
        now[0] += seconds
        pauses.append(restarts.next_pause())
    assert pauses == [0, 1, 2, 0, 1, 2, 0]
    assert restarts.next_pause() is None


def test_time_in_which_it_does_not_serve_gives_nothing_back() -> None:
    now = [0.0]
    restarts = Restarts(budget=2, clock=lambda: now[0])
    for expected in (0.0, 0.0, None):
        restarts.note_serving()
        now[0] += STEADY_SECONDS / 2
        assert restarts.next_pause() == expected
        now[0] += 100 * STEADY_SECONDS  # the model loads
