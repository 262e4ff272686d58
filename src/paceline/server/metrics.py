"""Prometheus metrics of a server: what HTTP observes itself, and the engine's counters mirrored.

Owns the names' prefix and the histograms of times; which counters an engine has is
:mod:`paceline.server.engine_metrics`' matter. Names follow the field's, under ``paceline:``.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from paceline.metrics import EngineStats
from paceline.server.engine.client import EngineClient
from paceline.server.engine_metrics import EngineMirror

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "paceline"
VLLM_PREFIX = "vllm"
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
TOKEN_GAP_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
REASONS = ("stop", "length", "abort", "error")
"""Reasons that are exported from the start; others appear when they first happen."""


class ServerMetrics:
    """The metrics of one server. Observing takes microseconds and needs no ``await``.

    Args:
        prefix: of every name. Under ``vllm`` the speculation counters are totals without the label
            ``proposer``, as dashboards for vLLM expect them.
        model_name: value of the label ``model_name``.

    Attributes:
        first_token: histogram of the time from a request's arrival to its first token.
        token_gap: histogram of the time between two pieces of a sample, each of which its client
            gets as one event.
        rejected: counter of requests that were refused because the queue was full.
    """

    def __init__(self, prefix: str = PREFIX, model_name: str = "") -> None:
        self._registry = CollectorRegistry()
        self._prefix, self._model = prefix, model_name
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self.token_gap = self._histogram(
            "inter_token_latency_seconds", "Between two pieces of an answer.", TOKEN_GAP_BUCKETS
        )
        self._request = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS
        )
        labels = ("model_name", "finished_reason")
        self._finished = Counter(
            f"{prefix}:request_success",
            "Requests that ended, by reason.",
            labels,
            registry=self._registry,
        )
        for reason in REASONS:
            self._finished.labels(model_name, reason)
        self.rejected = Counter(
            f"{prefix}:requests_rejected",
            "Requests refused because the queue was full.",
            ("model_name",),
            registry=self._registry,
        ).labels(model_name)
        self._up = self._gauge("engine_up", "1 while the engine serves.")
        self._mirror = EngineMirror(prefix, model_name, by_proposer=prefix != VLLM_PREFIX)
        self._registry.register(self._mirror)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"{self._prefix}:{name}",
            help,
            ("model_name",),
            buckets=buckets,
            registry=self._registry,
        ).labels(self._model)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(
            f"{self._prefix}:{name}", help, ("model_name",), registry=self._registry
        ).labels(self._model)

    def observe_request(self, seconds: float, reason: str) -> None:
        """The time from a request's arrival to its end, and its finish reason."""
        self._request.observe(seconds)
        self._finished.labels(self._model, reason).inc()

    def render(self, stats: EngineStats | None, client: EngineClient) -> bytes:
        """The metrics as :data:`CONTENT_TYPE`.

        Args:
            stats: the engine's latest snapshot; None where it could not be had, which keeps what
                was known.
            client: its state and restarts.
        """
        self._up.set(stats is not None and client.state in ("ready", "draining"))
        self._mirror.update(stats, client.num_restarts)
        return generate_latest(self._registry)
