"""How long an answer takes, told to the metrics. Knows no endpoint and no engine."""

from __future__ import annotations

import time

from paceline.server.messages import Piece
from paceline.server.metrics import ServerMetrics
from paceline.server.sse import Deadline


class Clock:
    """Times of one prompt's answer, told to the metrics, and how it ended."""

    def __init__(self, metrics: ServerMetrics, num_samples: int, deadline: Deadline) -> None:
        self._metrics = metrics
        self._deadline = deadline
        self._last: list[float | None] = [None] * num_samples
        self._unfinished = num_samples
        self._reason = "abort"

    def observe(self, piece: Piece) -> None:
        at = time.monotonic()
        last = self._last[piece.index]
        if last is None:
            self._metrics.observe_first_token(at - self._deadline.began)
        else:
            self._metrics.observe_token_gap(at - last)
        self._last[piece.index] = at
        if piece.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self._reason = piece.finish_reason

    def fail(self) -> None:
        """The request has failed; an answer that was complete before stays what it was."""
        if self._unfinished:
            self._reason = "error"

    def close(self) -> None:
        """Tell that the answer has ended."""
        if self._deadline.seconds_left <= 0:
            self.fail()
        self._metrics.observe_request(time.monotonic() - self._deadline.began, self._reason)
