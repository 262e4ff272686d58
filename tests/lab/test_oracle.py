"""The per-step oracle: nobody with its proposers is faster, and no node is verified in vain."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculativeConfig
from paceline.planner.choice import DraftLimits
from paceline.planner.cost_table import NO_HOST_TIME, HostTime
from paceline.planner.planner import CostAwarePlanner, FixedPlanner
from paceline.planner.value import DraftingCost, DraftTime, Source
from paceline.proposers.base import Proposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.span import DraftTree
from paceline.request.traces import Trace
from paceline_lab.simulate.oracle import best_steps
from paceline_lab.simulate.replay import ReplayResult, replay
from tests.lab.toy_traces import frozen_cost, make_meta, make_trace
from tests.toy import lookup_config

CONFIG = lookup_config(num_speculative_tokens=4)
FREE = DraftingCost({})
BUSY = HostTime(step=0.1, request=0.02, draft=0.15, further_draft=0.05)
DEAR = DraftingCost({"costly": DraftTime(call=0.1, level=0.06), "prompt_lookup": DraftTime(0.02)})


class Costly(PromptLookupProposer):
    """Prompt lookup that takes itself for a draft model; its trees branch."""

    name = "costly"
    costs_forwards = True
    drafts_from_text = False

    def __init__(self) -> None:
        super().__init__(
            lookup_config(num_speculative_tokens=6, max_branching=3, max_tree_nodes=12)
        )


class Whim(FixedPlanner):
    """Asks whom it likes and verifies the beginning of what it gets."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        return [i for i in candidates if self._random.random() < 0.7]

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        trees = map(self.drafts.tree, range(len(limits)))
        return [tree.select(range(self._random.randint(0, len(tree)))) for tree in trees]


def proposers() -> list[Proposer]:
    return [PromptLookupProposer(CONFIG), Costly()]


def repetitive(seed: int, count: int) -> list[Trace]:
    """Prompts and outputs of few different tokens, in which much is found again."""
    drawn = random.Random(seed)
    traces = []
    for index in range(count):
        tokens = [drawn.randint(1, 3) for _ in range(drawn.randint(4, 30))]
        while len(tokens) < 45:
            at = drawn.randint(0, len(tokens) - 1)
            tokens += [*tokens[at : at + drawn.randint(2, 8)], drawn.randint(1, 4)]
        length = drawn.randint(2, 20)
        traces.append(make_trace(index, tokens[:length], tokens[length:]))
    return traces


curves = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=8).map(
    # Any curve on which no step is cheaper than a narrower one.
    lambda steps: [1.0 + sum(steps[:n]) for n in range(len(steps) + 1)]
)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), curve=curves, dear=st.booleans(), busy=st.booleans())
def test_for_one_request_nobody_is_faster(
    seed: int, curve: list[float], dear: bool, busy: bool
) -> None:
    cost, drafting = frozen_cost(curve, BUSY if busy else NO_HOST_TIME), DEAR if dear else FREE
    traces, meta = repetitive(seed, 2), make_meta(60)

    def run(planner: FixedPlanner | CostAwarePlanner) -> ReplayResult:
        return replay(traces, meta, proposers(), planner, cost, drafting=drafting)

    best = best_steps(traces, meta, proposers, cost, drafting=drafting)
    others = [run(Whim(seed)), run(FixedPlanner()), run(CostAwarePlanner(cost))]
    others.append(replay(traces, meta, (), FixedPlanner(), cost))
    for other in others:
        for mine, theirs in zip(best.traces, other.traces, strict=True):
            assert mine.ms <= theirs.ms + 1e-9
    tokens = [len(trace.output_token_ids) for trace in traces]
    assert [trace.counters.num_emitted_tokens for trace in best.traces] == tokens


def test_it_verifies_what_is_accepted_and_no_more_than_pays() -> None:
    traces, meta = repetitive(1, 3), make_meta(60)
    steep = frozen_cost([1.0 + 1.5 * n for n in range(8)])
    flat = frozen_cost([1.0, 1.0001, 1.0002])
    for cost, pays in ((steep, False), (flat, True)):
        result = best_steps(traces, meta, proposers, cost)
        drafted = result.total("num_draft_tokens")
        assert drafted == result.total("num_accepted_tokens")
        assert (drafted > 0) == pays
        assert result.draft_ms == 0.0
    with_time = best_steps(traces, meta, proposers, flat, drafting=DEAR)
    assert with_time.draft_ms > 0.0
    assert with_time.ms == pytest.approx(sum(trace.ms for trace in with_time.traces))


@pytest.mark.parametrize("host", [NO_HOST_TIME, BUSY])
@pytest.mark.parametrize("dear", [False, True])
def test_for_several_requests_it_is_ahead_of_what_cannot_know(dear: bool, host: HostTime) -> None:
    cost, drafting = frozen_cost(host=host), DEAR if dear else FREE
    traces, meta = repetitive(2, 12), make_meta(60)

    def run(planner: FixedPlanner | CostAwarePlanner, *some: Proposer) -> float:
        return replay(traces, meta, some, planner, cost, drafting=drafting, concurrency=4).ms

    best = best_steps(traces, meta, proposers, cost, drafting=drafting, concurrency=4)
    lengths = [SpeculativeConfig(num_speculative_tokens=n) for n in (1, 2, 4)]
    for other in (
        run(FixedPlanner()),
        run(FixedPlanner(), *proposers()),
        run(CostAwarePlanner(cost), *proposers()),
        *(run(FixedPlanner(), PromptLookupProposer(config)) for config in lengths),
    ):
        assert best.ms < other
    assert best.total("num_draft_tokens") == best.total("num_accepted_tokens") > 0
