"""What stands in a replay for the parts of an engine that compute or remember. Knows no traces."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planner.cost_points import StepShape
from paceline.planner.drafting_cost import DraftingCost
from paceline.planner.drafts import TextDrafter
from paceline.planner.planner import FixedPlanner, Source
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.request import Request
from paceline.request.span import DraftTree


class Clock:
    """A clock that stands still until it is moved on."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    def __call__(self) -> float:
        """Seconds, as :func:`time.perf_counter` gives them."""
        return self.milliseconds / 1e3


class Charged:
    """A proposer whose calls are charged, by moving the clock on, what they are said to take."""

    def __init__(self, proposer: Proposer, cost: DraftingCost, clock: Clock) -> None:
        self.inner = proposer
        self._cost, self._clock = cost, clock
        self._ms = 0.0
        self.name = proposer.name
        self.config = proposer.config
        self.costs_forwards = proposer.costs_forwards
        self.costs_levels = proposer.costs_levels
        self.drafts_from_text = proposer.drafts_from_text
        self.sees_matches = proposer.sees_matches
        self.taps = proposer.taps
        self.lag = proposer.lag
        self.matched = proposer.matched
        self.follows = proposer.follows
        self.read = proposer.read
        self.observe = proposer.observe
        self.context_length = proposer.context_length
        self.finish = proposer.finish

    @property
    def num_forwards(self) -> int:
        return self.inner.num_forwards

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        lags = [lag for request in requests if (lag := self.lag(request))]
        trees = self.inner.propose(requests, budget)
        levels = 1
        if self.costs_forwards and self.costs_levels:
            levels = max((max(tree.depths()) for tree in trees if len(tree)), default=1)
        ms = self._cost.milliseconds(self.name, levels)
        if lags:
            ms += sum([self._cost.catch_up(self.name, lag) for lag in lags])
        self._charge(ms)
        return trees

    def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
        self._charge(self._cost.milliseconds(self.name))
        return self.inner.drafters(requests)

    def _charge(self, milliseconds: float) -> None:
        self._ms += milliseconds
        self._clock.milliseconds += milliseconds

    def take_ms(self) -> float:
        """What was charged since the last call."""
        ms, self._ms = self._ms, 0.0
        return ms


class AskingAll(FixedPlanner):
    """Asks all proposers for all requests, whatever others have drafted."""

    asks_together = False

    def __init__(self) -> None:
        super().__init__()
        self._requests: Sequence[Request] = ()

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        self._requests = requests
        return 0

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        return list(candidates)


class EndlessKV:
    """A KV cache for the scheduler: there is always room, and nothing is kept."""

    num_blocks = num_available = 1 << 40

    @property
    def pool(self) -> EndlessKV:
        return self

    def open(self, request_id: int, salt: str, adapter: str | None) -> None: ...

    def free(self, request_id: int) -> None: ...

    def reserve(self, request_id: int, num_nodes: int, certain: int = 0) -> bool:
        return True

    def attach_prefix(self, request_id: int, token_ids: Sequence[int], limit: int) -> int:
        return 0
