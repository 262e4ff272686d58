"""The step that is being planned: what its parts tell each other. Owns no decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.planner.cost_points import NO_STEP, StepShape
from paceline.planner.proposer_value import ProposerValue
from paceline.request.request import Request

Explored = tuple[str, int]
"""A source, and a situation in which it is asked."""


class Candidate(NamedTuple):
    """A request for which a source may be asked.

    Attributes:
        place: in the step.
        value: what the source is expected to bring, and what learns from what it does.
        lag: tokens that the source has to catch up with, where they are more than usual.
        what: is explored where it is asked against this value.
    """

    place: int
    value: ProposerValue
    lag: int
    what: Explored


@dataclass(slots=True)
class Lesson:
    """What the drafts of some requests say of a source's value.

    Attributes:
        gain: what their chosen nodes promise beyond the time in which they are verified, in tokens.
    """

    value: ProposerValue
    indices: list[int] = field(default_factory=list)
    gain: float = 0.0

    def learn(self, milliseconds: float) -> None:
        """Tell the value; each request's draft took so long."""
        count = len(self.indices)
        self.value.learn(self.gain / count, milliseconds, count)


@dataclass(slots=True)
class Asked:
    """A source that is asked for drafts in a step.

    Attributes:
        name: of the source.
        count: requests for which it is asked.
        lag: tokens that it has to catch up with for these, beyond the usual.
        able: requests for which it could have been asked.
        lessons: what is learnt of it, by value. Requests that are still caught up with, or asked
            for drafts at any price, say nothing of others.
        cost_ms: the part of each request in the drafting time, were all of these asked: who shares
            a call with few is not to be charged for those who do not.
    """

    name: str
    count: int
    lag: int
    able: int
    lessons: Sequence[Lesson] = ()
    cost_ms: float = 0.0


@dataclass(slots=True)
class PlannedStep:
    """The step that is being planned.

    Attributes:
        requests: that may draft.
        forwards: milliseconds of the forward with 0, 1, 2, ... draft nodes; empty until needed.
        growth: the same with what else takes longer where there are some.
        plain_ms: predicted forward without drafts.
        rate: tokens that a millisecond is worth.
        slowdown: share of its plain speed that a request may lose to the drafts of others.
        ahead: tokens that each request has had beyond what it is owed; None where all may be held
            up.
        asks: who was asked.
        explored: who is asked to see whether it pays by now.
        levels, level_ms: of the proposer that drafts by forwards: how many, and the time of a
            further one.
        draft_ms: time of the proposers.
    """

    shape: StepShape = NO_STEP
    requests: Sequence[Request] = ()
    forwards: Sequence[float] = ()
    growth: Sequence[float] = ()
    plain_ms: float = 0.0
    rate: float = 0.0
    slowdown: float = 0.0
    ahead: Sequence[float] | None = None
    asks: list[Asked] = field(default_factory=list)
    explored: set[Explored] = field(default_factory=set)
    levels: int = 1
    level_ms: float = 0.0
    draft_ms: float = 0.0


UNPLANNED = PlannedStep()
"""A step for which no proposer is asked; shared, so never written to."""


def asks_for_drafts(request: Request) -> bool:
    """Whether it says itself how much is to be drafted, so that nothing else decides it."""
    wish = request.params.speculative
    return wish.enabled and bool(wish.num_speculative_tokens)
