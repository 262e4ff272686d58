"""Rules of how much to draft that others use, as planners to be measured against.

Lengths are depths of drafts, so that a tree counts as the longest chain in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import NO_STEP, StepShape
from paceline.planner.drafts import Prices
from paceline.planner.planner import FixedPlanner, Planner
from paceline.planner.value import DraftingCost, Source
from paceline.request.request import Request, VerifyResult
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


LONGEST = 8
FIRST_RATE = 0.7
"""Acceptance rate of a position of which nothing was seen."""
WEIGHT = 0.05
"""Weight of the latest draft in an acceptance rate."""


class Goodput(LimitedLength):
    """The null hypothesis of every comparison: the length with the best tokens per millisecond.

    The rule of SmartSpec (Liu et al., "Optimizing Speculative Decoding for Serving Large Language
    Models Using Goodput", 2024), as serving engines have it: in each step one draft length for the
    whole batch, that for which expected tokens over the time of the step is largest. What is
    expected comes from one acceptance rate per proposer and position, smoothed over all requests;
    the time is what the cost table says of so many rows, with the host's and the drafting time.
    Proposers are asked in their order, each for those requests of which none before it has drafted.
    Where length 0 is best nothing would be learnt any more, so every now and then a step drafts
    nevertheless.
    """

    asks_together = False

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self._cost, self._drafting = cost, DraftingCost()
        self._rates: defaultdict[str, list[float]] = defaultdict(lambda: [FIRST_RATE] * LONGEST)
        self._step, self._draft_ms = NO_STEP, 0.0
        self._length = self._num_steps = 0

    def length(self, request: Request) -> int:
        return self._length

    @property
    def _is_probe(self) -> bool:
        return self._num_steps % PROBE_EVERY == 0

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._step, self._draft_ms = step, 0.0
        self._num_steps += 1
        return super().begin(step, requests)

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        sizes = self.drafts.sizes()
        lags = [(i, source.lag(self._requests[i])) for i in candidates if not sizes[i]]
        chosen = [i for i, lag in lags if lag is not None]
        reading_ms = self._drafting.catch_up(source.name, sum(lag or 0 for _, lag in lags))

        def times(length: int) -> float:
            draft_ms = self._drafting.milliseconds(source.name, length) + reading_ms
            return self._time(len(chosen), len(chosen) * length, bool(length) * draft_ms)

        def tokens(length: int) -> float:
            return len(chosen) * self._expected(source.name, length)

        self._length = self._best(LONGEST, tokens, times)
        return chosen if self._length else []

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        has_levels = source.costs_forwards and source.costs_levels
        levels = min(LONGEST, self.drafts.depth(source.name)) if has_levels else 1
        self._drafting.observe(source.name, levels, 0, milliseconds, has_levels)
        self._draft_ms += milliseconds

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        trees = [self.drafts.tree(index) for index in range(len(limits))]
        drafts = [(tree.origins[0], tree.depths()) for tree in trees if len(tree)]

        def times(length: int) -> float:
            nodes = sum(depth <= length for _, depths in drafts for depth in depths)
            return self._time(len(drafts), nodes, self._draft_ms)

        def tokens(length: int) -> float:
            return sum(
                self._expected(origin, min(length, max(depths))) for origin, depths in drafts
            )

        self._length = self._best(_depth(trees), tokens, times)
        return super().choose(limits, node_budget)

    def _best(
        self, longest: int, tokens: Callable[[int], float], times: Callable[[int], float]
    ) -> int:
        """The length with the best goodput; that of a probe where none is better and it is time."""
        decoding = len(self._requests)
        speeds = [(decoding + tokens(length)) / times(length) for length in range(longest + 1)]
        best = speeds.index(max(speeds))
        return min(START_LENGTH, longest) if self._is_probe and not best else best

    def _expected(self, name: str, length: int) -> float:
        reached, total = 1.0, 0.0
        for rate in self._rates[name][:length]:
            reached *= rate
            total += reached
        return total

    def _time(self, drafts: int, nodes: int, draft_ms: float) -> float:
        host_ms = self._cost.table.host.of(
            len(self._requests), drafts if nodes else 0, nodes, draft_ms > 0.0
        )
        return self._cost.growth(self._step, nodes)[nodes] + host_ms + draft_ms

    def observe(self, request: Request, result: VerifyResult) -> None:
        if len(result.draft):
            rates = self._rates[result.draft.origins[0]]
            seen = min(LONGEST, max(result.draft.depths()), result.num_accepted + 1)
            for place in range(seen):
                rates[place] += WEIGHT * ((place < result.num_accepted) - rates[place])


def _depth(trees: Sequence[DraftTree]) -> int:
    return min(LONGEST, max((max(tree.depths()) for tree in trees if len(tree)), default=0))


GOODPUT = "goodput"
OUR_GOODPUT = "goodput, our drafts"
"""The same rule with the drafts of the other rules, and with those our planner chooses from."""
ARMS: dict[str, Callable[[CostModel], Planner]] = {**RIVALS, GOODPUT: Goodput}
"""The rules that need nothing but a cost model, by name."""
