"""Which draft nodes a step verifies. Owns the choice; knows neither proposers nor forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.policy.cost_points import StepShape
from paceline.policy.prices import FREE, Prices
from paceline.policy.selection import best_path_first, expected_tokens, selected
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

ENOUGH_TOKENS = 1.0
"""Expected tokens of free drafts beyond which a fixed plan does not pay for more."""
Drafts = Sequence[Sequence[DraftTree]]
"""Per request, the trees that its proposers have drafted in this step."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What one request may use in one step.

    Attributes:
        max_nodes: draft nodes; 0 means that it decodes plainly.
        max_depth: tokens along a path.
        min_path_prob: nodes less likely to be reached and accepted than this are left out.
        is_forced: the request asked for drafts of this depth, whether they pay or not.
    """

    max_nodes: int
    max_depth: int
    min_path_prob: float = 0.0
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A proposer as a planner knows it.

    Attributes:
        name: origin of the nodes that it drafts.
        costs_forwards: it drafts by forwards of a model.
        lag: tokens of a request that it has to read before it can draft; None where it will not.
        applies: whether it is for a request at all, whatever its text.
        costs_levels: each further level of its trees takes one more forward.
    """

    name: str
    costs_forwards: bool = False
    lag: Callable[[Request], int | None] = lambda request: 0
    applies: Callable[[Request], bool] = lambda request: True
    costs_levels: bool = True


class StepReport(NamedTuple):  # made in every step: a frozen dataclass takes thrice as long
    """What a step took and brought, for whoever plans the next one.

    Attributes:
        shape: of the forward, draft nodes included.
        forward_ms: of the target's forward.
        total_ms: of the whole step.
        num_decoding: requests that decoded.
        num_emitted: tokens that these emitted.
    """

    shape: StepShape
    forward_ms: float
    total_ms: float
    num_decoding: int
    num_emitted: int


class Planner(Protocol):
    """Decides for each step who drafts, for how much, and which nodes are verified.

    A step calls :meth:`begin`, then :meth:`ask`, :meth:`prices` and :meth:`drafted` once per
    proposer, :meth:`choose`, and, when it has committed, :meth:`observe` per request and
    :meth:`end`. Requests are named by their place in what
    :meth:`begin` was given.
    """

    def set_sources(self, sources: Sequence[Source]) -> None:
        """Other proposers draft from now on, whatever their names.

        What was learnt of a proposer stays only where all sources that there were are among these.
        """
        ...

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        """Look at the requests that may draft.

        Args:
            step: everything that will be forwarded anyway.
            requests: that decode, those that draft nothing included.

        Returns:
            0 where proposers are to be asked. Else for how many steps, this one included, none of
            them is, as long as the same requests decode and no others come: the planner need not be
            called before, but for :meth:`end`.
        """
        ...

    def ask(self, source: Source, candidates: Sequence[int], drafts: Drafts) -> list[int]:
        """For which of the candidates a proposer drafts.

        Args:
            drafts: what others have drafted for each request in this step.
        """
        ...

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        """What a proposer's further work has to be worth.

        Args:
            max_nodes: that it may draft for all the chosen requests together.
        """
        ...

    def drafted(
        self, source: Source, chosen: Sequence[int], trees: Sequence[DraftTree], milliseconds: float
    ) -> None:
        """Learn what a proposer made of it, and put the planner's estimates into the trees."""
        ...

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        """The trees to verify: prefix-closed parts of those drafted, the best path first.

        Args:
            trees: one merged tree per request.
            limits: parallel to ``trees``.
            node_budget: most draft nodes over all requests.
        """
        ...

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Learn from what was verified."""
        ...

    def end(self, report: StepReport) -> None:
        """Learn from the step as a whole."""
        ...

    def finish(self, request: Request) -> None:
        """Forget a request."""
        ...


class FixedPlanner:
    """Asks whoever is configured and takes the likeliest nodes up to fixed caps, at any cost.

    A proposer that costs forwards is not asked where others expect to bring a token already.
    """

    def set_sources(self, sources: Sequence[Source]) -> None: ...

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        return 0

    def ask(self, source: Source, candidates: Sequence[int], drafts: Drafts) -> list[int]:
        if not source.costs_forwards:
            return list(candidates)
        return [i for i in candidates if expected_tokens(drafts[i]) < ENOUGH_TOKENS]

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        return FREE

    def drafted(
        self, source: Source, chosen: Sequence[int], trees: Sequence[DraftTree], milliseconds: float
    ) -> None: ...

    def observe(self, request: Request, result: VerifyResult) -> None: ...

    def end(self, report: StepReport) -> None: ...

    def finish(self, request: Request) -> None: ...

    def choose(
        self, trees: Sequence[DraftTree], limits: Sequence[DraftLimits], node_budget: int
    ) -> list[DraftTree]:
        chosen = [
            within_limits(tree, limit) if len(tree) else []
            for tree, limit in zip(trees, limits, strict=True)
        ]
        if sum(map(len, chosen)) > node_budget:
            chosen = _share(trees, chosen, node_budget)
        return [selected(tree, nodes) for tree, nodes in zip(trees, chosen, strict=True)]


def within_limits(tree: DraftTree, limit: DraftLimits) -> list[int]:
    """Nodes of a draft that its limits allow, prefix-closed, the best path first."""
    probs = tree.path_probs()
    if tree.is_chain:
        longest = min(len(tree), limit.max_nodes, limit.max_depth)
        if longest == 0 or probs[longest - 1] >= limit.min_path_prob:
            return list(range(longest))
        return list(range(sum(prob >= limit.min_path_prob for prob in probs[:longest])))
    depths = tree.depths()
    nodes = [
        i
        for i in range(len(tree))
        if depths[i] <= limit.max_depth and probs[i] >= limit.min_path_prob
    ]
    if len(nodes) > limit.max_nodes:
        # Prefix-closed: a child is never likelier than its parent and comes after it.
        nodes = sorted(nodes, key=lambda i: (-probs[i], i))[: limit.max_nodes]
    return best_path_first(tree, nodes)


def _share(
    trees: Sequence[DraftTree], chosen: Sequence[list[int]], node_budget: int
) -> list[list[int]]:
    """The likeliest nodes over all requests, up to the budget."""
    ranked = sorted(
        (-prob, owner, node)
        for owner, tree in enumerate(trees)
        if chosen[owner]
        for node, prob in enumerate(tree.path_probs())
        if node in set(chosen[owner])
    )
    kept: list[list[int]] = [[] for _ in trees]
    for _, owner, node in ranked[: max(0, node_budget)]:
        kept[owner].append(node)
    return [best_path_first(tree, sorted(nodes)) for tree, nodes in zip(trees, kept, strict=True)]
