"""When the pieces of an answer come, for the metrics. Knows no engine and no format."""

from __future__ import annotations

import time

from paceline.server.messages import Piece
from paceline.server.metrics import ModelMetrics
from paceline.server.sse import Deadline


class Clock:
    """Times of the answers to a request's prompts, told to the metrics, and how they ended."""

    def __init__(
        self, metrics: ModelMetrics, num_prompts: int, num_samples: int, deadline: Deadline
    ) -> None:
        self._metrics = metrics
        self._deadline = deadline
        self._num_samples = num_samples
        self._last: list[float | None] = [None] * (num_prompts * num_samples)
        self._unfinished = [num_samples] * num_prompts
        self._reasons = ["abort"] * num_prompts

    def observe(self, piece: Piece) -> None:
        at = time.monotonic()
        last = self._last[piece.sample]
        if last is None:
            self._metrics.first_token.observe(at - self._deadline.began)
        else:
            self._metrics.token_gap.observe(at - last)
        self._last[piece.sample] = at
        if piece.finish_reason is not None:
            prompt = piece.sample // self._num_samples
            self._unfinished[prompt] -= 1
            if not self._unfinished[prompt]:
                self._reasons[prompt] = piece.finish_reason

    def close(self, has_failed: bool) -> None:
        """Tell that the answers have ended; one that was complete before a failure stays so."""
        has_failed = has_failed or self._deadline.seconds_left <= 0
        for unfinished, reason in zip(self._unfinished, self._reasons, strict=True):
            told = "error" if has_failed and unfinished else reason
            self._metrics.observe_request(time.monotonic() - self._deadline.began, told)
