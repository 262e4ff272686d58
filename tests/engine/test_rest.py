"""While it is known that nobody drafts, the planner is not asked; nothing is missed by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.engine.rest import MOST, Rest
from paceline.engine.scheduler import Scheduled
from paceline.policy.cost_aware import CostAwarePlanner
from paceline.policy.cost_points import StepShape
from paceline.policy.planner import FixedPlanner, PlainStep
from paceline.request import Request
from paceline.sampling_params import SamplingParams, SpeculativeParams
from tests.proposers.plugins import repeating_plugin
from tests.toy import toy_engine

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT = [3, 4, 5]


class Sleeper(FixedPlanner):
    """Asks nobody, and says that it stays so for ever; a planner that is wrong about that too."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.rested_steps: list[PlainStep] = []

    def begin(self, step: StepShape, requests: Sequence[Request]) -> bool:
        self.begun.append([request.request_id for request in requests])
        return False

    def rest_ms(self) -> float:
        return 1e9

    def rested(self, steps: Sequence[PlainStep]) -> None:
        self.rested_steps += steps


def scheduled(*requests: Request) -> list[Scheduled]:
    return [Scheduled(request, 1) for request in requests]


def some_request(request_id: int) -> Request:
    return Request(request_id, list(PROMPT), len(PROMPT), LONG, 0, max_len=100)


def test_the_planner_is_asked_once_and_told_of_every_step() -> None:
    engine = toy_engine([repeating_plugin()])
    planner = engine.drafting.planner = Sleeper()
    engine.add_request(PROMPT, LONG)
    while engine.has_work:
        engine.step()
    engine.drafting.replace([])
    assert planner.begun == [[0]]
    assert len(planner.rested_steps) == LONG.max_tokens - 2, "all but the prompt's and the first"
    assert all(step.emitted == 1.0 and step.total_ms > 0.0 for step in planner.rested_steps)


def test_who_comes_and_who_goes_wakes_it() -> None:
    engine = toy_engine([repeating_plugin()])
    planner = engine.drafting.planner = Sleeper()
    engine.add_request(PROMPT, LONG)
    for _ in range(6):
        engine.step()
    engine.add_request(PROMPT, replace(LONG, max_tokens=5))
    while engine.has_work:
        engine.step()
    assert [0, 1] in planner.begun
    assert planner.begun[-1] == [0], "the other one has ended"
    assert len(planner.begun) <= 4


def test_a_request_that_asks_for_drafts_gets_them_in_an_engine_that_rests() -> None:
    drafts = []
    for is_resting in (False, True):
        engine = toy_engine([repeating_plugin()])
        engine.drafting.planner = CostAwarePlanner(engine.cost)
        engine.drafting.replace(engine.drafting.proposers)
        if is_resting:
            engine.add_request(PROMPT, replace(LONG, speculative=SpeculativeParams(enabled=False)))
            for _ in range(5):
                engine.step()
            assert engine.drafting._rest.is_on
        wish = SpeculativeParams(num_speculative_tokens=3)
        params = replace(LONG, max_tokens=20, speculative=wish)
        (forced,) = engine.add_request([9, 8, 7], params)
        counters = engine.requests[forced].counters
        while forced in engine.requests:
            engine.step()
        drafts.append((counters.num_drafts, counters.num_draft_tokens))
    assert drafts[0] == drafts[1]
    assert drafts[0][0] > 0


def test_it_ends_by_time_by_number_and_by_other_requests() -> None:
    rest, planner, one, two = Rest(), Sleeper(), some_request(1), some_request(2)
    assert not rest.goes_on(scheduled(one))
    rest.begin(scheduled(one), 2.5)
    for _ in range(3):
        assert rest.goes_on(scheduled(one))
        rest.note(0.5, 1.0, 1.0)
    assert not rest.goes_on(scheduled(one)), "the time is over"
    rest.end(planner)
    assert planner.rested_steps == [PlainStep(0.5, 1.0, 1.0)] * 3
    rest.begin(scheduled(one, two), 1e9)
    assert not rest.goes_on(scheduled(one))
    assert not rest.goes_on(scheduled(one, some_request(3)))
    for _ in range(MOST):
        assert rest.goes_on(scheduled(one, two))
        rest.note(0.5, 1.0, 1.0)
    assert not rest.goes_on(scheduled(one, two))
    rest.end(planner)
    assert not rest.goes_on(scheduled(one, two))
