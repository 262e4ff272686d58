"""Records of steps: they say what happened, and what they record decides as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.core.checks import check_output
from paceline.core.errors import ConfigError
from paceline.engine.engine import Engine
from paceline.planner.acceptance import Promise
from paceline.planner.choice import DraftLimits, choose_nodes
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.pace import USUAL_DRAFT_MS, StepReport
from paceline.planner.planner import CostAwarePlanner, FixedPlanner, Planner
from paceline.planner.value import DraftingCost, DraftTime, Source
from paceline.profiling.chrome_trace import PHASES, StepClock, StepTimes, write_trace
from paceline.profiling.explain import (
    Cut,
    RecordingPlanner,
    StepRecord,
    Terms,
    cost_error,
    cut_reasons,
    recording,
    request_nodes,
    summarise,
)
from paceline.profiling.explain_run import ExplainedRun, explain
from paceline.profiling.plots import plot_steps
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from tests.benchmarks.predicted import predict_times
from tests.engine.test_faults import Scripted
from tests.planner.machine import cost_table
from tests.toy import Job, lookup_config, run_jobs, toy_engine

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
JOBS = [Job([3, 4, 5, 3, 4], GREEDY), Job([7, 8, 7, 8], GREEDY, at=2), Job([1, 2, 3], GREEDY, at=5)]


def guess(request: Request) -> DraftTree:
    """Two branches of which one repeats the last tokens: sometimes right, sometimes not."""
    last, other = request.token_ids[-1], request.token_ids[-2]
    tokens = [last, other] if last != other else [last, (last + 1) % 40]
    return DraftTree([*tokens, 5], [-1, -1, 0], [0.6, 0.3, 0.5], ["scripted"] * 3)


def engine_with(planner: Planner) -> Engine:
    lookup = PromptLookupProposer(lookup_config(num_speculative_tokens=6))
    expensive = Scripted(guess)
    expensive.costs_forwards = True
    engine = toy_engine([lookup, expensive])
    engine.drafting.planner = planner
    decides = planner.inner if isinstance(planner, RecordingPlanner) else planner
    if isinstance(decides, CostAwarePlanner):
        predict_times(engine, planner, decides.cost, TIMES)
    return engine


TIMES = DraftingCost({"prompt_lookup": DraftTime(0.001), "scripted": DraftTime(0.1, 0.1)})


def frozen() -> CostAwarePlanner:
    """Two of them decide the same."""
    table = cost_table([1.0 + 0.04 * rows + 0.5 * (rows > 6) for rows in range(64)])
    return CostAwarePlanner(CostModel(table, learns=False))


# --- the recorder --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FixedPlanner, frozen])
def test_recording_changes_no_step(make: Any) -> None:
    runs = []
    for planner in (make(), RecordingPlanner(make())):
        engine = engine_with(planner)
        clock = StepClock(engine).start()
        tokens = [group[0].token_ids for group in run_jobs(engine, JOBS)]
        runs.append((tokens, [(step.num_rows, step.num_draft_tokens) for step in clock.steps]))
    assert runs[0] == runs[1]
    assert len({rows for rows, _ in runs[0][1]}) > 3, "the steps must differ to tell anything"


@pytest.mark.parametrize("make", [FixedPlanner, frozen])
def test_records_agree_with_the_engine(make: Any) -> None:
    engine = engine_with(make())
    with recording(engine) as recorder:
        results = [group[0] for group in run_jobs(engine, JOBS)]
    assert not isinstance(engine.drafting.planner, RecordingPlanner)
    records, counters = list(recorder.steps), engine.stats().speculation
    assert [record.index for record in records] == list(range(len(records)))
    assert sum(record.shape.rows for record in records) == engine.stats().num_rows
    assert sum(record.num_verified for record in records) == counters.num_draft_tokens > 0
    assert sum(record.num_accepted for record in records) == counters.num_accepted_tokens > 0
    cut = sum(len(record.nodes) - record.num_verified for record in records)
    assert cut == counters.num_pruned_tokens > 0
    for result in results:
        assert result.request is not None
        parts = [
            p for r in records for p in r.requests if p.request_id == result.request.request_id
        ]
        assert [token for part in parts for token in part.token_ids] == result.token_ids[1:]
        ends = [part.position + len(part.token_ids) for part in parts]
        assert [part.position for part in parts[1:]] == ends[:-1]
    asked = [asked for record in records for asked in record.asks]
    assert {each.origin for each in asked} == {"prompt_lookup", "scripted"}
    assert any(each.num_passed_over for each in asked)


def test_a_request_alone_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that do not pay because earlier drafts promised too much are cut by their cost."""
    monkeypatch.setattr(Promise, "kept", property(lambda self: 0.3))
    engine = engine_with(frozen())
    with recording(engine) as recorder:
        run_jobs(engine, JOBS[:1])
    cuts = {node.cut for record in recorder.steps for node in record.nodes}
    assert Cut.COST in cuts
    assert Cut.FAIRNESS not in cuts


def test_costs_are_those_that_the_planner_went_by() -> None:
    planner = frozen()
    engine = engine_with(planner)
    with recording(engine) as recorder:
        run_jobs(engine, JOBS)
    drafted = [record for record in recorder.steps if record.num_verified]
    for record in drafted:
        assert record.predicted_ms is not None
        host_ms = record.predicted_ms - planner.cost.predict(record.shape)
        assert 0.0 <= host_ms < USUAL_DRAFT_MS[0] + len(record.requests) * USUAL_DRAFT_MS[1]
        assert len(record.growth) <= 1 + len(record.nodes)
        worth, cost = record.next_node or (0.0, 0.0)
        assert worth <= cost
    assert any(record.next_node for record in drafted)
    assert any(node.cut is Cut.FAIRNESS for record in recorder.steps for node in record.nodes)
    assert any(asked.node_price > 0.0 for record in drafted for asked in record.asks)


def test_requests_that_end_are_forgotten() -> None:
    finished: list[int] = []

    class Forgetful(FixedPlanner):
        def finish(self, request: Request) -> None:
            finished.append(request.request_id)

    run_jobs(engine_with(RecordingPlanner(Forgetful())), JOBS)
    assert sorted(finished) == [0, 1, 2]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.profiling.explain.MAX_STEPS", 9)
    engine = engine_with(FixedPlanner())
    with recording(engine) as recorder:
        run_jobs(engine, JOBS)
    assert len(recorder.steps) == 9
    indices = [step.index for step in recorder.steps]
    assert indices[0] > 0
    assert indices == list(range(indices[0], indices[0] + 9))


def test_a_step_that_is_run_again_plainly_has_dropped_its_draft() -> None:
    engine = engine_with(FixedPlanner())
    forward, failures = engine.runner.forward, []

    def fails_once(batch: Any, greedy: bool) -> Any:
        if batch.num_rows == 7 and not failures:
            failures.append(batch)
            raise RuntimeError("a forward failed")
        return forward(batch, greedy=greedy)

    engine.runner.forward = fails_once  # type: ignore[method-assign]
    with recording(engine) as recorder:
        run_jobs(engine, JOBS[:1])
    dropped = [r for r in recorder.steps if any(n.cut is Cut.DROPPED for n in r.nodes)]
    assert len(failures) == len(dropped) == 1
    assert (dropped[0].num_verified, dropped[0].num_emitted) == (0, 1)


# --- nodes and their fate ------------------------------------------------------------------------

#        1 - 2 - 3
#  root <
#        4 - 5
TREE = DraftTree([1, 2, 3, 4, 5], [-1, 0, 1, -1, 3], [0.6, 0.5, 0.5, 0.3, 0.5], ["a"] * 5)


@pytest.mark.parametrize(
    ("emitted", "expected"),
    [
        ([1, 2, 9], [True, True, False, False, None]),
        ([4], [False, None, None, True, None]),
        ([9], [False, None, None, False, None]),
        ([1, 2, 3, 7], [True, True, True, False, None]),
        ([], [None] * 5),
    ],
)
def test_labels_are_censored(emitted: list[int], expected: list[bool | None]) -> None:
    nodes = request_nodes(TREE, [None] * 5, emitted)
    assert [node.is_right for node in nodes] == expected


def reasons(
    limit: DraftLimits, growth: Sequence[float] = (), rate: float = 0.0, budget: int = 64
) -> list[Cut | None]:
    terms = Terms(growth, rate)
    curve = growth or [0.0] * 6
    (nodes,) = choose_nodes([TREE], [limit], curve, rate, node_budget=budget)
    chosen = [TREE.select(nodes)]
    return cut_reasons([TREE], chosen, chosen, [limit], budget, terms)[0]


def test_every_cut_has_its_reason() -> None:
    wide = DraftLimits(9, 9)
    assert reasons(wide) == [None] * 5
    assert reasons(DraftLimits(9, 1)) == [None, Cut.DEPTH, Cut.DEPTH, None, Cut.DEPTH]
    unlikely = reasons(DraftLimits(9, 9, 0.2))
    assert unlikely == [None, None, Cut.PROBABILITY, None, Cut.PROBABILITY]
    likeliest = [None, None, Cut.COUNT, Cut.COUNT, Cut.COUNT]
    assert reasons(DraftLimits(2, 9)) == likeliest
    assert reasons(wide, budget=2) == likeliest
    assert reasons(wide, growth=[1.0, 1.0, 1.0]) == likeliest, "no more nodes are considered"
    dear = reasons(wide, growth=[1.0, 1.1, 1.2, 2.0, 3.0, 4.0], rate=1.0)
    assert dear == [None, None, Cut.COST, Cut.COST, Cut.COST]


def test_who_would_be_slowed_is_spared() -> None:
    trees = [DraftTree.chain([1], [0.9], "a"), DraftTree()]
    limits, growth, rate = [DraftLimits(8, 8)] * 2, [1.0, 1.3], 1.0
    chosen = [
        tree.select(nodes)
        for tree, nodes in zip(
            trees,
            choose_nodes(trees, limits, growth, rate, slowdown=0.04, node_budget=8),
            strict=True,
        )
    ]
    found = cut_reasons(trees, chosen, chosen, limits, 8, Terms(growth, rate))
    assert found == [[Cut.FAIRNESS], []]


def test_a_tree_that_was_reordered_keeps_its_fate() -> None:
    chosen = [TREE.select([3, 0, 4])]
    verified = [TREE.select([0, 3])]
    found = cut_reasons([TREE], chosen, verified, [DraftLimits(9, 9)], 9, Terms())[0]
    assert found == [None, Cut.COUNT, Cut.COUNT, None, Cut.DROPPED]
    nodes = request_nodes(TREE, found, [1, 2])
    assert [node.is_accepted for node in nodes] == [True, False, False, False, False]
    assert [node.path_prob for node in nodes] == pytest.approx([0.6, 0.3, 0.15, 0.3, 0.15])


# --- figures -------------------------------------------------------------------------------------


def test_summary_counts_what_was_recorded() -> None:
    engine = engine_with(frozen())
    with recording(engine) as recorder:
        run_jobs(engine, JOBS)
    records = list(recorder.steps)
    nodes = [node for record in records for node in record.nodes]
    for summary in summarise(records):
        own = [node for node in nodes if node.origin == summary.origin]
        known = [node for node in own if node.is_right is not None]
        assert summary.num_candidates == len(own) <= summary.num_drafted
        assert summary.num_labelled == len(known)
        assert summary.num_right == sum(node.is_right is True for node in known)
        assert summary.expected == pytest.approx(sum(node.accept_prob for node in known))
    assert sum(each.num_accepted for each in summarise(records)) == sum(
        record.num_accepted for record in records
    )


def test_what_was_expected_and_the_cost_error() -> None:
    records = [recorded_step(*step) for step in (([1], 2.0), ([2], 4.0), ([1], None))]
    (summary,) = summarise(records)
    assert (summary.num_labelled, summary.num_right) == (3, 2)
    assert summary.expected == pytest.approx(2.7)
    assert cost_error(records) == pytest.approx(0.5)
    assert cost_error(records[2:]) is None


def recorded_step(emitted: list[int], predicted_ms: float | None) -> StepRecord:
    """A step of 4 ms that verified token 1, for which 0.9 was estimated."""
    request = Request(0, [5, 6], 2, GREEDY, seed=0, max_len=99, num_computed=1)
    planner = RecordingPlanner(FixedPlanner())
    planner.begin(StepShape(1, 0, 0, 1), [request])
    planner.drafts.begin([0])
    planner.ask(Source("a"), [0])
    planner.drafts.add(0, "a", DraftTree.chain([1], [0.9], "a"))
    planner.choose([DraftLimits(4, 4)], 8)
    request.token_ids += emitted
    planner.end(StepReport(StepShape(2, 0, 0, 2), 4.0, 5.0, 1, len(emitted)))
    return replace(planner.steps[0], predicted_ms=predicted_ms)


def test_each_step_says_what_came_from_disk_for_it() -> None:
    read = iter([(5, 1.0), (105, 1.5), (105, 1.5)])
    planner = RecordingPlanner(FixedPlanner(), lambda: next(read))
    for _ in range(2):
        planner.begin(StepShape(1, 0, 0, 1), [])
        planner.end(StepReport(StepShape(1, 0, 0, 1), 4.0, 5.0, 1, 1))
    assert [(step.disk_bytes, step.disk_ms) for step in planner.steps] == [(100, 500.0), (0, 0.0)]


# --- one prompt ----------------------------------------------------------------------------------


def test_an_explanation_compares_with_plain_decoding() -> None:
    planner = frozen()
    engine = engine_with(planner)
    proposers = engine.drafting.proposers
    told: list[int] = []
    run = explain(engine, [3, 4, 5, 3, 4], GREEDY, told.append)
    assert engine.drafting.planner is planner
    assert engine.drafting.proposers == proposers
    assert vars(engine).get("step") is None
    assert run.is_identical
    assert len(run.token_ids) == len(run.speedups) + 1 == 24
    assert (told[-1], told) == (48, sorted(told))
    assert len(run.plain.steps) == 24 > len(run.speculative.steps) == len(run.records)
    emitted = [token for record in run.records for token in run.token_ids[run.emitted_by(record)]]
    assert emitted == run.token_ids[1:]
    plain, speculative = run.plain.elapsed_ms()[-1], run.speculative.elapsed_ms()[-1]
    assert run.speedups[-1] == pytest.approx(plain / speculative)


def test_decode_time_begins_after_the_first_token() -> None:
    emitted = {0.5: 0, 0.25: 1, 0.002: 1, 0.003: 2}
    steps = [StepTimes(0.0, {"forward": t}, 1, 0, 0, count) for t, count in emitted.items()]
    assert ExplainedRun([1, 2, 3, 4], steps).elapsed_ms() == pytest.approx([2.0, 5.0, 5.0])


def test_plot(tmp_path: Path) -> None:
    engine = engine_with(frozen())
    run = explain(engine, [3, 4, 5, 3, 4], GREEDY)
    path = tmp_path / "run.png"
    plot_steps(run.records, ["$x_\n\u4e2d"] * len(run.records), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_steps([], [], path)
    with pytest.raises(ConfigError, match="allowed: files in"):
        plot_steps(run.records, [""] * len(run.records), tmp_path / "run.bmp")


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_tiles_its_steps_with_phases(tmp_path: Path) -> None:
    engine = engine_with(FixedPlanner())
    clock = StepClock(engine).start()
    run_jobs(engine, JOBS[:1])
    clock.stop()
    steps = list(clock.steps)
    run_jobs(engine, JOBS[:1])
    assert list(clock.steps) == steps, "a stopped clock records nothing"
    counters = engine.stats().speculation
    assert 2 * sum(step.num_draft_tokens for step in steps) == counters.num_draft_tokens > 0

    path = tmp_path / "trace.json"
    write_trace(path, {"a": steps, "b": steps})
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["paceline", "a", "b"]
    for thread in (1, 2):
        own = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
        whole = [event for event in own if event["name"] == "step"]
        assert len(whole) == len(steps)
        assert whole[0]["ts"] == 0
        ends = [event["ts"] + event["dur"] for event in whole]
        assert all(end <= after["ts"] for end, after in zip(ends, whole[1:], strict=False))
        for step, end in zip(whole, ends, strict=True):
            inside = [e for e in own if e is not step and step["ts"] <= e["ts"] < end]
            assert [e["name"] for e in inside] == [
                p for p in PHASES if p in {e["name"] for e in inside}
            ]
            begins = [e["ts"] for e in inside] + [end]
            lengths = [after - begin for begin, after in pairwise(begins)]
            assert [e["dur"] for e in inside] == pytest.approx(lengths)
    assert {event["name"] for event in events} >= set(PHASES)


def test_a_trace_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        check_output(tmp_path / "nowhere" / "trace.json")
