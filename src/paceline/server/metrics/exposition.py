"""Prometheus metrics of a server, by model: what HTTP observes, and the engines' counters.

Owns the names' prefix and the histograms of times; which counters an engine has is
:mod:`paceline.server.metrics.engine_metrics`' matter. Names follow the field's, under
``paceline:``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline.request.metrics import EngineStats
from paceline.server.engine_process.client import EngineClient
from paceline.server.metrics.engine_metrics import EngineMirror
from paceline.server.metrics.gen_ai_metrics import GenAiMetrics, GenAiTimes

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
Made = TypeVar("Made", Counter, Gauge, Histogram)
EARLIER_NAMES = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
"""Names that vLLM's metrics had before 0.11, which rules and routers made for it still ask for."""
REASONS = ("stop", "length", "abort", "error")
"""Reasons that are exported from the start; others appear when they first happen."""


class ServerMetrics:
    """The metrics of one server, with a label for the model.

    Args:
        prefix: of every name. Under ``vllm`` the speculation counters are totals without the label
            ``proposer``, as dashboards for vLLM expect them, and :data:`EARLIER_NAMES` hold too.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self.token_gap = self._histogram(
            "inter_token_latency_seconds", "Between two pieces of an answer.", TOKEN_GAP_BUCKETS
        )
        self.request = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS
        )
        self.finished = self._made(
            Counter, "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self.rejected = self._made(
            Counter, "requests_rejected", "Requests refused because the queue was full."
        )
        self.dropped = self._made(
            Counter,
            "requests_dropped",
            "Requests that ended because too much of them waited.",
        )
        self.up = self._made(Gauge, "engine_up", "1 while the engine serves.")
        self.gen_ai = GenAiMetrics(self._registry)
        self.mirror = EngineMirror(prefix, by_proposer=prefix != VLLM_PREFIX)
        self._registry.register(self.mirror)
        is_vllm = prefix == VLLM_PREFIX
        self._told: Collector = _EarlierNames(self._registry) if is_vllm else self._registry

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return self._made(Histogram, name, help, buckets=buckets)

    def _made(self, kind: type[Made], name: str, help: str, *labels: str, **more: Any) -> Made:
        labels = ("model_name", *labels)
        return kind(f"{self._prefix}:{name}", help, labels, registry=self._registry, **more)

    def render(self) -> bytes:
        """The metrics as :data:`CONTENT_TYPE`."""
        return generate_latest(self._told)


class _EarlierNames(Collector):
    """The metrics of a registry; those of :data:`EARLIER_NAMES` a second time, as those."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            stem = family.name.partition(":")[2]
            if stem in EARLIER_NAMES:
                name = f"{VLLM_PREFIX}:{EARLIER_NAMES[stem]}"
                earlier = Metric(name, family.documentation, family.type)
                earlier.samples = [
                    sample._replace(name=name + sample.name.removeprefix(family.name))
                    for sample in family.samples
                ]
                yield earlier


class ModelMetrics:
    """What is observed of one model. Observing takes microseconds and needs no ``await``.

    Attributes:
        first_token: histogram of the time from a request's arrival to its first token.
        token_gap: histogram of the time between two pieces of a sample, each of which its client
            gets as one event.
        rejected: counter of requests that were refused because the queue was full.
        gen_ai: the times under OpenTelemetry's names.
        dropped: counter of requests that ended because too much of their answers waited.
    """

    def __init__(self, server: ServerMetrics, model_name: str = "") -> None:
        self.first_token = server.first_token.labels(model_name)
        self.token_gap = server.token_gap.labels(model_name)
        self.rejected = server.rejected.labels(model_name)
        self.gen_ai = GenAiTimes(server.gen_ai, model_name)
        self.dropped = server.dropped.labels(model_name)
        self._request = server.request.labels(model_name)
        self._up = server.up.labels(model_name)
        self._finished = partial(server.finished.labels, model_name)
        for reason in REASONS:
            self._finished(reason)
        self._counts = server.mirror.model(model_name)

    def observe_request(self, seconds: float, reason: str) -> None:
        """The time from a request's arrival to its end, and its finish reason."""
        self._request.observe(seconds)
        self._finished(reason).inc()

    def take(self, stats: EngineStats | None, client: EngineClient, num_loads: int = 1) -> None:
        """Take over what the engine counted.

        Args:
            stats: the engine's latest snapshot; None where it could not be had, which keeps what
                was known.
        """
        self._up.set(stats is not None and client.state in ("ready", "draining"))
        self._counts.update(stats, client.num_restarts, num_loads)
        info = client.info
        self._counts.cache_config = str(info.block_size), str(info.kv_blocks_total)
