"""Which draft nodes a step verifies. Owns the choice; knows neither proposers nor forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.planner.choice import DraftLimits
from paceline.planner.cost_points import StepShape
from paceline.planner.drafts import Drafts
from paceline.planner.prices import FREE, Prices
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree

ENOUGH_TOKENS = 1.0
"""Expected tokens of free drafts beyond which a fixed plan does not pay for more."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a planner decides about as one: a proposer, or all that draft from texts.

    Attributes:
        name: of the proposer, or of all of them.
        costs_forwards: it drafts by forwards of a model.
        lag: tokens of a request that it has to read before it can draft; None where it will not.
        applies: whether it is for a request at all, whatever its text.
        costs_levels: each further level of its trees takes one more forward.
        matched: tokens at the end of a request's text that occurred before, which says beforehand
            what a draft may be worth; None where nothing does.
    """

    name: str
    costs_forwards: bool = False
    lag: Callable[[Request], int | None] = lambda request: 0
    applies: Callable[[Request], bool] = lambda request: True
    costs_levels: bool = True
    matched: Callable[[Request], int] | None = None

    @property
    def has_levels(self) -> bool:
        """Whether what it takes depends on the depth of its trees."""
        return self.costs_forwards and self.costs_levels


class StepReport(NamedTuple):  # made in every step: a frozen dataclass takes thrice as long
    """What a step took and brought, for planning the next one.

    It may report several steps at once, for none of which the planner was asked.

    Attributes:
        shape: of the forward, draft nodes included; of the last of several steps.
        forward_ms: of the target's forward.
        total_ms: of the whole step.
        num_decoding: requests that decoded, the same ones in each of several steps.
        num_emitted: tokens that these emitted.
        num_steps: whose times and tokens these are together.
    """

    shape: StepShape
    forward_ms: float
    total_ms: float
    num_decoding: int
    num_emitted: int
    num_steps: int = 1


class Planner(Protocol):
    """Decides for each step who drafts, for how much, and which nodes are verified.

    A step calls :meth:`begin`, then :meth:`ask`, :meth:`prices` and :meth:`drafted` once per
    source, :meth:`choose`, and, when it has committed, :meth:`observe` per request and
    :meth:`end`. What the steps took for which it was not asked it is told at once, before the next
    :meth:`begin`. Requests are named by their place in what :meth:`begin` was given; what is
    drafted for them is added to :attr:`drafts`.
    """

    drafts: Drafts
    asks_together: bool = True
    """All proposers that draft from texts are one source, which is asked once for all of them."""

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
            them is, as long as the same requests decode, no others come and :meth:`wakes` does not
            say otherwise: the planner need not be called before.
        """
        ...

    def wakes(self, requests: Sequence[Request]) -> bool:
        """Whether a text has come to where a draft may pay, in steps that :meth:`begin` skips."""
        ...

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        """For which of the candidates a source drafts; others may have drafted for them already."""
        ...

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        """What a source's further work has to be worth.

        Args:
            max_nodes: that it may draft for all the chosen requests together.
        """
        ...

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        """Learn how long a source took for these requests, whose drafts are there now."""
        ...

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        """The trees to verify: prefix-closed parts of what was drafted, the best path first."""
        ...

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Learn from what a step emitted, in which proposers were asked."""
        ...

    def end(self, report: StepReport) -> None:
        """Learn from a step as a whole, or from those for which it was not asked."""
        ...

    def finish(self, request: Request) -> None:
        """Forget a request."""
        ...


class FixedPlanner:
    """Asks all proposers and takes the likeliest nodes up to fixed caps, at any cost.

    A proposer that costs forwards is not asked where others expect to bring a token already.

    Args:
        drafts: None is those in Python, with the estimates that proposers have themselves.
    """

    asks_together = True

    def __init__(self, drafts: Drafts | None = None) -> None:
        self.drafts = drafts or Drafts(calibrates=False)

    def set_sources(self, sources: Sequence[Source]) -> None: ...

    def begin(self, step: StepShape, requests: Sequence[Request]) -> int:
        return 0

    def wakes(self, requests: Sequence[Request]) -> bool:
        return False

    def ask(self, source: Source, candidates: Sequence[int]) -> list[int]:
        if not source.costs_forwards:
            return list(candidates)
        return [i for i in candidates if self.drafts.expected(i) < ENOUGH_TOKENS]

    def prices(self, source: Source, chosen: Sequence[int], max_nodes: int) -> Prices:
        return FREE

    def drafted(self, source: Source, chosen: Sequence[int], milliseconds: float) -> None: ...

    def observe(self, request: Request, result: VerifyResult) -> None: ...

    def end(self, report: StepReport) -> None: ...

    def finish(self, request: Request) -> None: ...

    def choose(self, limits: Sequence[DraftLimits], node_budget: int) -> list[DraftTree]:
        no_time = [0.0] * (1 + sum(self.drafts.sizes()))
        self.drafts.choose(limits, no_time, 0.0, node_budget=node_budget)
        return self.drafts.chosen()
