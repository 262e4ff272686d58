"""The budget of restarts, and when an engine counts as silent and as hung.

Pauses grow, and the tests deal out beats and ticks.
"""

from __future__ import annotations

import queue

import pytest

from paceline.core.errors import EngineClosedError
from paceline.request.engine_stats import EngineStats
from paceline.server.engine_process.life import (
    INTERVAL,
    LONGEST_PAUSE,
    SETTLED_SECONDS,
    SILENT_TICKS,
    STEADY_SECONDS,
    Pulse,
    Restarts,
)
from paceline.server.engine_process.process import start_beating
from paceline.server.http.config import ServerConfig


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


def test_an_engine_that_beats_is_well_however_long_its_step_takes() -> None:
    pulse = Pulse(hang_timeout=10)
    for _ in range(1000):
        pulse.tick()
        pulse.beat(is_between_steps=False)
        assert not pulse.is_silent
        assert not pulse.verdict


def test_beats_that_stop_are_noticed_soon_and_end_the_engine_later() -> None:
    pulse = Pulse(hang_timeout=10, interval=1)
    pulse.beat(is_between_steps=True)
    noticed = [pulse.tick() or (pulse.is_silent, bool(pulse.verdict)) for _ in range(10)]
    assert [silent for silent, _ in noticed].index(True) + 1 == SILENT_TICKS
    assert [hung for _, hung in noticed] == [False] * 9 + [True]
    assert "10 s" in pulse.verdict
    pulse.beat(is_between_steps=True)
    assert not pulse.is_silent
    assert not pulse.verdict


def test_silence_shows_within_five_seconds() -> None:
    assert (SILENT_TICKS + 1) * INTERVAL < 5


def test_a_step_that_does_not_end_is_noticed_by_what_beats_lack() -> None:
    pulse = Pulse(step_timeout=100, interval=1)
    for _ in range(100):
        pulse.beat(is_between_steps=False)
    assert not pulse.verdict
    pulse.beat(is_between_steps=False)
    assert "a step took longer than 100 s" in pulse.verdict
    pulse.beat(is_between_steps=True)
    assert not pulse.verdict


def test_another_engine_starts_afresh() -> None:
    pulse = Pulse(hang_timeout=3, step_timeout=3, interval=1)
    for _ in range(5):
        pulse.beat(is_between_steps=False)
        pulse.tick()
    pulse.restart()
    assert not pulse.is_silent
    assert not pulse.verdict


def test_a_step_may_take_as_long_as_a_request() -> None:
    assert ServerConfig(request_timeout=1800).step_timeout == 1800
    assert ServerConfig(request_timeout=3).step_timeout == 600
    assert ServerConfig(request_timeout=0).step_timeout is None


def test_beats_come_while_the_engine_does_not_answer_and_then_tell_its_counters() -> None:
    beats: queue.Queue[EngineStats | None] = queue.Queue(maxsize=1)  # nothing beats on for ever
    may_answer: queue.SimpleQueue[EngineStats] = queue.SimpleQueue()
    start_beating(beats.put, may_answer.get, 0.001)
    assert [beats.get(timeout=60) for _ in range(3)] == [None] * 3
    told = EngineStats(num_running=3)
    may_answer.put(told)
    while (found := beats.get(timeout=60)) is None:
        pass
    assert found is told


def test_counters_that_fail_are_beats_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    beats: queue.Queue[EngineStats | None] = queue.Queue(maxsize=1)
    told = EngineStats(num_running=3)
    answers = iter([told, ZeroDivisionError(), RuntimeError(), EngineStats(num_running=4)])

    def stats() -> EngineStats:
        answer = next(answers, None)
        if answer is None:
            raise EngineClosedError("over")
        if isinstance(answer, Exception):
            raise answer
        return answer

    start_beating(beats.put, stats, 0.001)
    found = iter(lambda: beats.get(timeout=60), object())
    said = (each for each in found if each is not None)
    assert [next(said).num_running for _ in range(4)] == [3, 3, 3, 4]
    assert caplog.text.count("counters cannot be told") == 1
    assert "ZeroDivisionError" in caplog.text
