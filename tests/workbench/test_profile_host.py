"""Host times as a profile measures them: what is in them, and that the engine is left as it was."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from paceline.commands.resolve import default_speculative_config
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.build import BuiltEngine, build_engine
from paceline.engine.compute_thread import COMPUTE
from paceline.llm import embedded_model
from paceline.policy.host_time import NO_DRAFTING_HOST_TIME, NO_HOST_TIME
from paceline.workbench.profile_host import CALLED, measure_host_time
from paceline.workbench.profile_script import drafted_steps


def build(**limits: int) -> BuiltEngine:
    return build_engine(embedded_model("target"), EngineConfig(**{"max_num_seqs": 4, **limits}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def built() -> BuiltEngine:
    return COMPUTE.call(lambda: build(max_model_len=1024))


def test_what_is_measured(built: BuiltEngine) -> None:
    engine = built.engine
    runner, proposers = engine.runner, engine.drafting.proposers
    host = COMPUTE.call(lambda: measure_host_time(built, default_speculative_config(None)))
    assert set(host.calls) == {"suffix", "prompt_lookup", "ngram_model"}
    assert all(0.0 < ms < 5.0 for ms in (host.step, host.ask, host.draft))
    assert all(0.0 <= ms < 5.0 for ms in (*astuple(host)[:6], *host.calls.values()))
    assert 0.0 < host.merge < 1.0
    assert host.drafting == NO_DRAFTING_HOST_TIME
    assert host.further_draft > 0.0, "a request more is planned for, verified and committed"
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
