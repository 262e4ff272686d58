"""Steps for which the planner need not be asked: it is not, and is told of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.planner.cost_table import StepShape
from paceline.planner.pace import StepReport
from paceline.planner.planner import CostAwarePlanner, FixedPlanner
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from tests.proposers.plugins import repeating_plugin
from tests.toy import toy_engine

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT = [3, 4, 5]


class Skipping(FixedPlanner):
    """Asks no proposer, and says so for some steps to come."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.begun: list[list[int]] = []
        self.reports: list[StepReport] = []

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self.begun.append([request.request_id for request in requests])
        return self.steps

    def end(self, report: StepReport) -> None:
        self.reports.append(report)


def test_the_planner_is_asked_when_the_steps_are_over_and_told_of_all_of_them() -> None:
    engine = toy_engine([repeating_plugin()])
    planner = engine.drafting.planner = Skipping(7)
    engine.add_request(PROMPT, LONG)
    while engine.has_work:
        engine.step()
    decoded = LONG.max_tokens - 1  # the first one comes with the prompt
    assert len(planner.begun) == -(-decoded // 7)
    engine.drafting.replace([])  # what is left to tell is told now
    reports = planner.reports[1:]
    assert sum(each.num_steps for each in reports) == decoded
    assert len(reports) <= 2 * len(planner.begun)
    assert all(each.num_emitted == each.num_steps and each.total_ms > 0.0 for each in reports)


def test_requests_that_come_and_go_end_it() -> None:
    engine = toy_engine([repeating_plugin()])
    planner = engine.drafting.planner = Skipping(1000)
    engine.add_request(PROMPT, LONG)
    for _ in range(6):
        engine.step()
    engine.add_request(PROMPT, replace(LONG, max_tokens=5))
    while engine.has_work:
        engine.step()
    assert [0, 1] in planner.begun
    assert planner.begun[-1] == [0], "the other one has ended"
    assert len(planner.begun) <= 4


def test_other_proposers_end_it() -> None:
    engine = toy_engine([repeating_plugin()])
    planner = engine.drafting.planner = Skipping(1000)
    engine.add_request(PROMPT, LONG)
    for _ in range(6):
        engine.step()
    before = len(planner.begun)
    engine.drafting.replace([repeating_plugin()])
    engine.step()
    assert len(planner.begun) == before + 1


def test_a_request_that_asks_for_drafts_gets_them_in_an_engine_that_skips() -> None:
    drafts = []
    for is_skipping in (False, True):
        engine = toy_engine([repeating_plugin()])
        engine.drafting.planner = CostAwarePlanner(engine.cost)
        engine.drafting.replace(engine.drafting.proposers)
        if is_skipping:
            engine.add_request(PROMPT, replace(LONG, speculative=SpeculativeParams(enabled=False)))
            for _ in range(5):
                engine.step()
        wish = SpeculativeParams(num_speculative_tokens=3)
        params = replace(LONG, max_tokens=20, speculative=wish)
        (forced,) = engine.add_request([9, 8, 7], params)
        counters = engine.requests[forced].counters
        while forced in engine.requests:
            engine.step()
        drafts.append((counters.num_drafts, counters.num_draft_tokens))
    assert drafts[0] == drafts[1]
    assert drafts[0][0] > 0
