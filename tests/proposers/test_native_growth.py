"""Trees that grow in one native call are those that Python grows level by level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.cache.model_runner import ModelRunner
from paceline.planner.drafts import FREE, Prices
from paceline.proposers.base import DraftBudget
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.draft_model import proposer as draft_model
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.heads import proposer as heads
from paceline.proposers.heads.proposer import HeadProposer
from paceline.request.request import Request
from paceline.request.span import DraftTree
from tests.proposers.drive import commit, make_request
from tests.proposers.heads import following_head
from tests.proposers.self_drafts import following, native
from tests.toy import draft_config, toy_runner

pytestmark = native
PROMPTS = ([5, 9, 2, 7, 7, 30, 11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [8, 8])
TREE = {"max_tree_nodes": 14, "max_branching": 3, "num_speculative_tokens": 5}
CHAIN = {"num_speculative_tokens": 4}
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 9, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
    {"min_tokens": 3, "presence_penalty": 0.5},
]
PRICES = [
    FREE,
    Prices([0.1] * 99, 0.02),
    Prices([0.02 * n for n in range(99)], 0.0, lambda index, depth, prob: prob / (index + 1)),
]
Make = Callable[..., Drafter]


def model_drafter(**options: Any) -> Drafter:
    runner = toy_runner("native-float32", prefix_caching=False, seed=1)
    return DraftModelProposer(draft_config(**options), runner)


def head_drafter(**options: Any) -> Drafter:
    return following_head("native-float32", **options)


def layers_drafter(**options: Any) -> Drafter:
    return following("native-float32", **options)


KINDS = [model_drafter, head_drafter, layers_drafter]


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, trees grow level by level."""

    def forbid() -> None:
        for module in (draft_model, heads):
            monkeypatch.setattr(module, "can_grow", lambda *args: False)

    return forbid


def requests(**sampling: Any) -> list[Request]:
    return [make_request(i, prompt, **sampling) for i, prompt in enumerate(PROMPTS)]


def drafts(proposer: Drafter, all_of: list[Request], prices: Prices) -> list[DraftTree]:
    """Of several steps, each of which commits what the first request's draft begins with."""
    found = []
    for nodes, depth in ((14, 5), (3, 2), (1, 1), (9, 4)):
        count = len(all_of)
        budget = DraftBudget([nodes, nodes, 2 * nodes][:count], [depth] * count, prices)
        trees = proposer.propose(all_of, budget)
        found += trees
        for request, tree in zip(all_of, trees, strict=True):
            commit(proposer, request, [*tree.token_ids[:1], 4])
    return found


@pytest.mark.parametrize("prices", PRICES, ids=["free", "a price", "learnt"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("options", [TREE, CHAIN, TREE | {"min_accept_prob": 0.05}])
@pytest.mark.parametrize("make", KINDS)
def test_both_grow_the_same(
    make: Make,
    options: dict[str, Any],
    sampling: dict[str, Any],
    prices: Prices,
    in_python: Callable[[], None],
) -> None:
    once = drafts(make(**options), requests(**sampling), prices)
    in_python()
    again = drafts(make(**options), requests(**sampling), prices)
    assert any(len(tree) > 1 for tree in once)
    for tree, other in zip(once, again, strict=True):
        assert (tree.token_ids, tree.parents) == (other.token_ids, other.parents)
        assert tree.accept_probs == pytest.approx(other.accept_probs, rel=1e-12)
        assert tree.origins == other.origins


@pytest.mark.parametrize("make", KINDS)
def test_both_count_the_same_forwards(make: Make, in_python: Callable[[], None]) -> None:
    counts = []
    for _ in range(2):
        proposer = make(**TREE)
        assert isinstance(proposer, DraftModelProposer | HeadProposer)
        drafts(proposer, requests(), PRICES[1])
        counts.append((proposer.num_forwards, proposer._runner.num_rows))
        in_python()
    assert counts[0] == counts[1]


def test_no_room_for_a_level_ends_a_tree(in_python: Callable[[], None]) -> None:
    found = []
    for _ in range(2):
        # A block for ten tokens and six drafted nodes.
        runner = toy_runner("native-float32", num_blocks=2, prefix_caching=False, seed=1)
        proposer = DraftModelProposer(draft_config(**TREE), runner)
        request = make_request(1, [5, 9, 2, 7, 7, 30, 11, 3, 1, 4])
        found += proposer.propose([request], DraftBudget([14], [5]))
        in_python()
    assert found[0].parents == found[1].parents
    assert 1 < max(found[0].depths()) < 5


def test_numbers_that_are_none_end_a_tree() -> None:
    proposer = head_drafter(**TREE)
    assert isinstance(proposer, HeadProposer)
    runner, request = proposer._runner, make_request(1, PROMPTS[0])
    assert isinstance(runner, ModelRunner)
    read = proposer._features_of
    proposer._features_of = lambda span: read(span) * torch.nan  # type: ignore[method-assign]
    assert proposer.propose([request], DraftBudget([14], [5])) == [DraftTree()]
    assert runner.num_forwards == 1
