"""The choice of draft nodes against enumeration: best, within limits, nobody pays for others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planner.choice import DraftLimits, best_path_first, choose_nodes
from paceline.request.span import DraftTree

WIDE = DraftLimits(64, 64)
PROBS = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.0, 1.0)


@dataclass(frozen=True)
class Problem:
    trees: list[DraftTree]
    limits: list[DraftLimits]
    growth: list[float]
    rate: float
    slowdown: float | None
    node_budget: int
    ahead: list[float] | None = None

    def chosen(self, choose: Any = choose_nodes) -> list[list[int]]:
        step = (self.trees, self.limits, self.growth, self.rate)
        options = {"slowdown": self.slowdown, "ahead": self.ahead}
        return choose(*step, **options, node_budget=self.node_budget)

    def allowed(self, request: int) -> list[int]:
        """Nodes that the request's own limits leave, likeliest first."""
        tree, limit = self.trees[request], self.limits[request]
        probs, depths = tree.path_probs(), tree.depths()
        least = 0.0 if limit.is_forced else limit.min_path_prob
        fit = [i for i in range(len(tree)) if depths[i] <= limit.max_depth and probs[i] >= least]
        return sorted(fit, key=lambda i: (-probs[i], i))

    def forced(self) -> list[tuple[int, int]]:
        nodes = [
            (r, i)
            for r, limit in enumerate(self.limits)
            if limit.is_forced
            for i in self.allowed(r)[: limit.max_nodes]
        ]
        return sorted(nodes, key=self.rank)[: max(0, self.node_budget)]

    def rank(self, node: tuple[int, int]) -> tuple[float, int, int]:
        request, i = node
        return -self.trees[request].path_probs()[i], request, i

    def worth(self, nodes: list[tuple[int, int]]) -> float:
        """The objective; what the forced nodes bring is left out, for nobody weighs it."""
        forced = set(self.forced())
        gain = sum(-self.rank(node)[0] for node in nodes if node not in forced)
        return gain - self.rate * (self.growth[len(nodes)] - self.growth[0])

    def least_pace(self, nodes: list[tuple[int, int]]) -> float:
        """Tokens per time of the request that fares worst, relative to no drafts."""
        gains = [
            sum(tree.path_probs()[i] for owner, i in nodes if owner == request)
            + (self.ahead[request] if self.ahead else 0.0)
            for request, tree in enumerate(self.trees)
        ]
        return (1 + min(gains)) * self.growth[0] / self.growth[len(nodes)]


@st.composite
def trees(draw: st.DrawFn, most: int) -> DraftTree:
    count = draw(st.integers(0, most))
    straight = draw(st.booleans())
    parents = [i - 1 if straight else draw(st.integers(-1, i - 1)) for i in range(count)]
    probs = [draw(PROBS) for _ in range(count)]
    return DraftTree(list(range(count)), parents, probs, ["x"] * count)


@st.composite
def problems(draw: st.DrawFn, most: int = 5, requests: int = 2) -> Problem:
    """Steps whose time goes up and down with their nodes."""
    drafts = draw(st.lists(trees(most), min_size=1, max_size=requests))
    limit = st.builds(
        DraftLimits,
        st.integers(0, most),
        st.integers(0, most),
        st.sampled_from([0.0, 0.0, 0.3]),
        st.sampled_from([False, False, True]),
    )
    times = st.sampled_from([8.0, 9.0, 10.0, 11.0, 12.0, 20.0]) | st.floats(5.0, 30.0)
    return Problem(
        drafts,
        [draw(limit) for _ in drafts],
        [10.0, *draw(st.lists(times, max_size=most * requests + 1))],
        draw(st.sampled_from([0.0, 0.05, 0.2, 1.0]) | st.floats(0.0, 2.0)),
        draw(st.none() | st.sampled_from([0.0, 0.04, 0.5])),
        draw(st.integers(0, most * requests)),
        draw(st.none() | st.just([draw(st.floats(-2.0, 4.0)) for _ in drafts])),
    )


def flat(chosen: list[list[int]]) -> list[tuple[int, int]]:
    return [(r, node) for r, nodes in enumerate(chosen) for node in nodes]


@given(problems())
def test_limits_budget_and_order(problem: Problem) -> None:
    chosen = problem.chosen()
    nodes = flat(chosen)
    forced = problem.forced()
    assert set(forced) <= set(nodes)
    assert len(nodes) <= max(len(forced), min(problem.node_budget, len(problem.growth) - 1))
    assert len(nodes) <= problem.node_budget
    for request, (tree, mine) in enumerate(zip(problem.trees, chosen, strict=True)):
        assert len(mine) <= problem.limits[request].max_nodes
        assert set(mine) <= set(problem.allowed(request))
        assert mine == best_path_first(tree, sorted(mine))
        tree.select(mine).validate(vocab_size=99)


@given(problems())
def test_no_other_set_of_nodes_is_worth_more(problem: Problem) -> None:
    problem = replace(problem, slowdown=None)
    forced = problem.forced()
    last = len(problem.growth) - 1
    if len(forced) > last:
        return
    free = [
        (r, i)
        for r, limit in enumerate(problem.limits)
        if not limit.is_forced
        for i in problem.allowed(r)
    ]
    fits = min(problem.node_budget, last) - len(forced)
    sets = chain.from_iterable(combinations(free, n) for n in range(min(fits, len(free)) + 1))
    best = max(
        problem.worth([*forced, *nodes])
        for nodes in sets
        if all(
            sum(r == request for r, _ in nodes) <= limit.max_nodes
            for request, limit in enumerate(problem.limits)
        )
    )
    assert problem.worth(flat(problem.chosen())) == pytest.approx(best, abs=1e-9)


@given(problems(most=8, requests=3))
def test_every_fair_count_is_considered_and_no_other(problem: Problem) -> None:
    problem = replace(problem, slowdown=problem.slowdown or 0.04)
    forced = problem.forced()
    if len(forced) >= len(problem.growth):
        return
    ranked = sorted(
        (
            (r, i)
            for r, limit in enumerate(problem.limits)
            if not limit.is_forced
            for i in problem.allowed(r)[: limit.max_nodes]
        ),
        key=problem.rank,
    )
    fits = min(problem.node_budget, len(problem.growth) - 1) - len(forced)
    sets = [[*forced, *ranked[:n]] for n in range(min(fits, len(ranked)) + 1)]
    fair = [
        nodes
        for nodes in sets
        if problem.least_pace(nodes) >= 1 - problem.slowdown - 1e-12
        or problem.growth[len(nodes)] <= problem.growth[len(forced)]
    ]
    nodes = flat(problem.chosen())
    assert sorted(nodes) in [sorted(each) for each in fair]
    assert problem.worth(nodes) == pytest.approx(max(map(problem.worth, fair)), abs=1e-9)


def chosen(*drafts: DraftTree, growth: list[float], rate: float, **options: Any) -> list[list[int]]:
    options = {"limits": [WIDE] * len(drafts), "node_budget": 64} | options
    return choose_nodes(drafts, options.pop("limits"), growth, rate, **options)


def line(*probs: float) -> DraftTree:
    return DraftTree.chain(range(len(probs)), probs, "x")


def test_behind_a_cliff_there_may_be_something_cheaper() -> None:
    # Two nodes are dear and a third makes the step cheaper than one: padding to it pays.
    growth = [10.0, 14.0, 14.0, 10.5, 20.0]
    assert chosen(line(0.4, 0.1, 0.1, 0.1), growth=growth, rate=0.1) == [[0, 1, 2]]
    assert chosen(line(0.4, 0.1), growth=growth, rate=0.15) == [[]], "no candidate to pad with"
    # Behind the first node is a step up, flat from there on: all eight pay where a few do not.
    growth = [10.0, 10.0, *[30.0] * 7]
    assert chosen(line(*[1.0] * 8), growth=growth, rate=0.3) == [list(range(8))]
    assert chosen(line(*[1.0] * 6), growth=growth, rate=0.3) == [[0]]


def test_of_equally_good_counts_the_lowest_is_taken() -> None:
    assert chosen(line(0.5, 0.0), growth=[10.0, 15.0, 15.0], rate=0.1) == [[]]
    assert chosen(line(0.5, 0.0), growth=[10.0, 14.0, 14.0], rate=0.1) == [[0]]


def test_ties_go_to_the_lower_request_then_to_the_lower_node() -> None:
    fork = DraftTree([7, 8], [-1, -1], [0.5, 0.5], ["x"] * 2)
    assert chosen(fork, fork, growth=[10.0] * 4, rate=0.1) == [[0, 1], [0]]


def test_a_forced_request_gets_its_draft_and_the_others_only_what_pays() -> None:
    forced = DraftLimits(8, 3, min_path_prob=0.9, is_forced=True)
    growth = [10.0, 20.0, 30.0, 40.0, 40.0, 50.0]
    both = {"limits": [forced, WIDE], "slowdown": 0.04}
    drafts = line(0.1, 0.1, 0.1, 0.1), line(0.6, 0.6)
    assert chosen(*drafts, growth=growth, rate=0.1, **both) == [[0, 1, 2], [0]]
    assert chosen(*drafts, growth=growth[:2], rate=0.1, **both) == [[0, 1, 2], []]
    assert chosen(*drafts, growth=growth, rate=0.1, node_budget=2, **both) == [[0, 1], []]
    # What it gains by them counts: the second node slows nobody down.
    growth = [10.0, 15.0, 20.0]
    assert chosen(line(1.0), line(1.0), growth=growth, rate=0.1, **both) == [[0], [0]]
    assert chosen(line(0.9), line(1.0), growth=growth, rate=0.1, **both) == [[0], []]
    assert chosen(line(0.9), line(1.0, 1.0), growth=[10.0] * 3, rate=0.1, **both) == [[0], [0]]


def test_a_request_without_a_draft_does_not_pay_for_its_neighbour() -> None:
    sure, prose = line(1.0, 1.0, 1.0), DraftTree()
    growth = [10.0, 10.3, 10.6, 10.9]
    assert chosen(sure, prose, growth=growth, rate=0.1) == [[0, 1, 2], []]
    assert chosen(sure, prose, growth=growth, rate=0.1, slowdown=0.04) == [[0], []]
    assert chosen(sure, growth=growth, rate=0.1, slowdown=0.04) == [[0, 1, 2]]
    # What it has had beyond what it is owed may be taken from it.
    step = {"growth": growth, "rate": 0.1, "slowdown": 0.0}
    assert chosen(sure, prose, **step, ahead=[0.0, 0.07]) == [[0, 1], []]
    assert chosen(sure, sure, **step, ahead=[0.0, -1.0]) == [[], []]


def test_the_likeliest_path_comes_first() -> None:
    tree = DraftTree([5, 6, 7, 8], [-1, -1, 0, 1], [0.4, 0.6, 0.9, 0.8], ["x"] * 4)
    assert chosen(tree, growth=[10.0] * 5, rate=0.1) == [[1, 3, 0, 2]]


def test_nothing_to_choose_from() -> None:
    assert chosen(growth=[1.0], rate=1.0) == []
    assert chosen(DraftTree(), growth=[1.0, 1.0], rate=1.0) == [[]]
    assert chosen(line(0.9), growth=[1.0], rate=0.0) == [[]]
    assert chosen(line(0.9), growth=[1.0, 1.0], rate=0.0, node_budget=-1) == [[]]
