"""The steps of a profile on the toy model: what is forwarded, and that nothing is left behind.

Rounds on a clock that the test winds: order, warm-up, budget, and a machine with moods.
"""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.backends.rows.row_batch import Batch
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import EngineConfig
from paceline.core.errors import ConfigError
from paceline.planner.cost_table import CostPoint, CostTable
from paceline.profiling.profile_steps import (
    CONTEXTS,
    ENOUGH_ROUNDS,
    LEAST_ROUNDS,
    WIDTHS,
    MeasuredStep,
    StepBench,
    StepTask,
    Timing,
    measure,
    num_fitting,
    num_held,
    plan_steps,
)
from tests.toy import HYBRIDS, TOY, toy_runner

STEPS = [
    MeasuredStep(1, 20, 5, 5),
    MeasuredStep(1, 20, 5, 1),
    MeasuredStep(1, 20, 5, 0),
    MeasuredStep(3, 20, 4, 4),
]


class Watch:
    """Notes the batches that a runner forwards."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Batch] = []
        forward = runner.forward

        def watched(batch: Batch, inputs: None) -> ForwardResult:
            self.batches.append(batch)
            return forward(batch)

        monkeypatch.setattr(runner, "forward", watched)


def test_a_step_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = toy_runner("float32")
    bench = StepBench(runner)
    tasks = bench.tasks(STEPS)
    watch = Watch(runner, monkeypatch)
    for step, task in tasks.items():
        for _ in range(2):  # the second time finds the same context
            assert task.run() > 0
            batch = watch.batches[-1]
            assert batch.num_rows == step.rows
            assert len(batch.sample_rows) == step.requests * step.samples
            expected = [*range(step.context, step.context + step.width)] * step.requests
            assert batch.positions[: step.rows].tolist() == expected
    last = [batch.sample_rows for batch in watch.batches[2:4]]
    assert last == [[4], [4]]  # of five rows the last one is sampled


def test_contexts_are_read_and_given_back() -> None:
    runner = toy_runner()
    bench = StepBench(runner)
    tasks = bench.tasks([MeasuredStep(1, 100, 1, 1), *STEPS])
    assert runner.num_rows == 100 + 3 * 20
    used = runner.kv.pool.num_used
    for task in tasks.values():
        task.run()
    assert runner.kv.pool.num_used == used
    bench.close()
    assert runner.kv.pool.num_used == 0


def test_steps_of_a_hybrid_may_be_wider_than_its_drafts() -> None:
    runner = toy_runner(shape=HYBRIDS["delta"])
    bench = StepBench(runner)
    for task in bench.tasks(
        [MeasuredStep(1, 100, 1, 1), MeasuredStep(1, 20, 40, 0), *STEPS]
    ).values():
        assert task.run() > 0
    bench.close()
    assert runner.kv.pool.num_used == 0


def test_a_failing_forward_leaves_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = toy_runner()
    bench = StepBench(runner)
    task = bench.tasks([MeasuredStep(1, 16, 40, 40)])[MeasuredStep(1, 16, 40, 40)]
    used = runner.kv.pool.num_used
    monkeypatch.setattr(runner, "forward", lambda batch, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        task.run()
    assert runner.kv.pool.num_used == used


def test_a_small_cache_is_a_clear_error() -> None:
    bench = StepBench(toy_runner(num_blocks=4))
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        bench.tasks([MeasuredStep(1, 64, 1, 1)])


@pytest.mark.parametrize("requests", [1, 2, 8])
def test_a_hybrid_has_a_lane_for_each_request_that_is_held(requests: int) -> None:
    steps, _ = plan_steps([1], [16, 32, 48], 128, limits(requests, 512))
    room = num_held(requests, 3)
    assert num_fitting(room, 3) == requests
    bench = StepBench(toy_runner(shape=HYBRIDS["delta"], max_num_seqs=room))
    assert len(bench.tasks(steps)) == len(steps)
    bench = StepBench(toy_runner(shape=HYBRIDS["delta"], max_num_seqs=room - 1))
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        bench.tasks(steps)


# --- the plan ------------------------------------------------------------------------------------


def limits(requests: int, rows: int) -> EngineConfig:
    return EngineConfig(max_num_seqs=requests, max_num_batched_tokens=rows)


def test_the_default_plan() -> None:
    steps, notes = plan_steps(WIDTHS, CONTEXTS, 4096, limits(32, 512))
    assert not notes
    for context in CONTEXTS:
        alone = {s.width for s in steps if s.context == context and s.requests == 1}
        assert alone >= set(range(1, 34))
    assert {(s.requests, s.width) for s in steps if s.requests > 1 and s.context == 64} == {
        (requests, width) for requests in (2, 4, 8, 16) for width in (1, 4)
    }
    for samples in (0, 1):
        widths = {s.width for s in steps if s.samples == samples and s.context == 64}
        assert widths >= {1, 4, 16, 64, 512}
    CostTable("plan", [CostPoint(s.requests, s.context, s.width, s.samples, 1.0) for s in steps])


def test_what_does_not_fit_is_left_out_with_a_note() -> None:
    steps, notes = plan_steps([2, 50, 200], [64, 250, 256, 900], TOY.max_position, limits(4, 100))
    assert max(s.context + s.width for s in steps) <= TOY.max_position
    assert max(s.requests for s in steps) == 4
    assert max(s.rows for s in steps) <= 100
    assert {s.context for s in steps} == {64, 250}
    assert 1 in {s.width for s in steps}  # every ratio needs it
    assert notes == [
        "context 256 is left out: the limit is 256 tokens",
        "context 900 is left out: the limit is 256 tokens",
        "these steps are beyond the limits: 1 x 200 at context 64, 1 x 50 at context 250, "
        "1 x 200 at context 250, 8 x 1 at context 64, 8 x 4 at context 64, 16 x 1 at context 64, "
        "16 x 4 at context 64",
    ]


def test_no_context_fits() -> None:
    with pytest.raises(ConfigError, match="no context of 64, 512"):
        plan_steps([1], [64, 512], 64, limits(4, 100))


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
