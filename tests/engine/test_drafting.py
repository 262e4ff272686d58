"""Who is asked to draft, in which order, and how their trees become one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.engine.contained_proposers import MAX_FAILURES
from paceline.engine.drafting import Drafting
from paceline.engine.step import Scheduled, step_shape
from paceline.planner.cost import CostModel
from paceline.planner.planner import CostAwarePlanner, FixedPlanner
from paceline.planner.value import Source
from paceline.request.engine_stats import EngineStats
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from paceline_lab.simulate.replay import ReplayClock
from tests.engine.test_faults import Scripted
from tests.toy import VOCAB, toy_engine


def request(index: int) -> Request:
    return Request(index, [1, 2, 3], 3, SamplingParams(), seed=0, max_len=100, num_computed=2)


@pytest.mark.parametrize(("prob", "asked"), [(0.9, [1]), (0.3, [0, 1])])
def test_costly_drafts_are_not_made_where_free_ones_are_enough(
    prob: float, asked: list[int]
) -> None:
    seen: list[int] = []

    def costly(request: Request) -> DraftTree:
        seen.append(request.request_id)
        return DraftTree.chain([7], [0.5], "costly")

    def free(request: Request) -> DraftTree:
        sure = request.request_id == 0  # only the first request has a match
        return DraftTree.chain([5, 6], [prob, prob], "free") if sure else DraftTree()

    expensive = Scripted(costly)
    expensive.costs_forwards = True
    planner = FixedPlanner()
    drafting = Drafting([expensive, Scripted(free)], planner, VOCAB, EngineStats())
    items = [Scheduled(request(i), 1) for i in (0, 1)]
    drafts = drafting.propose(items, step_shape(items), node_budget=100)
    trees = [planner.drafts.tree(index) for index in range(len(drafts))]
    assert seen == asked
    assert trees[0].token_ids[:2] == [5, 6]
    assert trees[1].token_ids == [7]
    assert (7 in trees[0].token_ids) == (0 in asked)


def test_who_was_switched_off_does_not_come_back_until_all_are_replaced() -> None:
    def broken(request: Request) -> DraftTree:
        raise RuntimeError("no draft")

    def working(request: Request) -> DraftTree:
        return DraftTree()

    other = Scripted(working)
    other.name = "other"
    stats = EngineStats()
    drafting = Drafting([other], FixedPlanner(), VOCAB, stats)
    for _ in range(5):
        if len(drafting.proposers) == 1:
            drafting.join(Scripted(broken))
        items = [Scheduled(request(0), 1)]
        drafting.propose(items, step_shape(items), node_budget=100)
    assert stats.num_proposer_failures == MAX_FAILURES
    assert drafting.proposers == [other]
    drafting.replace([other])
    drafting.join(Scripted(broken))
    assert len(drafting.proposers) == 2


def test_a_source_is_recognised_after_another_has_joined() -> None:
    """So that a planner keeps what it has learnt of it."""
    sources_set: list[Sequence[Source]] = []

    class Listening(FixedPlanner):
        def set_sources(self, sources: Sequence[Source]) -> None:
            sources_set.append(sources)

    other = Scripted(lambda _: DraftTree())
    other.name = "other"
    drafting = Drafting([other], Listening(), VOCAB, EngineStats())
    drafting.join(Scripted(lambda _: DraftTree()))
    (before,), after = sources_set
    assert len(after) == 2
    assert before in after


def test_who_joins_is_asked_although_nobody_else_is_worth_it() -> None:
    """As with a grammar, whose drafts may be sure while those of the others were never right."""
    asked: list[str] = []

    def proposer(name: str, prob: float) -> Scripted:
        def draft(request: Request) -> DraftTree:
            asked.append(name)
            return DraftTree.chain([7], [prob], name)

        scripted = Scripted(draft)
        scripted.name = name
        return scripted

    engine = toy_engine([proposer("poor", 0.0)])
    cost, items = CostModel(learns=False), [Scheduled(request(0), 1)]
    shape = step_shape(items)
    planner = CostAwarePlanner(cost)
    drafting = Drafting(engine.drafting.proposers, planner, VOCAB, EngineStats(), ReplayClock())

    def steps(count: int) -> list[str]:
        asked.clear()
        for _ in range(count):
            known = len(asked)
            drafts = drafting.propose(items, shape, node_budget=10)
            if drafts:
                drafting.choose(drafts, 10)
            asking_ms = 0.5 * (len(asked) - known)
            drafting.end(items, shape, 1, 1.0, 1.0 + asking_ms)
        return list(asked)

    steps(200)
    assert "poor" not in steps(3), "it is asked no more but to explore"
    drafting.join(proposer("sure", 1.0))
    assert steps(2)[0] == "sure"
    assert steps(20).count("poor") < 15, "what was learnt of it stays"
