"""What time is worth: tokens per millisecond, and how far a request may be held up for others.

What a draft node costs in time is charged at the rate at which the engine makes tokens anyway. The
rate is kept as a factor over plain decoding, because that factor stays when requests come and go
while tokens per millisecond do not (:class:`Pace`).

A step that is longer for its drafts is paid by every request in it, even if it gains nothing. Each
is owed its plain rate, less a share that it may lose. What it has had beyond that, by drafts of its
own or in steps that were short, later steps may take from it (:class:`Credits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.planner.cost_table import HostTime, StepShape
from paceline.request.request import Request

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
MOST_AHEAD = 16.0
"""Tokens; what goes beyond is forgotten."""
AT_FIRST, FIRST_PART = 6.0, 1 / 16
"""Tokens that a request may lose before it gains any: so many, or this part of those to come."""
ENOUGH = 0.5
"""A step with drafts costs a request about so many tokens: one that has less must gain by it."""


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


class Credits:
    """How far each request is ahead of what it is owed."""

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}
        self._emitted: list[tuple[Request, int]] = []
        self._plain = 0.0  # tokens that all have gained since they were last booked

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._ahead)

    def ahead(self, requests: Sequence[Request]) -> list[float]:
        """Tokens that each request has had beyond what it is owed; negative where it lacks some."""
        self._book_plain()
        return [self._of(request) for request in requests]

    def emitted(self, request: Request, count: int) -> None:
        """A request emits so many tokens in the step that is running."""
        self._emitted.append((request, count))

    def passed(self, plain_steps: float, slowdown: float, steps: int = 1) -> None:
        """The step is over; it took as long as so many plain ones.

        Where no request was said to emit anything, each of them emitted a token.

        Args:
            slowdown: share of its plain rate that a request may lose.
            steps: several, in which each request emitted a token.
        """
        if not self._emitted:
            self._plain += slowdown * steps
            return
        owed = (1.0 - slowdown) * plain_steps
        for request, count in self._emitted:
            self._set(request.request_id, self._of(request) + count - owed)
        self._emitted.clear()

    def _book_plain(self) -> None:
        if self._plain:
            for request_id, ahead in self._ahead.items():
                self._set(request_id, ahead + self._plain)
            self._plain = 0.0

    def _of(self, request: Request) -> float:
        ahead = self._ahead.get(request.request_id)
        if ahead is None:
            ahead = min(AT_FIRST, FIRST_PART * request.remaining)
            self._ahead[request.request_id] = ahead
        return ahead

    def _set(self, request_id: int, ahead: float) -> None:
        self._ahead[request_id] = min(ahead, MOST_AHEAD)

    def finish(self, request: Request) -> None:
        """Forget a request, what it emits in the step that is running included."""
        self._ahead.pop(request.request_id, None)
        self._emitted = [each for each in self._emitted if each[0] is not request]
