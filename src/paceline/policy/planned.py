"""The step that is being planned: what its parts tell each other. Owns no decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.policy.cost_points import NO_STEP, StepShape
from paceline.policy.proposer_value import ProposerValue
from paceline.request import Request
from paceline.span import DraftTree


@dataclass(slots=True)
class Asked:
    """One proposer's draft for one request in a step.

    Attributes:
        name: of the proposer.
        value: what it is expected to bring, and what learns from what it does.
        index: the request's place in the step.
        lag: tokens that the proposer has to catch up with, where they are more than usual.
        candidates: requests for which the proposer could have been asked.
        cost_ms: its part of the drafting time, were all of these asked: who shares a call with few
            is not to be charged for those who do not.
        gain: what the chosen nodes promise beyond the time in which they are verified, in tokens.
    """

    name: str
    value: ProposerValue
    index: int
    request: Request
    lag: int
    candidates: int
    cost_ms: float = 0.0
    gain: float = 0.0

    def credit(self, tree: DraftTree, probs: Sequence[float], price: float) -> None:
        """Note what the proposer's chosen nodes promise; each takes time worth ``price`` tokens.

        Args:
            tree: of the chosen nodes, of whichever proposer.
            probs: of its paths.
        """
        count = tree.origins.count(self.name)
        if count < len(probs):  # some are another's
            pairs = zip(probs, tree.origins, strict=True)
            probs = [prob for prob, origin in pairs if origin == self.name]
        self.gain = sum(probs) - price * count


@dataclass(slots=True)
class PlannedStep:
    """The step that is being planned.

    Attributes:
        requests: that may draft.
        growth: milliseconds of the forward with 0, 1, 2, ... draft nodes, and of what else
            takes longer with some; empty until it is needed.
        plain_ms: predicted forward without drafts.
        rate: tokens that a millisecond is worth.
        slowdown: share of its plain speed that a request may lose to the drafts of others.
        ahead: tokens that each request has had beyond what it is owed; None where all may be held
            up.
        asks: who drafts for whom.
        explored: proposers that are asked to see whether it pays by now.
        trees: what was drafted, by request id.
        levels, level_ms: of the proposer that drafts by forwards: how many, and the time of a
            further one.
        draft_ms: time of the proposers.
    """

    shape: StepShape = NO_STEP
    requests: Sequence[Request] = ()
    growth: Sequence[float] = ()
    plain_ms: float = 0.0
    rate: float = 0.0
    slowdown: float = 0.0
    ahead: Sequence[float] | None = None
    asks: list[Asked] = field(default_factory=list)
    explored: set[str] = field(default_factory=set)
    trees: dict[int, DraftTree] = field(default_factory=dict)
    levels: int = 1
    level_ms: float = 0.0
    draft_ms: float = 0.0


UNPLANNED = PlannedStep()
"""A step for which no proposer is asked; shared, so never written to."""


def asks_for_drafts(request: Request) -> bool:
    """Whether it says itself how much is to be drafted, so that nothing else decides it."""
    wish = request.params.speculative
    return wish.enabled and bool(wish.num_speculative_tokens)
