"""The value of time: how many tokens a millisecond is worth. Owns this estimate and its checks.

What a draft node costs in time is charged at the rate at which the engine makes tokens anyway. The
rate is kept as a factor over plain decoding, because that factor stays when requests come and go
while tokens per millisecond do not.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 0.95
"""Weight of the past in each step: about twenty steps."""
USUAL_EXTRA_MS = 0.1, 0.015
"""By how much a step outside of drafting and the forward is longer about if there is a draft, and
for each further request, where nobody has measured it."""
EXTRA_PACE = 0.1
"""Weight of the latest step in what multiplies that."""


class Pace:
    """Smoothed rate of committed decode tokens per millisecond; at first that of plain decoding.

    Args:
        overhead_ms: of a plain step outside of the forward; 0 where it is not known.
        extra_ms: by how much that is longer if there is a draft, and for each further request. It
            is not learnt from the first drafts alone: those are slow in every program, and who
            takes drafts to be dear for them hardly sees others.
    """

    def __init__(
        self, overhead_ms: float = 0.0, extra_ms: tuple[float, float] = USUAL_EXTRA_MS
    ) -> None:
        self._tokens = 0.0
        self._time = 0.0
        self.overhead_ms = overhead_ms
        """Time of a plain step outside of the forward."""
        self._usual_extra_ms, self._extra = extra_ms, 1.0

    @property
    def factor(self) -> float:
        """Speed over plain decoding; at least 1, since plain decoding is always at hand."""
        return max(1.0, self._tokens / self._time) if self._time else 1.0

    def plain_ms(self, forward_ms: float) -> float:
        """Time of a plain step whose forward takes this long."""
        return forward_ms + self.overhead_ms

    def tokens_per_ms(self, num_decoding: int, plain_forward_ms: float) -> float:
        """What a millisecond is worth while so many requests decode.

        Args:
            plain_forward_ms: of a forward without any draft.
        """
        time = self.plain_ms(plain_forward_ms)
        return self.factor * num_decoding / time if time > 0 else 0.0

    def extra_ms(self, num_decoding: int) -> float:
        """By how much a step outside of drafting and the forward is longer if there is a draft."""
        return self._extra * self._usual_ms(num_decoding)

    def _usual_ms(self, num_decoding: int) -> float:
        first, further = self._usual_extra_ms
        return first + (num_decoding - 1) * further

    def observe_overhead(self, milliseconds: float) -> None:
        """Learn from what a step without drafts took beside planning and the forward."""
        self.overhead_ms = _smoothed(self.overhead_ms, milliseconds)

    def observe_drafted(self, milliseconds: float, num_decoding: int) -> None:
        """Learn from what a step with drafts took beside drafting, planning and the forward."""
        extra = max(0.0, milliseconds - self.overhead_ms) / self._usual_ms(num_decoding)
        self._extra += EXTRA_PACE * (min(extra, max(1.0, 2 * self._extra)) - self._extra)

    def observe(self, tokens_per_request: float, total_ms: float, plain_forward_ms: float) -> None:
        """Learn from a step.

        Args:
            tokens_per_request: emitted, over requests that decoded.
            total_ms: of the whole step.
            plain_forward_ms: of the forward that it would have had without any draft.
        """
        self._tokens = MEMORY * self._tokens + tokens_per_request
        self._time = MEMORY * self._time + total_ms / (plain_forward_ms + self.overhead_ms)

    def observe_plain(self, steps: Sequence[tuple[float, float, float]], reads_clock: bool) -> None:
        """Learn from plain steps, as the other two do from each of them.

        Args:
            steps: see :class:`~paceline.policy.planner.PlainStep`.
        """
        tokens, time, overhead_ms = self._tokens, self._time, self.overhead_ms
        for forward_ms, total_ms, emitted in steps:
            if reads_clock:
                overhead_ms = _smoothed(overhead_ms, total_ms - forward_ms)
            tokens = MEMORY * tokens + emitted
            time = MEMORY * time + total_ms / (forward_ms + overhead_ms)
        self._tokens, self._time, self.overhead_ms = tokens, time, overhead_ms


def _smoothed(usual: float, milliseconds: float) -> float:
    """A hiccup of the machine counts as little as a usual step."""
    milliseconds = max(0.0, milliseconds)
    return usual + (1 - MEMORY) * (min(milliseconds, 2 * usual) - usual) if usual else milliseconds
