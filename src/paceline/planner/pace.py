"""The value of time: how many tokens a millisecond is worth, and what a step takes on the host.

What a draft node costs in time is charged at the rate at which the engine makes tokens anyway. The
rate is kept as a factor over plain decoding, because that factor stays when requests come and go
while tokens per millisecond do not.
"""

from __future__ import annotations

from paceline.planner.host_time import HostTime
from paceline.planner.planner import StepReport

MEMORY = 0.95
"""Weight of the past in each step: about twenty steps."""
USUAL_ASK_MS = 0.1
"""What a step takes longer about if any proposer is asked, where it was not measured."""
USUAL_DRAFT_MS = 0.1, 0.015
"""What a draft adds to that about, and the draft of each further request."""
HOST_PACE = 0.1
"""Weight of the latest step in what multiplies these. They are not learnt from the first drafts
alone: those are slow in every program, and a planner that takes drafts to be dear for them hardly
sees others."""


class Pace:
    """Smoothed rate of committed decode tokens per millisecond; at first that of plain decoding.

    Args:
        host: what was measured of the host's time in a step, as far as it was.
    """

    def __init__(self, host: HostTime) -> None:
        self._tokens = self._time = 0.0
        self.overhead_ms = host.step
        """Time of a plain step outside of the forward."""
        self.ask_ms = host.ask or USUAL_ASK_MS
        """By how much a step is longer, outside of drafting, if any proposer is asked."""
        self._usual_ms = (host.draft, host.further_draft) if host.draft else USUAL_DRAFT_MS
        self._draft_factor = 1.0

    @property
    def factor(self) -> float:
        """Speed over plain decoding; at least 1, since plain decoding is always at hand."""
        return max(1.0, self._tokens / self._time) if self._time else 1.0

    def plain_ms(self, forward_ms: float) -> float:
        """Time of a plain step whose forward takes this long."""
        return forward_ms + self.overhead_ms

    def tokens_per_ms(self, num_decoding: int, plain_forward_ms: float) -> float:
        """What a millisecond is worth while so many requests decode."""
        time = self.plain_ms(plain_forward_ms)
        return self.factor * num_decoding / time if time > 0 else 0.0

    def draft_ms(self, num_decoding: int) -> float:
        """What drafts add to a step outside of planning, drafting and the forward."""
        first, further = self._usual_ms
        return self._draft_factor * (first + (num_decoding - 1) * further)

    def observe(
        self, report: StepReport, plain_forward_ms: float, proposing_ms: float, asked: bool
    ) -> None:
        """Learn from a step in which all requests decoded."""
        shape, forward_ms, total_ms, decoding, emitted, steps = report
        past = MEMORY**steps
        host_ms = max(0.0, total_ms - forward_ms - proposing_ms) / steps
        beyond_ms = max(0.0, host_ms - self.overhead_ms)
        if not asked:
            self.overhead_ms = _smoothed(self.overhead_ms, host_ms, 1 - past)
        elif shape.rows == decoding:
            self.ask_ms = _smoothed(self.ask_ms, beyond_ms, HOST_PACE)
        else:
            usual = self.draft_ms(decoding) / self._draft_factor
            factor = max(0.0, beyond_ms - self.ask_ms) / usual
            most = max(1.0, 2 * self._draft_factor)
            self._draft_factor += HOST_PACE * (min(factor, most) - self._draft_factor)
        weight = (1 - past) / (1 - MEMORY) / steps
        plain_ms = plain_forward_ms + self.overhead_ms
        self._tokens = past * self._tokens + weight * emitted / decoding
        self._time = past * self._time + weight * total_ms / plain_ms


def _smoothed(usual: float, milliseconds: float, pace: float) -> float:
    """A hiccup of the machine counts as little as a usual step."""
    return usual + pace * (min(milliseconds, 2 * usual) - usual) if usual else milliseconds
