"""When the pieces of an answer come, for the metrics. Knows no engine and no format."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.server.engine_process.messages import Piece
from paceline.server.http.sse import Deadline
from paceline.server.metrics.exposition import ModelMetrics
from paceline.server.metrics.gen_ai_metrics import Operation

SUCCESSES = ("stop", "length")
"""Reasons with which an answer is whole."""


class _Sample:
    """When a sample's pieces came, and how many tokens they had."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.num_tokens = 0
        self.reason: str | None = None  # once it has ended


class Clock:
    """Times of the answers to a request's prompts, told to the metrics, and how they ended.

    Args:
        now: seconds as ``deadline`` counts them; default: :func:`time.monotonic`.
    """

    def __init__(
        self,
        metrics: ModelMetrics,
        operation: Operation,
        num_prompts: int,
        num_samples: int,
        deadline: Deadline,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._metrics = metrics
        self._operation: Operation = operation
        self._deadline = deadline
        self._now = now or time.monotonic
        self._prompts = [[_Sample() for _ in range(num_samples)] for _ in range(num_prompts)]
        self._samples = [sample for samples in self._prompts for sample in samples]
        self._reasons = ["abort"] * num_prompts

    def observe(self, piece: Piece) -> None:
        at, sample = self._now(), self._samples[piece.sample]
        if sample.first is None:
            sample.first = at
            self._metrics.first_token.observe(at - self._deadline.began)
        else:
            self._metrics.token_gap.observe(at - sample.last)
        sample.last = at
        sample.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            sample.reason = piece.finish_reason
            self._end(piece.sample // len(self._prompts[0]), piece.finish_reason)

    def _end(self, prompt: int, reason: str) -> None:
        """A sample of the prompt has ended."""
        samples = self._prompts[prompt]
        if all(sample.reason is not None for sample in samples):
            self._reasons[prompt] = reason
            if self._operation != "embeddings":
                self._tell_tokens(samples)

    def _tell_tokens(self, samples: list[_Sample]) -> None:
        """The times of a prompt's tokens, where its samples succeeded."""
        told, operation = self._metrics.gen_ai, self._operation
        firsts = list[float]()
        for sample in samples:
            if sample.reason not in SUCCESSES or sample.first is None:
                continue
            firsts.append(sample.first)
            if sample.num_tokens > 1:
                seconds = sample.last - sample.first
                told.observe_output_tokens(operation, seconds, sample.num_tokens - 1)
        if firsts:
            told.observe_first_token(operation, min(firsts) - self._deadline.began)

    def close(self, has_failed: bool) -> None:
        """Tell that the answers have ended; one that was complete before a failure stays so."""
        at = self._now()
        has_failed = has_failed or self._deadline.is_over(at)
        for samples, reason in zip(self._prompts, self._reasons, strict=True):
            unfinished = any(sample.reason is None for sample in samples)
            told, seconds = (
                "error" if has_failed and unfinished else reason,
                at - self._deadline.began,
            )
            self._metrics.observe_request(seconds, told)
            error_type = "" if told in SUCCESSES else told
            self._metrics.gen_ai.observe_request(self._operation, seconds, error_type)
