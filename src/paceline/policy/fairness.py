"""How far each request is ahead of what it is owed, so that others' drafts hold nobody up for long.

A step that is longer for its drafts is paid by every request in it, whoever gains by it. Each is
owed its plain rate, less a share that it may lose. What it has had beyond that, by drafts of its
own or in steps that were short, later steps may take from it. Knows no trees and no costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.request import Request

MOST_AHEAD = 16.0
MOST_BEHIND = 4.0
"""Tokens; what goes beyond is forgotten."""
AT_FIRST = 6.0
FIRST_PART = 1 / 16
"""Tokens that a request may lose before it gains any: so many, or this part of those to come."""
ENOUGH = 0.5
"""Tokens that a longer step takes about: who has less must gain by it."""


class Fairness:
    """See the module's docstring.

    Args:
        slowdown: share of its plain rate that a request may lose in the long run.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._ahead: dict[int, float] = {}
        self._emitted: list[tuple[Request, int]] = []
        self._plain = 0  # steps since it was last booked

    def ahead(self, requests: Sequence[Request]) -> list[float]:
        """Tokens that each request has had beyond what it is owed; negative where it lacks some."""
        self._book_plain()
        return [self._of(request) for request in requests]

    def needy(self, requests: Sequence[Request]) -> list[tuple[Request, float]]:
        """Those who must gain by a step that is longer, and after how many plain steps they need
        not any more."""
        ahead = zip(requests, self.ahead(requests), strict=True)
        return [(each, (ENOUGH - has) / self._slowdown) for each, has in ahead if has < ENOUGH]

    def emitted(self, request: Request, count: int) -> None:
        """A request emits so many tokens in the step that is running."""
        self._emitted.append((request, count))

    def passed(self, plain_steps: float) -> None:
        """The step is over; it took as long as so many plain ones.

        Where no request was said to emit anything, each of them emitted a token.
        """
        if not self._emitted:
            self._plain += 1
            return
        owed = (1.0 - self._slowdown) * plain_steps
        for request, count in self._emitted:
            self._set(request.request_id, self._of(request) + count - owed)
        self._emitted.clear()

    def passed_plainly(self, steps: int) -> None:
        """So many steps are over in which each request emitted a token."""
        self._plain += steps

    def _book_plain(self) -> None:
        if self._plain:
            for request_id, ahead in self._ahead.items():
                self._set(request_id, ahead + self._slowdown * self._plain)
            self._plain = 0

    def _of(self, request: Request) -> float:
        ahead = self._ahead.get(request.request_id)
        if ahead is None:
            ahead = min(AT_FIRST, FIRST_PART * request.remaining)
            self._ahead[request.request_id] = ahead
        return ahead

    def _set(self, request_id: int, ahead: float) -> None:
        self._ahead[request_id] = min(max(ahead, -MOST_BEHIND), MOST_AHEAD)

    def finish(self, request: Request) -> None:
        """Forget a request, what it emits in the step that is running included."""
        self._ahead.pop(request.request_id, None)
        self._emitted = [each for each in self._emitted if each[0] is not request]
