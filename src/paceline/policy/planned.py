"""The step that is being planned: what its parts tell each other. Owns no decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.policy.asks import Ask
from paceline.policy.cost_points import NO_STEP, StepShape
from paceline.request import Request
from paceline.span import DraftTree


@dataclass(slots=True)
class PlannedStep:
    """The step that is being planned.

    Attributes:
        requests: that may draft.
        growth: milliseconds of the forward with 0, 1, 2, ... draft nodes, and of what else
            takes longer with some; empty until it is needed.
        plain_ms: predicted forward without drafts.
        rate: tokens that a millisecond is worth.
        ahead: tokens that each request has had beyond what it is owed; None where nobody counts.
        weights: of the requests in the choice; None is equal ones.
        asks: who drafts for whom.
        trees: what was drafted, by request id.
        num_trees: how many trees these were before those of one request were merged.
        levels, level_ms: of whoever drafts by forwards: how many, and the time of a further one.
        draft_ms, host_ms: time of the proposers, and of planning; the latter is known at the end.
        began, ended: when planning did, in seconds; the latter is 0 where nobody was asked.
    """

    shape: StepShape = NO_STEP
    requests: Sequence[Request] = ()
    growth: Sequence[float] = ()
    plain_ms: float = 0.0
    rate: float = 0.0
    ahead: Sequence[float] | None = None
    weights: Sequence[float] | None = None
    asks: list[Ask] = field(default_factory=list)
    trees: dict[int, DraftTree] = field(default_factory=dict)
    num_trees: int = 0
    levels: int = 1
    level_ms: float = 0.0
    draft_ms: float = 0.0
    host_ms: float = 0.0
    began: float = 0.0
    ended: float = 0.0


UNPLANNED = PlannedStep()
"""A step for which nobody is asked; shared, so never written to."""
