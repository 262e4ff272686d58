"""What the grammar's own proposer drafts, on an automaton whose edges are written out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.proposers.grammar import CERTAIN, NAME, GrammarProposer
from paceline.request.request import Request
from paceline.request.span import DraftTree
from tests.automaton import Automaton
from tests.proposers.drive import commit, make_request, propose


def constrained(edges: Sequence[dict[int, int]], last: Sequence[int] = ()) -> Request:
    automaton = Automaton(0)
    automaton.edges = list(edges)
    automaton.accepting = automaton.last = set(last)
    request = make_request(1, [5, 6])
    request.constraint = automaton
    return request


def proposer() -> GrammarProposer:
    limits = {"num_speculative_tokens": 6, "max_tree_nodes": 8}
    return GrammarProposer(*parse_speculative_config({"method": "grammar", **limits}))


def drafted(request: Request) -> DraftTree:
    return propose(proposer(), request)[0]


LINE = [{7: 1}, {8: 2}, {9: 3}, {10: 4}, {11: 5}, {}]
WIDE = dict.fromkeys(range(1, 40), 5)


def test_a_forced_string_is_a_certain_chain() -> None:
    tree = drafted(constrained(LINE, [5]))
    assert tree.token_ids == [7, 8, 9, 10, 11]
    assert tree.is_chain
    assert tree.accept_probs == [CERTAIN] * 5
    assert set(tree.origins) == {NAME}


def test_few_alternatives_are_all_tried_and_followed() -> None:
    tree = drafted(constrained([{7: 1, 8: 2}, {9: 3}, {10: 3}, WIDE, {}, {}], [5]))
    paths = {(7,), (8,), (7, 9), (8, 10)}
    assert {tuple(path) for path in paths_of(tree)} == paths
    assert sorted(tree.accept_probs) == [0.5, 0.5, CERTAIN, CERTAIN]


def paths_of(tree: DraftTree) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def test_where_much_may_follow_nothing_is_drafted() -> None:
    request = constrained([WIDE, {}, {}, {}, {}, {}], [5])
    one = proposer()
    assert len(propose(one, request)[0]) == 0
    assert one.lag(request) is None
    assert proposer().lag(constrained(LINE, [5])) == 0


def test_requests_without_a_grammar_get_nothing() -> None:
    one, request = proposer(), make_request(1, [5, 6])
    assert len(propose(one, request)[0]) == 0
    assert one.lag(request) is None


@pytest.mark.parametrize("nodes", [0, 1, 3, 8])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_within_the_budget(nodes: int, depth: int) -> None:
    request = constrained([{7: 1, 8: 2}, {9: 3}, {10: 3}, {11: 0}, {}, {}])
    (tree,) = propose(proposer(), request, nodes=nodes, depth=depth)
    tree.validate(48)
    assert len(tree) <= nodes
    assert max(tree.depths(), default=0) <= depth
    assert len(tree) > 0 or not nodes or not depth


def test_a_draft_follows_what_is_committed() -> None:
    one, request = proposer(), constrained(LINE, [5])
    assert propose(one, request)[0].token_ids[0] == 7
    assert request.constraint is not None
    for token in (7, 8):
        request.constraint.advance(token)
    commit(one, request, [7, 8])
    assert propose(one, request)[0].token_ids == [9, 10, 11]
    one.finish(request)
    assert propose(one, request)[0].token_ids == [9, 10, 11]


def test_a_failing_grammar_drafts_nothing() -> None:
    request = constrained(LINE, [5])
    assert isinstance(request.constraint, Automaton)
    request.constraint.edges = []
    assert len(drafted(request)) == 0


def test_its_configuration_reaches_further_by_itself() -> None:
    (config,) = parse_speculative_config({"method": "grammar"})
    assert config.needs_constraint
    assert config.num_speculative_tokens > SpeculativeConfig().num_speculative_tokens
    (narrow,) = parse_speculative_config({"method": "grammar", "num_speculative_tokens": 2})
    assert narrow.num_speculative_tokens == 2
