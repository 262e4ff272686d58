"""Rounds on a clock that the test winds: order, warm-up, budget, and a machine with moods."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.profiling.profile_steps import ENOUGH_ROUNDS, LEAST_ROUNDS, StepTask, Timing, measure


class Machine:
    """Its clock moves only while a task runs; ``mood`` slows everything down as time goes by."""

    def __init__(self, mood: float = 0.0) -> None:
        self.now = 0.0
        self.mood = mood
        self.log: list[str] = []

    def task(self, name: str, seconds: float, every: int = 1) -> StepTask:
        def run() -> float:
            taken = seconds * (1 + self.mood * self.now)
            self.now += taken
            self.log.append(name)
            return taken

        return StepTask(run, every)

    def measure(self, budget: float, **tasks: tuple[float, int]) -> dict[str, Timing]:
        made = {name: self.task(name, *each) for name, each in tasks.items()}
        return measure(made, budget, clock=lambda: self.now)


def test_every_round_has_everything_once_in_an_order_of_its_own() -> None:
    machine = Machine()
    names = [f"t{i}" for i in range(6)]
    found = machine.measure(60.0, **dict.fromkeys(names, (0.5, 1)))
    rounds = [tuple(machine.log[i : i + 6]) for i in range(0, len(machine.log), 6)]
    assert all(sorted(each) == names for each in rounds)
    assert len(set(rounds)) > len(rounds) / 2
    assert len(rounds) == 20  # of 3 seconds, the warm-up among them
    assert {timing.count for timing in found.values()} == {19}


def test_warm_up_does_not_count() -> None:
    first = [100.0]
    task = StepTask(lambda: first.pop() if first else 1.0)
    assert measure({"a": task}, 1e-9)["a"].spread == 0.0


def test_what_is_short_follows_on_itself() -> None:
    """After another task it takes three times as long, which no decoding engine meets."""
    log: list[str] = []

    def task(name: str) -> StepTask:
        def run() -> float:
            log.append(name)
            return 0.001 if log[-2:-1] == [name] else 0.003

        return StepTask(run)

    found = measure({"a": task("a"), "b": task("b")}, 1e-9)
    assert {timing.ms for timing in found.values()} == {1.0}


def test_a_pause_of_the_machine_is_one_time_among_others() -> None:
    """One in five is long; taken where it completes the warm-up, it would be every one."""
    times = [0.0005, 0.004, 0.0005, 0.0005, 0.0005]
    calls: list[float] = []

    def run() -> float:
        calls.append(times[len(calls) % len(times)])
        return calls[-1]

    assert measure({"a": StepTask(run)}, 1e-9)["a"].ms == 0.5


def test_what_takes_long_takes_part_in_some_rounds() -> None:
    machine = Machine()
    found = machine.measure(100.0, a=(1.0, 1), b=(1.0, 4))
    assert found["b"].count == -(-found["a"].count // 4)
    assert Counter(machine.log)["b"] == found["b"].count + 1


@pytest.mark.parametrize(
    ("budget", "rounds"), [(1.0, ENOUGH_ROUNDS), (0.01, LEAST_ROUNDS), (20.0, 19)]
)
def test_rounds_for_a_budget(budget: float, rounds: int) -> None:
    assert Machine().measure(budget, a=(1.0, 1))["a"].count == rounds


def test_median_and_middle_half() -> None:
    values = iter([9.0, *(n / 10 for n in (5, 1, 4, 2, 3))])
    timing = measure({"a": StepTask(lambda: next(values, 0.3))}, 1e-9)["a"]
    assert timing == Timing(400.0, pytest.approx(200.0), 3)  # of 500, 100 and 400


def test_moods_hit_all_alike() -> None:
    """The machine becomes five times slower meanwhile; the ratio of two tasks stays."""
    machine = Machine(mood=0.02)
    found = machine.measure(200.0, **{f"t{i}": (0.1 * (1 + i), 1) for i in range(5)})
    assert machine.now > 200
    for i in range(5):
        assert found[f"t{i}"].ms / found["t0"].ms == pytest.approx(1 + i, rel=0.1)


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    measure({"a": StepTask(lambda: 1.0)}, 1e-9, shares.append)
    machine = Machine()
    task = machine.task("a", 1.0)
    measure({"a": task}, 5.0, shares.append, clock=lambda: machine.now)
    assert shares == sorted(shares[:3]) + sorted(shares[3:])
    assert shares[-1] == 1.0
