"""What a step tells those who learn from it: what it was, how long it took, what it emitted."""

from __future__ import annotations

import pytest

from paceline.engine import step
from paceline.planner.cost_table import StepShape
from paceline.planner.pace import StepReport
from paceline.planner.planner import FixedPlanner
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.sampling_params import SamplingParams
from tests.engine.test_faults import GREEDY, PROMPTS, break_forward
from tests.toy import Job, lookup_config, run_jobs, toy_engine

PHASES = {"schedule", "propose", "plan", "pack", "forward", "verify", "commit", "observe"}


class Noting(FixedPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.reports: list[StepReport] = []

    def end(self, report: StepReport) -> None:
        self.reports.append(report)


def test_the_planner_hears_of_every_token_that_was_decoded() -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config())])
    planner = engine.drafting.planner = Noting()
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(7,))
    groups = run_jobs(engine, [Job(prompt, params, at=i) for i, prompt in enumerate(PROMPTS)])
    decoded = sum(len(result.token_ids) - 1 for group in groups for result in group)
    assert sum(report.num_emitted for report in planner.reports) == decoded
    assert engine.stats().num_output_tokens == decoded + len(PROMPTS)
    assert set(engine.stats().seconds) == PHASES


def test_nothing_is_learnt_of_a_forward_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config())])
    planner = engine.drafting.planner = Noting()
    learnt: list[tuple[StepShape, float]] = []
    monkeypatch.setattr(engine.cost, "observe", lambda *seen: learnt.append(seen))
    script = {4: lambda engine, ids: break_forward(engine, None, times=1)}
    run_jobs(engine, [Job(prompt, GREEDY) for prompt in PROMPTS], script)
    (failed,) = [at for at, (_, milliseconds) in enumerate(learnt) if not milliseconds]
    assert failed == 4
    shape, _ = learnt[failed]
    assert (shape.requests, shape.rows) == (3, 3), "run again without drafts, and all of them"
    assert planner.reports[failed].num_emitted == 3
    assert planner.reports[failed].forward_ms == 0.0 < planner.reports[failed].total_ms


def test_a_verb_takes_the_time_since_the_one_before() -> None:
    now = iter([10.0, 11.0, 13.0, 16.0])
    seconds = {"pack": 5.0}
    timed = step.Step(seconds, lambda: next(now))
    for verb in ("schedule", "pack", "schedule"):
        timed.done(verb)
    assert seconds == {"schedule": 1.0 + 3.0, "pack": 5.0 + 2.0}
    assert timed.total_ms == 6000.0
