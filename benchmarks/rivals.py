"""Simple rules of how much to draft, as planners to be measured against.

Lengths are depths of drafts, so that a tree counts as the longest chain in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel
from paceline.planner.cost_points import StepShape
from paceline.planner.planner import FixedPlanner, Planner, Source
from paceline.planner.prices import Prices
from paceline.request.request import Request
from paceline.request.span import DraftTree

START_LENGTH = 4
"""Draft length of a request of which nothing is known yet."""
PROBE_EVERY = 32
"""Steps after which a rule that drafts nothing tries a draft nevertheless."""


def _until(goes_on: Callable[[int, int, float], bool]) -> Prices:
    """Prices that end a path at its first node (place, depth, estimate) that does not go on."""
    return Prices(nodes=(0.5,), estimate=lambda *node: float(goes_on(*node)))


class LimitedLength(FixedPlanner, ABC):
    """Drafts for each request up to a length."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: Sequence[Request] = ()

    @abstractmethod
    def length(self, request: Request) -> int:
        """Most tokens along a path of the request's next draft."""

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._requests = requests
        return 0

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        lengths = [self.length(self._requests[i]) for i in chosen]
        return _until(lambda index, depth, prob: depth < lengths[index])

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        shortened = [
            replace(limit, max_depth=min(limit.max_depth, self.length(request)))
            for limit, request in zip(limits, self._requests, strict=True)
        ]
        return super().choose(shortened, node_budget)


class FixedLength(LimitedLength):
    """The same length always, as ``num_speculative_tokens`` sets it in vLLM and others."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def length(self, request: Request) -> int:
        return self._length


class LookupAlone(FixedPlanner):
    """Asks only proposers whose drafts cost no forward."""

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        return [] if source.costs_forwards else list(candidates)


RIVALS: dict[str, Callable[[CostModel], Planner]] = {
    "fixed, K = 2": lambda cost: FixedLength(2),
    "fixed, K = 4": lambda cost: FixedLength(4),
    "fixed, K = 8": lambda cost: FixedLength(8),
    "prompt lookup alone": lambda cost: LookupAlone(),
}
"""By name, how each is made from the cost model of its engine."""
