"""Looks at wide steps that seem too dear, so that their price stays known. Owns which they are.

A planner that takes wide steps to be dear takes none, sees none, and would believe it for ever: of
a table that was measured while another process held a core, or with kernels that were since
replaced. So a draft that would pay were width much cheaper is verified now and then; how often is
:class:`~paceline.policy.looks.Looks`'s. It is the counterpart of
:class:`~paceline.policy.pace.PlainCheck`. Nothing is spent on drafts that would not pay even then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.policy.asks import Ask
from paceline.policy.cost import CostModel
from paceline.policy.lateness import Lateness
from paceline.policy.looks import Looks
from paceline.policy.planned import PlannedStep
from paceline.policy.planner import Source, StepReport
from paceline.span import DraftTree

HOPE = 0.125
"""What width is hoped to cost, as a part of what it is believed to."""

Pick = Callable[[Sequence[float]], list[DraftTree]]


class WidthCheck:
    """See the module's docstring.

    Args:
        cost: predicts forwards.
        lateness: of requests that are to have a token in time; None where none are.
        is_strict: no request may be held up for others.
    """

    def __init__(self, cost: CostModel, lateness: Lateness | None, is_strict: bool) -> None:
        self.looks = Looks()
        self._cost, self._lateness, self._is_strict = cost, lateness, is_strict
        self._hopes = False  # something was drafted for a look

    def may_look(self, step: PlannedStep) -> bool:
        """Whether the step may become one that is wider than seems to pay."""
        if not self.looks.is_due or step.plain_ms <= 0.0:
            return False
        decoding = len(step.requests)
        return step.shape.requests == decoding and (decoding == 1 or not self._is_strict)

    def again(self, latest: PlannedStep) -> Sequence[Ask]:
        """Who drafted for the latest look, where another one is to follow at once."""
        return (latest.asks or latest.again) if self.looks.is_pressing else ()

    def asks_again(self, source: Source, step: PlannedStep, candidates: Sequence[int]) -> list[Ask]:
        """A proposer's drafts like those of the latest look, for those who still decode."""
        places = {step.requests[i].request_id: i for i in candidates}
        return [
            Ask(asked.key, places[asked.request.request_id], asked.request, 0, len(candidates))
            for asked in step.again
            if asked.key[0] == source.name and asked.request.request_id in places
        ]

    def growth(self, step: PlannedStep, growth: Sequence[float]) -> Sequence[float]:
        """By what further drafting is priced: hoped times where there may be a look.

        Args:
            growth: milliseconds of the step with 0, 1, 2, ... draft nodes, all that they take.
        """
        if not self.may_look(step):
            return growth
        forward = self._cost.growth(step.shape, len(growth) - 1)
        if not self.looks.are_covered(forward[-1] / forward[0], growth[-1] - growth[0]):
            return growth
        self._hopes = True
        return hoped(growth, forward)

    def wider(self, step: PlannedStep, picked: list[DraftTree], pick: Pick) -> list[DraftTree]:
        """What to verify: what is picked, or more where that is to be looked at.

        Args:
            pick: what would be picked at such a growth.
        """
        if not self.may_look(step):
            return picked
        looks, growth = self.looks, step.growth
        forward = self._cost.growth(step.shape, len(growth) - 1)
        most = looks.most_nodes if looks.is_pressing else len(growth)
        more = pick(hoped(growth, forward)[: most + 1])
        looks.pause(step.plain_ms)
        few, many = _count(picked), _count(more)
        is_wider = few < many < len(growth) and growth[few] < growth[many]
        cost_ms = growth[many] - growth[few] if is_wider else 0.0
        begins = (
            is_wider
            and looks.are_covered(forward[many] / forward[0], cost_ms)
            and (self._lateness is None or self._lateness.allows(step.requests, forward[many]))
        )
        looks.spend(self._drafted_ms(step, picked))
        if not begins:
            return picked
        looks.begin(many, forward, cost_ms)
        return more

    def _drafted_ms(self, step: PlannedStep, picked: Sequence[DraftTree]) -> float:
        """Time of drafting that would not have been without a look."""
        hopes, self._hopes = self._hopes, False
        if step.again:
            return step.draft_ms
        used = max([max(tree.depths()) for tree in picked if tree.token_ids], default=1)
        return max(0, step.levels - used) * step.level_ms if hopes else 0.0

    def end(self, step: PlannedStep, report: StepReport) -> None:
        """A planned step is over."""
        self.looks.end(report.shape.rows - step.shape.rows, report.forward_ms)


def hoped(growth: Sequence[float], forward: Sequence[float]) -> list[float]:
    """What steps would take were width as cheap as one may hope.

    Args:
        growth: milliseconds of the step with 0, 1, 2, ... draft nodes, all that they take.
        forward: of its forward alone.
    """
    plain_ms, less = forward[0], 1.0 - HOPE
    pairs = zip(growth, forward, strict=True)
    return [ms - less * max(0.0, part - plain_ms) for ms, part in pairs]


def _count(trees: Sequence[DraftTree]) -> int:
    return sum([len(tree.token_ids) for tree in trees])
