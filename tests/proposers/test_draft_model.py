"""The draft model proposer on toy models: its KV, its trees, and what happens when it lags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.request.request import Request
from paceline.request.span import ROOT, DraftTree
from tests.proposers.drive import Target, commit, make_request, propose
from tests.toy import TOY, USUAL, VOCAB, draft_config, toy_runner

PROMPT = [5, 9, 2, 7, 7, 30, 11]


def own_runner(
    dtype: str = USUAL, seed: int = 1, num_blocks: int = 100, noise: float = 0.0
) -> ModelRunner:
    """The draft model's, whose free slots hold no numbers."""
    runner = toy_runner(dtype, num_blocks, prefix_caching=False, seed=seed, noise=noise)
    runner.kv.poison_free()
    return runner


def drafter(runner: ModelRunner | None = None, **options: Any) -> DraftModelProposer:
    return DraftModelProposer(draft_config(**options), runner or own_runner())


def target(seed: int = 0) -> Target:
    return Target(toy_runner(seed=seed))


TREE = {"max_tree_nodes": 12, "max_branching": 3, "num_speculative_tokens": 4}
SAMPLING = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3}]


# --- the oracle: a draft that is the target -----------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_self_draft_chain_is_accepted_whole(sampling: dict[str, Any]) -> None:
    runner = own_runner(seed=0)
    model, proposer, request = target(), drafter(runner), make_request(1, PROMPT, **sampling)
    for _ in range(12):
        runner.kv.poison_free()
        draft, result = model.step(proposer, request)
        assert result.num_accepted == len(draft) == 4


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_self_draft_tree_is_accepted_down_to_a_leaf(sampling: dict[str, Any]) -> None:
    runner = own_runner(seed=0)
    model, proposer = target(), drafter(runner, **TREE)
    request = make_request(1, PROMPT, **sampling)
    for _ in range(12):
        runner.kv.poison_free()
        draft, result = model.step(proposer, request)
        assert len(draft) == 12
        assert result.path[-1] - 1 not in draft.parents


@pytest.mark.parametrize("options", [{}, TREE])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_kept_kv_is_what_a_fresh_draft_computes(
    options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    model, proposer = target(), drafter(own_runner(seed=0, noise=0.3), **options)
    request = make_request(1, PROMPT, **sampling)
    accepted = 0
    for _ in range(15):
        fresh = drafter(own_runner(seed=0, noise=0.3), **options)
        assert propose(proposer, request) == propose(fresh, request)
        _, result = model.step(proposer, request)
        accepted += result.num_accepted
    assert accepted  # otherwise nothing was ever kept


# --- what it holds ------------------------------------------------------------------------------


def held(runner: ModelRunner, request: Request) -> int:
    return runner.kv[request.request_id].length


def test_the_kv_of_accepted_tokens_is_kept() -> None:
    runner = own_runner()
    proposer, request = drafter(runner), make_request(1, PROMPT)
    (draft,) = propose(proposer, request)
    assert held(runner, request) == len(PROMPT)
    commit(proposer, request, [*draft.token_ids, 3])
    # The last node was never forwarded, and the bonus token cannot have been.
    assert held(runner, request) == len(PROMPT) + 3
    rows = runner.num_rows
    propose(proposer, request)
    assert runner.num_rows - rows == 2 + 3  # the two that lacked, then one per level


def test_the_kv_of_rejected_tokens_is_rolled_back() -> None:
    runner = own_runner()
    proposer, request = drafter(runner), make_request(1, PROMPT)
    (draft,) = propose(proposer, request)
    other = (draft.token_ids[1] + 1) % VOCAB
    commit(proposer, request, [draft.token_ids[0], other])
    assert held(runner, request) == len(PROMPT) + 1
    assert len(runner.kv[1].block_table) == 1
    assert proposer.context_length(request) == len(request.token_ids)


def test_a_draft_that_was_cut_short_is_committed_only_so_far() -> None:
    runner = own_runner()
    proposer, request = drafter(runner), make_request(1, PROMPT)
    (draft,) = propose(proposer, request)
    commit(proposer, request, draft.token_ids[:2])  # a stop after two accepted tokens
    assert held(runner, request) == len(PROMPT) + 1
    assert propose(proposer, request) == propose(drafter(), request)


def test_a_step_that_committed_nothing_can_be_repeated() -> None:
    proposer, request = drafter(**TREE), make_request(1, PROMPT)
    first = propose(proposer, request)
    assert propose(proposer, request) == first


def test_context_length_shows_kv_of_tokens_that_were_never_committed() -> None:
    proposer, request = drafter(), make_request(1, PROMPT)
    propose(proposer, request)
    request.token_ids[3] = 1
    assert proposer.context_length(request) == 3


# --- lag ----------------------------------------------------------------------------------------


def test_a_long_prompt_is_caught_up_in_chunks() -> None:
    proposer, request = drafter(catch_up_tokens=16), make_request(1, PROMPT * 10)
    sizes = []
    for _ in range(5):
        sizes.append(len(propose(proposer, request)[0]))
    assert sizes == [0, 0, 0, 0, 4]  # 70 tokens: four chunks of 16 and one of 6
    assert propose(proposer, request) == propose(drafter(), request)


def test_who_is_up_to_date_does_not_wait_for_who_lags() -> None:
    proposer = drafter(catch_up_tokens=16)
    late, steady = make_request(1, PROMPT * 10), make_request(2, PROMPT)
    (draft,) = propose(proposer, steady)
    commit(proposer, steady, [*draft.token_ids, 3])
    trees = propose(proposer, late, steady)
    assert [len(tree) for tree in trees] == [0, 4]


def test_laggards_are_served_first_come_first_served() -> None:
    proposer = drafter(catch_up_tokens=16)
    requests = [make_request(i, PROMPT * 2) for i in range(1, 4)]  # 14 tokens each
    sizes = [[len(tree) for tree in propose(proposer, *requests)] for _ in range(3)]
    assert sizes == [[4, 0, 0], [4, 4, 0], [4, 4, 4]]


@pytest.mark.parametrize("missed", [1, 4, 30])
def test_tokens_that_others_proposed_are_caught_up(missed: int) -> None:
    proposer, request = drafter(), make_request(1, PROMPT)
    propose(proposer, request)
    request.token_ids.extend(i % VOCAB for i in range(missed))  # a step it was not told about
    assert propose(proposer, request) == propose(drafter(), request)


def test_a_request_that_was_preempted_begins_anew() -> None:
    runner = own_runner()
    proposer, request = drafter(runner), make_request(1, PROMPT)
    first = propose(proposer, request)
    proposer.finish(request)
    assert runner.kv.pool.num_used == 0
    assert propose(proposer, request) == first


# --- the tree -----------------------------------------------------------------------------------


def test_the_tree_is_the_best_of_all_nodes() -> None:
    small = propose(drafter(**TREE), make_request(1, PROMPT))[0]
    every = propose(
        drafter(max_tree_nodes=200, max_branching=3, num_speculative_tokens=4),
        make_request(1, PROMPT),
        nodes=200,
    )[0]
    assert len(every) == 3 + 9 + 27 + 81
    assert small.path_probs() == pytest.approx(sorted(every.path_probs(), reverse=True)[:12])


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"num_speculative_tokens": 1}, 1),
        ({"num_speculative_tokens": 4}, 4),
        ({"max_tree_nodes": 3, "max_branching": 3, "num_speculative_tokens": 1}, 1),
    ],
)
def test_no_forward_is_wasted(options: dict[str, Any], forwards: int) -> None:
    proposer = drafter(**options)
    propose(proposer, make_request(1, PROMPT))
    assert proposer.num_forwards == forwards


def test_a_node_cap_stops_the_levels() -> None:
    proposer = drafter()
    assert len(propose(proposer, make_request(1, PROMPT), nodes=2)[0]) == 2
    assert proposer.num_forwards == 2


def test_hopeless_tokens_are_neither_drafted_nor_expanded() -> None:
    full = propose(drafter(), make_request(1, PROMPT))[0]
    floor = full.path_probs()[1] * 0.999
    proposer = drafter(min_accept_prob=floor)
    cut = propose(proposer, make_request(1, PROMPT))[0]
    assert cut.token_ids == full.token_ids[:2]
    assert proposer.num_forwards == 3
    first = drafter(min_accept_prob=min(1.0, full.path_probs()[0] * 1.001))
    assert len(propose(first, make_request(1, PROMPT))[0]) == 0
    assert first.num_forwards == 1


def test_children_are_ranked_best_first() -> None:
    (tree,) = propose(drafter(**TREE), make_request(1, PROMPT, temperature=0.9))
    assert tree.path_probs() == sorted(tree.path_probs(), reverse=True)
    assert tree.parents[0] == ROOT


def test_ranking_parameters_override_the_requests() -> None:
    greedy = propose(drafter(), make_request(1, PROMPT))
    hot = make_request(1, PROMPT, temperature=5.0)
    assert propose(drafter(temperature=0.0), hot) == greedy
    assert propose(drafter(), hot) != greedy


def test_ranking_parameters_are_checked_when_it_is_built() -> None:
    with pytest.raises(ConfigError, match="top_p is 2"):
        drafter(top_p=2.0)


# --- limits and failures ------------------------------------------------------------------------


def test_no_kv_blocks_means_no_draft() -> None:
    runner = own_runner(num_blocks=4)
    proposer = drafter(runner)  # 3 blocks: 48 tokens
    small, large = make_request(1, PROMPT), make_request(2, PROMPT * 8)
    assert [len(tree) for tree in propose(proposer, large, small)] == [0, 4]
    assert runner.kv[2].length == 0


def test_a_draft_ends_where_the_blocks_do() -> None:
    proposer = drafter(own_runner(num_blocks=2), **TREE)
    request = make_request(1, list(range(15)))
    (tree,) = propose(proposer, request)  # one slot is left for drafted nodes
    tree.validate(VOCAB)
    assert 0 < max(tree.depths(), default=0) <= 2
    assert propose(proposer, request) == [tree]


@pytest.mark.parametrize(("missing", "depth"), [(3, 4), (2, 3), (1, 2), (0, 1), (-1, 0)])
def test_a_draft_ends_at_the_context_limit_of_its_model(missing: int, depth: int) -> None:
    request = make_request(1, [i % VOCAB for i in range(TOY.max_position - missing)], max_len=999)
    (tree,) = propose(drafter(), request)
    assert len(tree) == depth


def test_a_failed_forward_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = own_runner("float32")
    proposer, request = drafter(runner), make_request(1, PROMPT)
    expected = propose(drafter(own_runner("float32")), request)
    forward: Callable[..., ForwardResult] = runner.forward

    def fail(self: ModelRunner, batch: object, greedy: bool = False) -> ForwardResult:
        if self.num_forwards == 2:
            self.num_forwards += 1
            raise RuntimeError("out of luck")
        return forward(batch, greedy)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        propose(proposer, request)
    assert runner.kv.pool.num_used == 0
    assert propose(proposer, request) == expected


def test_logits_that_are_not_numbers_draft_nothing() -> None:
    runner = own_runner("float32")
    proposer = drafter(runner)
    runner.decoder.norm = torch.full_like(runner.decoder.norm, float("nan"))
    for sampling in SAMPLING:
        assert propose(proposer, make_request(1, PROMPT, **sampling)) == [DraftTree()]


def test_many_requests_share_each_forward() -> None:
    runner = own_runner()
    proposer = drafter(runner, **TREE)
    propose(proposer, *(make_request(i, PROMPT[i:]) for i in range(5)))
    assert proposer.num_forwards == 4
    for i in range(5):
        proposer.finish(make_request(i, PROMPT))
    assert runner.kv.pool.num_used == 0


def test_a_configuration_without_branches_is_a_chain() -> None:
    config = SpeculativeConfig(method="draft_model", model="toy", min_accept_prob=0)
    proposer = DraftModelProposer(config, toy_runner(prefix_caching=False))
    (tree,) = propose(proposer, make_request(1, PROMPT))
    assert tree.parents == [ROOT, 0, 1, 2]


def test_all_that_it_lacks_is_read_whatever_is_to_come() -> None:
    """Whether reading pays is the planner's to say: no more than it is asked to does a proposer."""
    proposer = drafter()
    request = make_request(1, [3] * 90)
    request.max_len = 93
    assert proposer.lag(request) == 90
    (tree,) = propose(proposer, request)
    assert len(tree) > 0
    assert proposer.lag(request) <= 1
