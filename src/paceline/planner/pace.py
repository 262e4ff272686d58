"""What time is worth: tokens per millisecond, and how far a request may be held up for others.

The time of a draft node is charged at the rate at which the engine makes tokens anyway, kept as a
factor over plain decoding, because that stays when requests come and go (:class:`Pace`).

Every request of a step pays for the time of its drafts, even one that gains nothing. Each is due
its plain rate, less a share that it may lose. What it has had beyond that, later steps may take
from it (:class:`Credits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.planner.cost_table import HostTime, StepShape
from paceline.request.request import Request

MEMORY = 0.95
"""Weight of the past in each step: about twenty steps."""
USUAL_ASK_MS = 0.1
"""What asking any proposer adds to a step, where it was not measured."""
USUAL_DRAFT_MS = 0.1, 0.015
"""What a draft adds to that, and the draft of each further request."""
HOST_PACE = 0.1
"""Weight of the latest step in the factor on these. The first drafts of a program are slow, and a
planner that learnt from them alone would find drafts too expensive to see others."""
MOST_AHEAD = 16.0
"""Tokens; what goes beyond is forgotten."""
AT_FIRST, FIRST_PART = 6.0, 1 / 16
"""Tokens that a request may lose before it gains any: the lesser of this number and this part of
those to come."""
ENOUGH = 0.5
"""Tokens that a step with drafts costs a request, about: one that has less must gain by it."""


class StepReport(NamedTuple):  # made in every step: a frozen dataclass takes thrice as long
    """What a step took and brought, or several together for which the planner was not asked."""

    shape: StepShape  # of the forward, draft nodes included; of the last of several steps
    forward_ms: float  # of the target
    total_ms: float
    num_decoding: int  # requests that decoded, the same ones in each of several steps
    num_emitted: int  # tokens that these emitted
    num_steps: int = 1


class Pace:
    """Smoothed rate of committed decode tokens per millisecond; at first that of plain decoding.

    Args:
        host: what was measured of the host's time in a step.
    """

    def __init__(self, host: HostTime) -> None:
        self._tokens = self._time = 0.0
        self.overhead_ms = host.step
        """Time of a plain step outside of the forward."""
        self._plain_decoding = 1  # requests of the latest one
        self.ask_ms = host.ask or USUAL_ASK_MS
        """What asking any proposer adds to a step, besides its drafting."""
        self._usual_ms = (host.draft, host.further_draft) if host.draft else USUAL_DRAFT_MS
        self._draft_factor = 1.0

    @property
    def factor(self) -> float:
        """Speed over plain decoding; at least 1, since plain decoding is always possible."""
        return max(1.0, self._tokens / self._time) if self._time else 1.0

    def plain_ms(self, forward_ms: float) -> float:
        """Time of a plain step whose forward takes this long."""
        return forward_ms + self.overhead_ms

    def tokens_per_ms(self, num_decoding: int, plain_forward_ms: float) -> float:
        """What a millisecond is worth while this many requests decode."""
        time = plain_forward_ms + self.overhead_ms
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
            self._plain_decoding = decoding
        # No step of a lone request takes less than its plain one; of several, there may be fewer.
        is_less = host_ms < self.overhead_ms and decoding == self._plain_decoding == 1
        if not asked or is_less:
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
    """A hiccup of the machine counts at most as twice the usual time."""
    return usual + pace * (min(milliseconds, 2 * usual) - usual) if usual else milliseconds


class Credits:
    """How far each request is ahead of its due."""

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}
        self._emitted: list[tuple[Request, int]] = []
        self._plain = 0.0  # tokens that all have gained since they were last booked

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._ahead)

    def ahead(self, requests: Sequence[Request]) -> list[float]:
        """Tokens that each request has had beyond its due; negative where it lacks some."""
        if self._plain:
            for request_id, ahead in self._ahead.items():
                self._ahead[request_id] = min(ahead + self._plain, MOST_AHEAD)
            self._plain = 0.0
        known = self._ahead
        return [
            known[request.request_id] if request.request_id in known else self._first(request)
            for request in requests
        ]

    def emitted(self, request: Request, count: int) -> None:
        """A request emits this many tokens in the step that is running."""
        self._emitted.append((request, count))

    def passed(self, plain_steps: float, slowdown: float, steps: int = 1) -> None:
        """The step is over, in which each request emitted a token unless it said otherwise.

        Args:
            plain_steps: that would have taken as long.
            slowdown: share of its plain rate that a request may lose.
            steps: several, in each of which every request emitted a token.
        """
        if not self._emitted:
            self._plain += slowdown * steps
            return
        due = (1.0 - slowdown) * plain_steps
        for request, count in self._emitted:
            ahead = self._ahead.get(request.request_id)
            if ahead is None:
                ahead = self._first(request)
            self._ahead[request.request_id] = min(ahead + count - due, MOST_AHEAD)
        self._emitted.clear()

    def _first(self, request: Request) -> float:
        ahead = self._ahead[request.request_id] = min(AT_FIRST, FIRST_PART * request.remaining)
        return ahead

    def finish(self, request: Request) -> None:
        """Forget a request, with what it emits in the step that is running."""
        self._ahead.pop(request.request_id, None)
        self._emitted = [entry for entry in self._emitted if entry[0] is not request]
