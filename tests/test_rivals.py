"""Other engines' rules: each does what its source says, and none changes a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.policy.cost import CostModel
from paceline.policy.cost_points import StepShape
from paceline.policy.planner import DraftLimits, Planner, StepReport
from paceline.proposers.draft_model import DraftModelProposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request import VerifyResult
from paceline.sampling_params import SamplingParams
from paceline.span import DraftTree
from tests.policy.machine import DEPTH, DRAFT, LOOKUP, cost_table, request
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
    if planner.begin(shape(len(drafts), len(drafts)), requests):
        limits = [DraftLimits(64, DEPTH)] * len(drafts)
        verified = planner.choose([tree for tree, _ in drafts], limits, 512)
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
    prices, path = planner.prices(DRAFT, [0], DEPTH), 1.0
    for level, prob in enumerate(claimed, 1):
        path *= prices.estimate(0, level, prob)
        if not any(prices.are_met([(path, level)])):
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


def test_length_by_the_ratio_over_a_window() -> None:
    planner = rival("accepted/drafted ratio")
    assert lengths(planner, [9] * 6) == [4, 5, 6, 7, 8, 8]
    # 38 of 38 are accepted so far; one draft alone says little.
    assert lengths(planner, [0, 0, 0, 0, 0, 0, 0, 0, 0]) == [8, 8, 8, 8, 8, 8, 7, 6, 5]
    assert lengths(planner, [0] * 9)[-1] == 1
    between = rival("accepted/drafted ratio")
    assert lengths(between, [2, 2, 1, 2]) == [4] * 4, "from 0.3 to 0.5 it stays"


def test_look_ahead_follows_the_latest_draft() -> None:
    planner = rival("look-ahead")
    assert lengths(planner, [9, 9, 4, 3, 2, 0, 0, 0, 0, 1, 2]) == [4, 5, 6, 6, 6, 5, 4, 3, 2, 2, 2]
    assert lengths(planner, [9, 9]) == [3, 4]
    assert drafted_levels(planner, [0.1] * DEPTH) == 5


def test_lengths_are_of_one_request() -> None:
    planner = rival("look-ahead")
    draft = chain(*[0.9] * DEPTH)
    for _ in range(3):
        verified = step(planner, (draft, 9), (draft, 0))
    assert verified is not None
    assert [len(tree) for tree in verified] == [rivals.START_LENGTH + 2, rivals.START_LENGTH - 2]
    planner.finish(request(1))
    verified = step(planner, (draft, 9), (draft, 0))
    assert verified is not None
    assert [len(tree) for tree in verified] == [rivals.START_LENGTH + 3, rivals.START_LENGTH]


def test_prompt_lookup_alone() -> None:
    planner = rival("prompt lookup alone")
    assert planner.ask(DRAFT, [0, 2], [[], [], []]) == []
    assert planner.ask(LOOKUP, [0, 2], [[], [], []]) == [0, 2]


def test_p_min_cuts_below_the_first_unsure_token() -> None:
    planner = rival("p_min")
    verified = step(planner, (chain(0.9, 0.75, 0.7, 0.9), 0), (chain(0.7, 0.9), 0))
    assert verified is not None
    assert [len(tree) for tree in verified] == [2, 0]
    fork = DraftTree([5, 6, 7, 8], [-1, -1, 0, 1], [0.7, 0.8, 0.9, 0.9], ["x"] * 4)
    verified = step(planner, (fork, 0))
    assert verified is not None
    assert verified[0].token_ids == [6, 8], "what hangs below the cut is cut too"
    assert drafted_levels(planner, [0.9, 0.8, 0.7, 0.9]) == 3


@pytest.mark.parametrize(
    ("name", "right", "closes"),
    [
        ("gate, accepted per draft", 0, True),
        ("gate, accepted per draft", 1, False),
        ("gate, accepted/drafted", 1, True),
        ("gate, accepted/drafted", 3, False),
    ],
)
def test_gate_closes_probes_and_opens_again(name: str, right: int, closes: bool) -> None:
    planner = rival(name)
    draft = chain(*[0.9] * DEPTH)
    asked = [step(planner, (draft, right)) is not None for _ in range(40)]
    assert all(asked[:5]), "a few bad steps do not close it"
    assert all(asked) is not closes
    if closes:
        asked = [step(planner, (draft, right)) is not None for _ in range(4 * rivals.PROBE_EVERY)]
        assert sum(asked) == 4
        good = [step(planner, (draft, 8)) is not None for _ in range(3 * rivals.PROBE_EVERY)]
        assert all(good[-10:]), "after good probes it is open again"


def test_one_repetitive_request_keeps_the_gate_open_for_all() -> None:
    planner = rival("gate, accepted per draft")
    draft = chain(*[0.9] * DEPTH)
    for _ in range(60):
        verified = step(planner, (draft, 4), (draft, 0), (draft, 0))
        assert verified is not None
        assert all(map(len, verified))


def test_probability_of_the_whole_draft_times_speed() -> None:
    def chosen(times: Sequence[float], *drafts: DraftTree) -> list[list[int]]:
        planner = rival("P(draft) x speed", times)
        verified = step(planner, *((draft, 0) for draft in drafts))
        assert verified is not None
        return [tree.token_ids for tree in verified]

    # 0.9^j (j + 1) rises up to j = 8; with linear times nothing pays.
    assert chosen(FLAT, chain(*[0.9] * 8)) == [list(range(8))]
    assert chosen([10.0 * n for n in range(1, 99)], chain(*[0.9] * 8)) == [[]]
    # 0.6 x 2 > 1 > 0.36 x 3 / 1.1: expected tokens would say 1.96 / 1.1 for both.
    assert chosen([10.0, 10.0, 11.0], chain(0.6, 0.6)) == [[0]]
    # A cliff at four rows: one request passes it with its third token, two with their first.
    cliff = [10.0] * 3 + [25.0] * 90
    assert chosen(cliff, chain(*[0.9] * 4)) == [[0, 1]]
    assert chosen(cliff, chain(0.9), chain(0.9)) == [[], []]
    assert chosen(cliff, chain(0.9), DraftTree()) == [[0], []], "who drafts nothing adds nothing"
    fork = DraftTree([5, 6, 7], [-1, -1, 1], [0.4, 0.8, 0.9], ["x"] * 3)
    assert chosen(FLAT, fork) == [[6, 7]]


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
def test_no_token_changes_and_nothing_is_kept(name: str, plain: list[Any]) -> None:
    answers, engine = run(RIVALS[name])
    assert answers == plain
    assert engine.stats().speculation.num_draft_tokens > 0
    assert (engine.drafting.num_forwards > 0) == (name != "prompt lookup alone")
    planner = engine.drafting.planner
    assert not any(kept for kept in vars(planner).values() if isinstance(kept, dict))
