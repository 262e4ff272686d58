"""How far each request is ahead of what it is owed, so that others' drafts do not hold it up.

A step that is longer for its drafts is paid by every request in it, even if it gains nothing. Each
is owed its plain rate, less a share that it may lose. What it has had beyond that, by drafts of its
own or in steps that were short, later steps may take from it. Knows no trees and no costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.request.request import Request

MOST_AHEAD, MOST_BEHIND = 16.0, 4.0
"""Tokens; what goes beyond is forgotten."""
AT_FIRST, FIRST_PART = 6.0, 1 / 16
"""Tokens that a request may lose before it gains any: so many, or this part of those to come."""
ENOUGH = 0.5
"""A step with drafts costs a request about so many tokens: one that has less must gain by it."""


class Credits:
    """See the module's docstring."""

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
        self._ahead[request_id] = min(max(ahead, -MOST_BEHIND), MOST_AHEAD)

    def finish(self, request: Request) -> None:
        """Forget a request, what it emits in the step that is running included."""
        self._ahead.pop(request.request_id, None)
        self._emitted = [each for each in self._emitted if each[0] is not request]
