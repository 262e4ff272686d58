"""Simple rules of drafting: each does what it says, and none changes a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.pace import StepReport
from paceline.planner.planner import Planner
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.request import VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from tests.planner.machine import DEPTH, DRAFT, LOOKUP, cost_table, request
from tests.programs import module
from tests.toy import Job, draft_config, lookup_config, run_jobs, toy_runner

rivals = module("rivals")
RIVALS = rivals.RIVALS
FLAT = [10.0] * 99


def rival(name: str, times: Sequence[float] = FLAT) -> Planner:
    return RIVALS[name](CostModel(cost_table(times), learns=False))


def shape(rows: int, requests: int) -> StepShape:
    return StepShape(rows, 0, 0, rows, requests)


def chain(*probs: float) -> DraftTree:
    return DraftTree.chain(range(len(probs)), probs, "x")


def step(planner: Planner, *drafts: tuple[DraftTree, int]) -> list[DraftTree] | None:
    """One step of requests 0, 1, ...: their drafts, and how much of what is verified is accepted.

    Returns what was verified, None where nobody was to be asked.
    """
    requests = [request(i) for i in range(len(drafts))]
    verified = None
    if not planner.begin(shape(len(drafts), len(drafts)), requests):
        planner.drafts.begin(range(len(drafts)))
        for index, (tree, _) in enumerate(drafts):
            planner.drafts.add(index, "x", tree)
        verified = planner.choose([DraftLimits(64, DEPTH)] * len(drafts), 512)
        for each, tree, (_, right) in zip(requests, verified, drafts, strict=True):
            accepted = min(right, len(tree))
            emitted = [7] * (accepted + 1)
            planner.observe(each, VerifyResult(range(accepted + 1), emitted, ["x"], tree))
    planner.end(StepReport(shape(9, 1), 1.0, 1.0, len(drafts), 1))
    return verified


def lengths(planner: Planner, accepted: Sequence[int]) -> list[int]:
    """Lengths of the drafts of one request of which so many tokens are accepted."""
    found = [step(planner, (chain(*[0.9] * DEPTH), right)) for right in accepted]
    return [len(trees[0]) for trees in found if trees]


def drafted_levels(planner: Planner, claimed: Sequence[float]) -> int:
    """How deep a draft model drafts that is as sure of its tokens as claimed."""
    planner.begin(shape(1, 1), [request(0)])
    prices = planner.prices(DRAFT, [0], DEPTH)
    for level in range(1, len(claimed) + 1):
        if not any(prices.are_met([(0, claimed[:level])])):
            return level
    return len(claimed)


# --- each rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 4, 8])
def test_fixed_length(length: int) -> None:
    planner = rival(f"fixed, K = {length}")
    assert drafted_levels(planner, [0.1] * DEPTH) == length
    assert lengths(planner, [0, 9]) == [length] * 2
    fork = DraftTree(list(range(5)), [-1, -1, 0, 2, 3], [0.5] * 5, ["x"] * 5)
    verified = step(planner, (fork, 0))
    assert verified is not None
    assert max(verified[0].depths()) == min(length, 4)
    assert len(verified[0]) == 5 - max(0, 4 - length), "depth is capped, not nodes"


def test_prompt_lookup_alone() -> None:
    planner = rival("prompt lookup alone")
    assert planner.ask(DRAFT, [0, 2]) == []
    assert planner.ask(LOOKUP, [0, 2]) == [0, 2]


# --- in an engine ---------------------------------------------------------------------------------

JOBS = [
    Job([1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(temperature=0.0, max_tokens=14)),
    Job([4, 5, 6], SamplingParams(temperature=0.9, seed=5, max_tokens=14), at=2),
]


def run(planner: Callable[[CostModel], Planner] | None) -> tuple[list[Any], Engine]:
    cost = CostModel()
    proposers = [
        PromptLookupProposer(lookup_config(num_speculative_tokens=8)),
        DraftModelProposer(
            draft_config(num_speculative_tokens=8, max_branching=2, max_tree_nodes=12),
            toy_runner(prefix_caching=False, noise=0.3),
        ),
    ]
    engine = Engine(
        toy_runner(),
        EngineConfig(max_model_len=256, max_num_seqs=4),
        proposers if planner else (),
        planner=planner(cost) if planner else None,
        cost=cost,
    )
    answers = [result.answer for group in run_jobs(engine, JOBS) for result in group]
    return answers, engine


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return run(None)[0]


@pytest.mark.parametrize("name", RIVALS)
def test_no_token_changes(name: str, plain: list[Any]) -> None:
    answers, engine = run(RIVALS[name])
    assert answers == plain
    assert engine.stats().speculation.num_draft_tokens > 0
    assert (engine.drafting.num_forwards > 0) == (name != "prompt lookup alone")
