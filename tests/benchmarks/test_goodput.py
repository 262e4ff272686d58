"""The null hypothesis drafts what table and acceptance rates say, and goes on looking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel
from paceline.request.request import VerifyResult
from paceline.request.span import DraftTree
from tests.benchmarks.test_rivals import shape
from tests.planner.machine import DEPTH, LOOKUP, cost_table, request
from tests.programs import module

FLAT, STEEP = [10.0] * 99, [10.0 * width for width in range(1, 100)]


def goodput(times: Sequence[float]) -> Any:
    return module("rivals").Goodput(CostModel(cost_table(times), learns=False))


def lengths(planner: Any, accepted: Sequence[int], num_requests: int = 1) -> list[int]:
    """Lengths of the drafts of which so many tokens are accepted, in each request alike."""
    found, requests = [], [request(i) for i in range(num_requests)]
    for right in accepted:
        planner.begin(shape(num_requests, num_requests), requests)
        planner.drafts.begin(range(num_requests))
        asked = planner.ask(LOOKUP, range(num_requests))
        for index in asked:
            tree = DraftTree.chain(range(DEPTH), [0.5] * DEPTH, LOOKUP.name)
            planner.drafts.add(index, LOOKUP.name, tree)
        planner.drafted(LOOKUP, asked, 0.0)
        limits = [DraftLimits(DEPTH, DEPTH)] * num_requests
        chosen = planner.choose(limits, 512)
        for each, tree in zip(requests, chosen, strict=True):
            count = min(right, len(tree))
            tokens = [*tree.token_ids[:count], 99]
            planner.observe(each, VerifyResult(range(count + 1), tokens, ["x"], tree))
        found.append(len(chosen[0]))
    return found


def test_free_width_is_used_in_full() -> None:
    assert lengths(goodput(FLAT), [DEPTH] * 9) == [DEPTH] * 9


def test_width_that_costs_what_it_brings_is_not() -> None:
    assert set(lengths(goodput(STEEP), [0] * 20)) == {0}


def test_what_is_refused_is_not_drafted_for_long_but_tried_again() -> None:
    slope = [10.0 + width for width in range(99)]
    found = lengths(goodput(slope), [0] * 200)
    assert found[0] > 0
    tried = [at for at, length in enumerate(found, 1) if length and at > 100]
    assert tried
    assert all(at % module("rivals").PROBE_EVERY == 0 for at in tried)


def test_the_length_follows_what_is_accepted() -> None:
    slope = [10.0 + width for width in range(99)]
    assert lengths(goodput(slope), [2] * 200)[-1] == 2


def test_more_requests_make_a_draft_dearer() -> None:
    cliff = [10.0] * 8 + [100.0] * 99
    alone, four = (lengths(goodput(cliff), [DEPTH] * 9, count)[-1] for count in (1, 4))
    assert (alone, four) == (7, 1)
