"""Host times as a profile measures them: what is in them, and that the engine is left as it was.

The clock is that of a machine on which all work takes as long whenever it is done, because the
planner, too, decides by it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.api.llm import embedded_model
from paceline.build.build import BuiltEngine, build_engine
from paceline.build.default_drafts import default_speculative_config
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.threads import COMPUTE
from paceline.planner.cost_table import NO_DRAFTING_HOST_TIME, NO_HOST_TIME
from paceline.profiling.profile_host import CALLED, drafted_steps, measure_host_time
from tests.profiling.exact_clock import READING, run_exactly

REQUEST, DRAFT, NODE = 0.3, 0.05, 0.01
"""Milliseconds outside of forwards: of each request, and where there are drafts of each and its
nodes."""


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outside(requests: int, nodes: int) -> float:
        return REQUEST * requests + (DRAFT * requests + NODE * nodes if nodes else 0.0)

    run_exactly(monkeypatch, outside)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of the real machine


def build(**limits: int) -> BuiltEngine:
    return build_engine(embedded_model("target"), EngineConfig(**{"max_num_seqs": 4, **limits}))  # type: ignore[arg-type]


@pytest.fixture
def built() -> BuiltEngine:
    return COMPUTE.call(lambda: build(max_model_len=1024))


def test_what_is_measured(built: BuiltEngine) -> None:
    engine = built.engine
    runner, proposers = engine.runner, engine.drafting.proposers
    host = COMPUTE.call(lambda: measure_host_time(built, default_speculative_config("embedded")))
    looks = 20 * READING  # that more are taken in one step than in another
    assert REQUEST < host.step <= REQUEST + looks
    assert host.request == pytest.approx(REQUEST)
    assert host.draft == pytest.approx(DRAFT, abs=looks)
    assert host.further_draft == pytest.approx(DRAFT)
    assert host.node == pytest.approx(NODE)
    assert 0.0 < host.ask <= looks
    assert set(host.calls) == {"suffix", "prompt_lookup", "ngram_model"}
    assert all(0.0 < ms <= looks for ms in host.calls.values())
    assert host.merge == pytest.approx(READING)
    assert host.drafting == NO_DRAFTING_HOST_TIME
    assert engine.runner is runner
    assert engine.drafting.proposers == proposers
    assert not engine.has_work


def test_drafts_are_made_now_and_then_and_come_true(built: BuiltEngine) -> None:
    engine = built.engine

    def run() -> tuple[int, int, int]:
        engine.set_speculation(built.proposers_for(CALLED[:1]))
        engine.reset_stats()
        steps = drafted_steps(engine, 20.0)
        stats = engine.stats()
        assert [step for step in steps if not 0 < step.planning_ms < step.ms] == []
        engine.set_speculation([])
        return len(steps), sum(step.nodes for step in steps), stats.speculation.num_accepted_tokens

    count, nodes, accepted = COMPUTE.call(run)
    assert 8 <= count < 100
    assert nodes > 2 * count
    assert accepted > 0.3 * nodes, "the rest is beyond the end of a repetition"


def test_other_planners_and_short_contexts_have_none(built: BuiltEngine) -> None:
    fixed = COMPUTE.call(
        lambda: build_engine(
            embedded_model("target"),
            EngineConfig(
                max_model_len=1024, planner="fixed", speculative=(SpeculativeConfig("suffix"),)
            ),
        )
    )
    assert COMPUTE.call(lambda: drafted_steps(fixed.engine, 1.0)) == []
    short = COMPUTE.call(lambda: build(max_model_len=128))
    assert COMPUTE.call(lambda: measure_host_time(short)) == NO_HOST_TIME
