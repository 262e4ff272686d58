"""The steps of a profile on the toy model: what is forwarded, and that nothing is left behind."""

from __future__ import annotations

import pytest

from paceline.backends.rows.row_batch import Batch
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import EngineConfig
from paceline.core.errors import ConfigError
from paceline.planner.cost_table import CostPoint, CostTable
from paceline.profiling.profile_steps import (
    CONTEXTS,
    WIDTHS,
    MeasuredStep,
    StepBench,
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
