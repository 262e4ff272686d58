"""Times of answers under the names of OpenTelemetry's conventions for generative AI.

Owns names, buckets and labels, which are those of ``docs/gen-ai/gen-ai-metrics.md`` in
semantic-conventions-genai (commit 004902b8), as Prometheus spells them: dots become underscores,
and the unit ends the name.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram

Operation = Literal["chat", "text_completion", "embeddings"]
PROVIDER = "paceline"
REQUEST_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class GenAiMetrics:
    """The histograms of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        made = partial(Histogram, registry=registry)
        self.request = made(
            "gen_ai_server_request_duration_seconds",
            "Arrival to last token.",
            (*_LABELS, "error_type"),
            buckets=REQUEST_BUCKETS,
        )
        self.first_token = made(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token, of answers that succeeded.",
            _LABELS,
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self.output_token = made(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per token after the first, of answers that succeeded.",
            _LABELS,
            buckets=OUTPUT_TOKEN_BUCKETS,
        )


class GenAiTimes:
    """What is observed of one model."""

    def __init__(self, server: GenAiMetrics, model_name: str) -> None:
        self._server, self._model = server, model_name

    def observe_request(self, operation: Operation, seconds: float, error_type: str = "") -> None:
        """A prompt's answers have ended; without an ``error_type`` they succeeded."""
        labels = operation, PROVIDER, self._model, error_type
        self._server.request.labels(*labels).observe(seconds)

    def observe_first_token(self, operation: Operation, seconds: float) -> None:
        self._server.first_token.labels(operation, PROVIDER, self._model).observe(seconds)

    def observe_output_tokens(self, operation: Operation, seconds: float, count: int) -> None:
        """A sample had so many tokens after its first one, in so many seconds."""
        labels = operation, PROVIDER, self._model
        self._server.output_token.labels(*labels).observe(seconds / count)
