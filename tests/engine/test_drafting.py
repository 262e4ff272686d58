"""Who is asked to draft, in which order, and how their trees become one."""

from __future__ import annotations

import pytest

from paceline.config.objective import Objective
from paceline.engine.contained import MAX_FAILURES
from paceline.engine.drafting import Drafting
from paceline.engine.scheduler import Scheduled, step_shape
from paceline.metrics import EngineStats
from paceline.policy.cost_aware import CostAwarePlanner
from paceline.policy.drafting_cost import DraftingCost, DraftTime
from paceline.policy.planner import FixedPlanner
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.span import DraftTree
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
    drafting = Drafting([expensive, Scripted(free)], FixedPlanner(), VOCAB, EngineStats)
    items = [Scheduled(request(i), 1) for i in (0, 1)]
    trees = [draft.tree for draft in drafting.propose(items, step_shape(items), node_budget=100)]
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
    drafting = Drafting([other], FixedPlanner(), VOCAB, lambda: stats)
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


def test_who_joins_is_asked_although_nobody_else_is_worth_it() -> None:
    """As with a grammar, whose drafts may be sure while those of the others were never right."""
    engine = toy_engine([Scripted(lambda request: DraftTree.chain([1], [0.0], "scripted"))])
    costs = DraftingCost({"scripted": DraftTime(1.0)})  # too much to be probed at once
    planner = CostAwarePlanner(engine.cost, Objective(), costs)
    drafting = Drafting(engine.drafting.proposers, planner, VOCAB, EngineStats)
    asking, seen = planner._asking, list[int]()
    accounts = asking._accounts
    accounts.settle(("scripted", 0), -100.0, 0.0)

    def sure(request: Request) -> DraftTree:
        seen.append(request.request_id)
        return DraftTree.chain([7], [1.0], "sure")

    joining = Scripted(sure)
    joining.name = "sure"
    assert not asking.is_anyone_worth_asking([request(0)], 1.0)
    drafting.join(joining)
    assert asking.is_anyone_worth_asking([request(0)], 1.0)
    assert asking._accounts is accounts, "what was learnt of the others stays"
    items = [Scheduled(request(0), 1)]
    for _ in range(100):  # or a plain step would be looked at first
        engine.cost.observe(step_shape(items), 1.0)
    drafting.propose(items, step_shape(items), node_budget=10)
    assert seen == [0]
    drafting.replace([joining])
    assert asking._accounts is not accounts
