"""Experts that steps along a trace read: counted as forwards count them, and charged in replays."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.native.native import why_not_native
from paceline.build.build import build_engine
from paceline.config import EngineConfig
from paceline.planner.cost_table import CostPoint, CostTable, ExpertCost
from paceline.planner.planner import PLANNERS
from paceline.request.span import Span
from paceline.request.traces import UNION_ROWS, Trace
from paceline_lab.simulate.simulator import Simulator
from paceline_lab.trace.experts import ExpertUnions, union_sizes, with_experts
from tests.lab.toy_traces import make_meta, make_trace
from tests.models.reference import VOCAB, save_model
from tests.toy import lookup_config

COST = ExpertCost(layers=2, number=64, per_token=2, ms=0.05)
LOOKUP = lookup_config(num_speculative_tokens=6)
BACKENDS = ["reference", *(["native"] if why_not_native() is None else [])]


@pytest.mark.parametrize("count", [1, 5, 33, 70])
def test_runs_of_tokens_are_counted_one_by_one(count: int) -> None:
    chosen = np.random.default_rng(count).integers(0, 40, (3, count, 2))
    sizes = union_sizes(chosen, 40)
    assert sizes.shape == (count, len(UNION_ROWS))
    for place in range(count):
        for column, rows in enumerate(UNION_ROWS):
            start = max(0, min(place, count - rows))
            run = chosen[:, start : start + rows]
            assert sizes[place, column] == sum(len(set(layer.ravel())) for layer in run)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_recorded_is_what_a_forward_reads(tmp_path: Path, backend: str) -> None:
    save_model("glm4-moe", tmp_path, max_position_embeddings=256)  # its first layer is dense
    config = EngineConfig(backend=backend, dtype="float32", max_model_len=256)
    engine = build_engine(str(tmp_path), config).engine
    tokens = np.random.default_rng(5).integers(3, VOCAB, 150).tolist()
    (trace,) = with_experts(engine, [make_trace(0, tokens[:40], tokens[40:])])
    assert trace.experts_read is not None
    assert trace.experts_read.shape == (110, len(UNION_ROWS))
    for place in (0, 7, 60):
        for column, rows in enumerate(UNION_ROWS):
            first = 39 + place  # the row that predicts output token ``place``
            engine.kv.open(7)
            for begin, end in ((0, first), (first, first + rows)):
                span = Span.chunk(7, begin, tokens[begin:end], sample=True)
                assert engine.kv.reserve(7, end - begin)
                result = engine.runner.forward(engine.runner.pack([span]))
                engine.kv.commit(7, range(end - begin))
            engine.kv.free(7)
            assert trace.experts_read[place, column] == result.experts_read


def with_unions(trace: Trace, pools: list[int]) -> Trace:
    """The trace of a text whose tokens choose among ``pools`` experts of a layer, by place."""
    sizes = [
        [COST.layers * min(pool, COST.per_token * rows) for rows in UNION_ROWS] for pool in pools
    ]
    return replace(trace, experts_read=np.array(sizes, np.int32))


def test_what_rows_read_is_as_recorded_and_requests_choose_by_themselves() -> None:
    traces = [
        with_unions(make_trace(0, [1], [2, 3]), [8, 64]),
        with_unions(make_trace(1, [1], [2]), [2]),
    ]
    unions = ExpertUnions(traces, COST)
    assert [unions.read([(0, 1, rows)]) for rows in (1, 2, 3, 4, 16, 32)] == [4, 8, 12, 16, 64, 128]
    assert [unions.read([(0, 0, rows)]) for rows in (1, 2, 4, 32, 200)] == [4, 8, 16, 16, 16]
    assert unions.read([(1, 0, 9)]) == COST.least
    assert unions.read([(0, 0, 8), (1, 0, 8)]) == round(128 * (1 - (1 - 16 / 128) * (1 - 4 / 128)))
    growth = unions.growth([(0, 0), (0, 1)], 3)
    assert growth == [
        unions.read([(0, 0, 1 + n), (0, 1, 1 + m)]) for n, m in ((0, 0), (1, 0), (1, 1), (2, 1))
    ]


def simulator(pools: list[int], table: CostTable, concurrency: int = 1) -> Simulator:
    """Texts of two tokens, half of whose runs look up well."""
    drawn, traces = random.Random(3), []
    for index in range(4):
        output = [drawn.choice((5, 6)) for _ in range(60)]
        output += [7, 8, 9, 7, 8, 9] * 10
        chosen = [pools[place // 30 % len(pools)] for place in range(len(output))]
        traces.append(with_unions(make_trace(index, [5, 6, 5, 6], output), chosen))
    config = EngineConfig(max_num_seqs=concurrency)
    return Simulator(traces, make_meta(120), table, {}, {}.__getitem__, config)


def table_of(experts: ExpertCost | None = COST, read: int = 4) -> CostTable:
    """Of steps that read the least and ``read`` for each further row."""
    points = [
        CostPoint(1, 0, rows, rows, 1.0 + 0.01 * rows + 0.05 * n, 0.0, n)
        for rows in (1, 2, 4, 8, 16, 64)
        for n in [min(128, COST.least + read * (rows - 1))]
    ]
    return CostTable("mixture", points, experts=experts)


def test_a_step_takes_what_its_experts_take() -> None:
    """The same steps cost what the text reads, whatever the table's own text read."""
    for read in (0, 4):
        found = simulator([4], table_of(read=read)).run([LOOKUP], PLANNERS["fixed"])
        blind = simulator([4], table_of(None, read)).run([LOOKUP], PLANNERS["fixed"])
        assert found.rows == blind.rows
        assert max(found.rows) > 4
        steps = list(zip(found.rows, found.experts, strict=True))
        assert all(n == min(8, 4 * rows) for rows, n in steps if n)
        assert sum(n > 0 for _, n in steps) == len(steps) - 4  # of prompts it is not known
        prompts = [rows for rows, n in steps if not n]
        expected = sum(1.0 + 0.01 * rows + 0.05 * n for rows, n in steps if n)
        expected += sum(table_of(read=read).milliseconds(rows, samples=1) for rows in prompts)
        assert found.ms == pytest.approx(expected)
        assert not any(blind.experts)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_prices_are_worth_something_where_the_text_changes(concurrency: int) -> None:
    subject = simulator([2, 64], table_of(), concurrency)
    plain, fixed = subject.plain(), subject.run([LOOKUP], PLANNERS["fixed"])
    priced, unpriced = (subject.run([LOOKUP], PLANNERS["auto"], each) for each in (True, False))
    assert priced.ms < unpriced.ms
    assert priced.ms < min(plain.ms, fixed.ms)
    best = subject.best_steps([LOOKUP])
    assert best.ms < priced.ms
    assert subject.every(2).run([LOOKUP], PLANNERS["auto"]).ms < priced.ms


def test_without_counts_the_table_is_read_as_it_is() -> None:
    subject = simulator([2, 64], table_of())
    old = replace(subject, traces=[replace(each, experts_read=None) for each in subject.traces])
    assert (subject.unions is None, old.unions) == (False, None)
    results = [old.run([LOOKUP], PLANNERS["auto"], each) for each in (True, False)]
    dense = simulator([2], table_of(None)).run([LOOKUP], PLANNERS["auto"])
    assert [result.rows for result in results] == [dense.rows] * 2
    assert results[0].ms == pytest.approx(dense.ms)
