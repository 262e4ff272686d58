"""Prometheus metrics of what HTTP observes, by model, and when the pieces of an answer come.

Names follow the field's, under ``paceline:``; times have the names of OpenTelemetry's conventions
for generative AI too, which are those of ``docs/gen-ai/gen-ai-metrics.md`` in
semantic-conventions-genai (commit 004902b8), as Prometheus spells them: dots become underscores,
and the unit ends the name. Which counters an engine has is
:mod:`paceline.server.metrics.engine_metrics`' matter. Knows no engine and no format.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline.request.engine_stats import EngineStats
from paceline.server.engine_process.client import EngineClient
from paceline.server.engine_process.messages import Piece
from paceline.server.http.sse import Deadline
from paceline.server.metrics.engine_metrics import EngineMirror

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
Operation = Literal["chat", "text_completion", "embeddings"]
PROVIDER = "paceline"
GEN_AI_REQUEST_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GEN_AI_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_OUTPUT_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
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
        self.gen_ai_request = self._gen_ai(
            "request_duration",
            "Arrival to last token.",
            GEN_AI_REQUEST_BUCKETS,
            "error_type",
        )
        self.gen_ai_first_token = self._gen_ai(
            "time_to_first_token",
            "Arrival to first token, of answers that succeeded.",
            GEN_AI_FIRST_TOKEN_BUCKETS,
        )
        self.gen_ai_output_token = self._gen_ai(
            "time_per_output_token",
            "Time per token after the first, of answers that succeeded.",
            GEN_AI_OUTPUT_TOKEN_BUCKETS,
        )
        self.mirror = EngineMirror(prefix, by_proposer=prefix != VLLM_PREFIX)
        self._registry.register(self.mirror)
        is_vllm = prefix == VLLM_PREFIX
        self._told: Collector = _EarlierNames(self._registry) if is_vllm else self._registry

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return self._made(Histogram, name, help, buckets=buckets)

    def _made(self, kind: type[Made], name: str, help: str, *labels: str, **more: Any) -> Made:
        labels = ("model_name", *labels)
        return kind(f"{self._prefix}:{name}", help, labels, registry=self._registry, **more)

    def _gen_ai(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """A histogram under its name in OpenTelemetry's conventions."""
        full, labels = f"gen_ai_server_{name}_seconds", (*_GEN_AI_LABELS, *labels)
        return Histogram(full, help, labels, registry=self._registry, buckets=buckets)

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
        dropped: counter of requests that ended because too much of their answers waited.
    """

    def __init__(self, server: ServerMetrics, model_name: str = "") -> None:
        self.first_token = server.first_token.labels(model_name)
        self.token_gap = server.token_gap.labels(model_name)
        self.rejected = server.rejected.labels(model_name)
        self._server, self._model = server, model_name
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

    def observe_gen_ai_request(self, operation: Operation, seconds: float, error_type: str) -> None:
        """A prompt's answers have ended; without an ``error_type`` they succeeded."""
        labels = operation, PROVIDER, self._model, error_type
        self._server.gen_ai_request.labels(*labels).observe(seconds)

    def observe_gen_ai_first_token(self, operation: Operation, seconds: float) -> None:
        labels = operation, PROVIDER, self._model
        self._server.gen_ai_first_token.labels(*labels).observe(seconds)

    def observe_gen_ai_output_tokens(
        self, operation: Operation, seconds: float, count: int
    ) -> None:
        """``count`` tokens after a sample's first one took so many seconds."""
        labels = operation, PROVIDER, self._model
        self._server.gen_ai_output_token.labels(*labels).observe(seconds / count)

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


SUCCESSES = ("stop", "length")
"""Reasons with which an answer is whole."""


@dataclass(slots=True)
class _SampleTimes:
    """When a sample's pieces came, how many tokens they had, and why it ended, once it has."""

    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    reason: str | None = None


class AnswerTimes:
    """Times of the answers to a request's prompts, told to the metrics, and how they ended.

    Args:
        is_stream: each piece is an event for the client; of an answer in one body the gap between
            two tokens is told, on average.
        now: seconds as ``deadline`` counts them; default: :func:`time.monotonic`.
    """

    def __init__(
        self,
        metrics: ModelMetrics,
        operation: Operation,
        num_prompts: int,
        num_samples: int,
        deadline: Deadline,
        is_stream: bool = True,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._metrics = metrics
        self._operation: Operation = operation
        self._deadline = deadline
        self._now = now or time.monotonic
        self._is_stream = is_stream
        self._num_samples = num_samples
        self._samples = [_SampleTimes() for _ in range(num_prompts * num_samples)]
        self._num_open = [num_samples] * num_prompts
        self._reasons = ["abort"] * num_prompts

    def observe(self, piece: Piece) -> None:
        at, sample = self._now(), self._samples[piece.sample]
        if sample.first is None:
            sample.first = at
            self._metrics.first_token.observe(at - self._deadline.began)
        else:
            count = 1 if self._is_stream else max(1, len(piece.token_ids))
            self._metrics.token_gap.observe((at - sample.last) / count)
        sample.last = at
        sample.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            sample.reason = piece.finish_reason
            prompt = piece.sample // self._num_samples
            self._num_open[prompt] -= 1
            if not self._num_open[prompt]:
                self._end(prompt, piece.finish_reason)

    def _end(self, prompt: int, reason: str) -> None:
        """All samples of the prompt have ended."""
        self._reasons[prompt] = reason
        if self._operation != "embeddings":
            self._tell_tokens(self._samples[prompt * self._num_samples :][: self._num_samples])

    def _tell_tokens(self, samples: list[_SampleTimes]) -> None:
        """The times of a prompt's tokens, where its samples succeeded."""
        metrics, operation = self._metrics, self._operation
        firsts = list[float]()
        for sample in samples:
            if sample.reason not in SUCCESSES or sample.first is None:
                continue
            firsts.append(sample.first)
            if sample.num_tokens > 1:
                seconds = sample.last - sample.first
                metrics.observe_gen_ai_output_tokens(operation, seconds, sample.num_tokens - 1)
        if firsts:
            metrics.observe_gen_ai_first_token(operation, min(firsts) - self._deadline.began)

    def close(self, has_failed: bool) -> None:
        """Tell that the answers have ended; one that was complete before a failure stays so."""
        at = self._now()
        has_failed = has_failed or self._deadline.is_over(at)
        seconds = at - self._deadline.began
        for num_open, reason in zip(self._num_open, self._reasons, strict=True):
            ended_by = "error" if has_failed and num_open else reason
            self._metrics.observe_request(seconds, ended_by)
            error_type = "" if ended_by in SUCCESSES else ended_by
            self._metrics.observe_gen_ai_request(self._operation, seconds, error_type)
