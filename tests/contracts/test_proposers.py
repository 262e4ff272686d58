"""What every proposer must do, one suite over all of them.

A proposer may be wrong about the future; it may not be wrong about the past, exceed its budget,
depend on who else is in the batch, or touch a request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from paceline.models.layer_sizes import DELTA, MAMBA2
from paceline.proposers.base import DraftBudget, Proposer
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.proposers.suffix import SuffixProposer
from paceline.request.request import FinishReason, Request
from paceline.request.span import DraftTree
from tests.proposers.dflash import following_dflash
from tests.proposers.drive import Target, commit, make_request, propose
from tests.proposers.heads import following_head
from tests.proposers.mtp import following_mtp
from tests.proposers.ngrams import ngram_proposer
from tests.proposers.parallel_drafts import parallel_drafter
from tests.proposers.parallel_heads import following as following_parallel
from tests.proposers.parallel_heads import toy_dflash2, toy_dspark, toy_peagle
from tests.proposers.plugins import repeating_plugin
from tests.proposers.self_drafts import following
from tests.proposers.vocabularies import far_pair, foreign_drafter
from tests.toy import EOS, HYBRIDS, VOCAB, draft_config, lookup_config, suffix_config, toy_runner

TREE = {"max_tree_nodes": 9, "max_branching": 3, "num_speculative_tokens": 5}


def draft_model(**options: int) -> Proposer:
    return DraftModelProposer(draft_config(**options), toy_runner(prefix_caching=False, noise=0.2))


def hybrid_draft(kind: str, **options: int) -> Proposer:
    runner = toy_runner(prefix_caching=False, noise=0.2, shape=HYBRIDS[kind])
    return DraftModelProposer(draft_config(**options), runner)


def suffix_after_others() -> Proposer:
    """It has seen other requests end."""
    proposer = SuffixProposer(suffix_config())
    for prompt in (range(2, 20), [3, 4, 5, 9, 7, 3, 4]):
        request = make_request(99, prompt)
        commit(proposer, request, [8, 3])
        request.finish_reason = FinishReason.STOP
        proposer.finish(request)
    return proposer


BUILDERS: dict[str, Callable[[], Proposer]] = {
    "prompt_lookup": lambda: PromptLookupProposer(lookup_config()),
    "prompt_lookup tree": lambda: PromptLookupProposer(lookup_config(**TREE)),
    "suffix": lambda: SuffixProposer(suffix_config(max_tree_nodes=0, max_branching=1)),
    "suffix tree": suffix_after_others,
    "suffix in Python": lambda: SuffixProposer(suffix_config(), is_native=False),
    "ngram_model": lambda: ngram_proposer(max_tree_nodes=0, max_branching=1),
    "ngram_model tree": ngram_proposer,
    "plugin": repeating_plugin,
    "draft_model": draft_model,
    "draft_model tree": lambda: draft_model(**TREE),
    "draft_model behind": lambda: draft_model(catch_up_tokens=6),
    "hybrid draft tree": lambda: hybrid_draft(MAMBA2, **TREE),
    "hybrid draft behind": lambda: hybrid_draft(DELTA, catch_up_tokens=6, **TREE),
    "other vocabulary": lambda: foreign_drafter(far_pair(), num_speculative_tokens=2),
    "parallel_draft": parallel_drafter,
    "parallel_draft tree": lambda: parallel_drafter(**TREE),
    "eagle3": following_head,
    "eagle3 tree": lambda: following_head(**TREE),
    "eagle3 behind": lambda: following_head(catch_up_tokens=6),
    "mtp tree": lambda: following_mtp(**TREE),
    "dflash tree behind": lambda: following_dflash(catch_up_tokens=6, **TREE),
    "peagle tree behind": lambda: following_parallel(toy_peagle, catch_up_tokens=6, **TREE),
    "dspark tree behind": lambda: following_parallel(toy_dspark, catch_up_tokens=6, **TREE),
    "dflash2 tree behind": lambda: following_parallel(toy_dflash2, catch_up_tokens=6, **TREE),
    "self": following,
    "self tree": lambda: following(**TREE),
    "self of a hybrid tree": lambda: following(shape=HYBRIDS[DELTA], **TREE),
}
PROMPTS = [[3, 4, 3, 4, 3], [3, 4, 5, 3, 4, 6, 3, 4], [9], [1, 2, 1, 2, 1, 2] * 8, [7, 7, 7]]
SAMPLING = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 3, "frequency_penalty": 1.0}]


@pytest.fixture(params=BUILDERS)
def build(request: pytest.FixtureRequest) -> Callable[[], Proposer]:
    return BUILDERS[request.param]


def batch() -> list[Request]:
    return [
        make_request(i, prompt, **SAMPLING[i % len(SAMPLING)]) for i, prompt in enumerate(PROMPTS)
    ]


def run(proposer: Proposer, requests: list[Request], steps: int) -> list[list[DraftTree]]:
    """Every request's draft of every step; the toy target decides what is committed."""
    target = Target(toy_runner())
    drafts = []
    for _ in range(steps):
        trees = propose(proposer, *requests)
        for request, tree in zip(requests, trees, strict=True):
            proposer.observe(request, target.verify(request, tree))
        drafts.append(trees)
    return drafts


def test_it_drafts_one_valid_tree_per_request(build: Callable[[], Proposer]) -> None:
    """Of which the siblings exclude each other."""
    proposer = build()
    limit, drafts = proposer.config, run(proposer, batch(), 6)
    for trees in drafts:
        assert len(trees) == len(PROMPTS)
        for tree in trees:
            tree.validate(VOCAB)
            assert len(tree) <= limit.tree_nodes
            assert max(tree.depths(), default=0) <= limit.num_speculative_tokens
            assert set(tree.origins) <= {proposer.name}
            for parent in range(-1, len(tree)):
                siblings = [i for i, above in enumerate(tree.parents) if above == parent]
                assert sum(tree.accept_probs[i] for i in siblings) <= 1 + 1e-9
    assert any(len(tree) for trees in drafts for tree in trees)


@pytest.mark.parametrize(("nodes", "depth"), [(0, 3), (5, 0), (1, 1), (5, 1), (2, 3), (5, 3)])
def test_budgets_are_kept(build: Callable[[], Proposer], nodes: int, depth: int) -> None:
    proposer, requests = build(), batch()
    for _ in range(4):
        for tree in propose(proposer, *requests, nodes=nodes, depth=depth):
            assert len(tree) <= (nodes if depth else 0)
            assert max(tree.depths(), default=0) <= depth
        for request in requests:
            commit(proposer, request, [3])


def test_budgets_are_each_requests_own(build: Callable[[], Proposer]) -> None:
    proposer, requests = build(), batch()
    nodes, depths = [0, 3, 4, 2, 1], [4, 0, 1, 2, 4]
    for _ in range(5):
        trees = proposer.propose(requests, DraftBudget(nodes, depths))
        for tree, most, depth in zip(trees, nodes, depths, strict=True):
            assert len(tree) <= most
            assert max(tree.depths(), default=0) <= depth


def test_no_requests_no_trees(build: Callable[[], Proposer]) -> None:
    assert build().propose([], DraftBudget([], [])) == []


def test_the_same_history_gives_the_same_drafts(build: Callable[[], Proposer]) -> None:
    assert run(build(), batch(), 6) == run(build(), batch(), 6)


# Those that lag share what is read per step, so there company may delay a draft.
@pytest.mark.parametrize("build", [b for name, b in BUILDERS.items() if "behind" not in name])
def test_company_changes_nothing(build: Callable[[], Proposer]) -> None:
    together = run(build(), batch(), 6)
    for i in range(len(PROMPTS)):
        alone = run(build(), [batch()[i]], 6)
        assert [trees[i] for trees in together] == [trees[0] for trees in alone]


def test_its_context_is_the_requests(build: Callable[[], Proposer]) -> None:
    proposer, requests = build(), batch()
    target = Target(toy_runner())
    for step in range(8):
        drafted = requests[step % 2 :: 2]  # the others decode plainly
        trees = dict(zip(map(id, drafted), propose(proposer, *drafted), strict=True))
        for request in requests:
            draft = trees.get(id(request), DraftTree())
            proposer.observe(request, target.verify(request, draft))
            assert proposer.context_length(request) == len(request.token_ids)
    # Nothing of what it missed is left: it drafts what one drafts that sees it all at once.
    fresh = build()
    behind = sum(len(request.token_ids) for request in requests)
    at_a_time = getattr(proposer.config, "catch_up_tokens", behind)  # others read it all at once
    for _ in range(2 + behind // at_a_time):
        old, new = propose(proposer, *requests), propose(fresh, *requests)
    assert old == new


def test_others_drafts_are_learnt_from(build: Callable[[], Proposer]) -> None:
    proposer, request = build(), make_request(1, PROMPTS[1])
    propose(proposer, request)
    for token in (8, 3, 4, 8, 3, 4):
        commit(proposer, request, [token])
    fresh = build()
    for _ in range(10):
        old, new = propose(proposer, request), propose(fresh, request)
    assert old == new


def test_finishing_is_always_allowed(build: Callable[[], Proposer]) -> None:
    proposer, (first, second, *_) = build(), batch()
    proposer.finish(first)
    expected = propose(build(), second)
    propose(proposer, first)
    proposer.finish(first)
    proposer.finish(first)
    assert propose(proposer, second) == expected


def test_a_request_may_come_back(build: Callable[[], Proposer]) -> None:
    proposer, (request, *_) = build(), batch()
    propose(proposer, request)
    commit(proposer, request, [3, 4])
    proposer.finish(request)  # preempted
    assert propose(proposer, request) == propose(build(), request)


def test_observing_an_unknown_request_is_allowed(build: Callable[[], Proposer]) -> None:
    proposer, request = build(), make_request(1, PROMPTS[0])
    commit(proposer, request, [4])
    assert propose(proposer, request) == propose(build(), request)


def test_the_shortest_prompt(build: Callable[[], Proposer]) -> None:
    proposer, request = build(), make_request(1, [9])
    (tree,) = propose(proposer, request)
    tree.validate(VOCAB)
    commit(proposer, request, [EOS])
    (tree,) = propose(proposer, request)
    tree.validate(VOCAB)


def test_requests_are_read_only(build: Callable[[], Proposer]) -> None:
    proposer, requests = build(), batch()
    names = set(Request.__slots__) - {"sampling_rules"}  # what the sampler remembers is no state
    before = copy.deepcopy([[getattr(r, name) for name in names] for r in requests])
    propose(proposer, *requests)
    propose(proposer, *requests)
    after = [[getattr(r, name) for name in names] for r in requests]
    assert before == after
