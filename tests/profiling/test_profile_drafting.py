"""What drafting takes beyond its forwards: measured of real drafts, and charged in replays."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest

from paceline.api.llm import embedded_model
from paceline.build.build import BuiltEngine, build_engine
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.speculative import HEAD_METHODS
from paceline.engine.threads import COMPUTE
from paceline.planner.cost_table import (
    NO_DRAFTING_HOST_TIME,
    CostPoint,
    CostTable,
    DraftingHostTime,
)
from paceline.profiling import profile_host
from paceline.profiling.profile_host import Make, head_maker, measure_drafting, model_maker
from paceline.proposers.draft_model.loading import draft_runner, open_draft
from paceline.proposers.heads import build
from tests.profiling.exact_clock import FORWARD, READING, ROW, run_exactly
from tests.proposers.heads import embedded_head

MODEL = SpeculativeConfig("draft_model", embedded_model("draft"))
SELF = SpeculativeConfig("self", draft_layers=2)
OUTSIDE = 0.3
"""Milliseconds that follow a forward."""
EXACT = CostTable(
    "exact",
    [CostPoint(n, 0, width, width, FORWARD + ROW * n * width) for n in (1, 4) for width in (1, 16)],
)


@pytest.fixture(scope="module")
def built() -> BuiltEngine:
    return COMPUTE.call(lambda: built_for(1024))


def built_for(max_model_len: int) -> BuiltEngine:
    config = EngineConfig(max_num_seqs=4, max_model_len=max_model_len)
    return build_engine(embedded_model("target"), config)


def maker(built: BuiltEngine, draft: SpeculativeConfig) -> Make:
    if draft.method in HEAD_METHODS:
        return head_maker(build(draft, replace(built.target, kv_bytes=1 << 26)))
    checkpoint = open_draft(draft, built.target)
    return model_maker(checkpoint, draft_runner(checkpoint, draft, built.target), built)


@pytest.mark.parametrize("method", ["draft_model", "self", "eagle3"])
def test_what_is_measured(
    built: BuiltEngine, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = {"draft_model": MODEL, "self": SELF}.get(method) or embedded_head(tmp_path)
    run_exactly(monkeypatch, lambda requests, nodes: OUTSIDE)
    engine, runs = built.engine, list[profile_host.DraftingRun]()
    proposers, held = engine.drafting.proposers, engine.runner.kv.pool.num_available
    run = profile_host.run

    def noted(*arguments: object) -> profile_host.DraftingRun:
        runs.append(run(*arguments))  # type: ignore[arg-type]
        return runs[-1]

    monkeypatch.setattr(profile_host, "run", noted)
    host = COMPUTE.call(lambda: measure_drafting(built, draft, maker(built, draft), EXACT))
    is_random = method == "eagle3"  # its best nodes lie in fewer levels, of other widths
    assert [run.forwards for run in runs] == [1, 4, 3 if is_random else 4, 4]
    assert all(run.ms > run.inside_ms > FORWARD for run in runs)
    looks = 20 * READING
    assert (host.call, host.level) == pytest.approx((OUTSIDE, OUTSIDE), abs=looks)
    assert 0.0 <= host.request < ROW
    assert 0.0 <= host.node < ROW * (2 if is_random else 1)
    # Nothing was drafted for anybody, and everything is as it was.
    assert engine.stats().speculation.num_draft_tokens == 0
    assert engine.drafting.proposers == proposers
    assert engine.runner.kv.pool.num_available == held
    assert not engine.has_work


def test_forwards_by_the_table_are_no_time_of_the_host() -> None:
    """A machine of exact times: forwards of 2 ms take half a millisecond more than the table says,
    but for those that it gives to many rows."""
    table = CostTable(
        "two",
        [
            *[CostPoint(1, 0, rows, rows, 2.0) for rows in (1, 64)],
            *[CostPoint(4, 0, rows, rows, 3.0) for rows in (1, 16)],
        ],
    )

    def run(levels: int, host: float, forward: float = 2.5) -> profile_host.DraftingRun:
        return profile_host.DraftingRun(levels * forward + host, levels * forward, levels)

    one, several = run(1, 0.7), run(4, 0.7 + 3 * 0.2)
    wide, together = run(4, 1.3 + 3 * 3 * 0.1), run(4, 1.3 + 4 * 3 * 0.05, 3.5)
    host = profile_host.host_time(table, 4, one, several, wide, together)
    assert astuple(host) == pytest.approx((0.7 + 0.5, 0.2 + 0.5, 0.05, 0.1))
    # Measured while the machine was busy, the table says nothing of the forwards here.
    busy = CostTable("busy", [CostPoint(1, 0, rows, rows, 90.0) for rows in (1, 64)])
    host = profile_host.host_time(busy, 4, one, several, wide, together)
    assert astuple(host) == pytest.approx((0.7, 0.2, 0.05, 0.1))


def test_a_short_context_has_none(built: BuiltEngine) -> None:
    short = COMPUTE.call(lambda: built_for(128))
    found = COMPUTE.call(lambda: measure_drafting(short, MODEL, maker(short, MODEL), EXACT))
    assert found == NO_DRAFTING_HOST_TIME == DraftingHostTime()
