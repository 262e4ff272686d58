"""The engine's counters as Prometheus metrics.

Owns their names, labels and meaning, and that they never fall: an engine that was started again
counts from zero, and what its predecessors counted is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from paceline.request.engine_stats import EngineStats

WIDTH_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
Labels = tuple[str, ...]
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)
Samples = Iterable[tuple[Labels, float]]


@dataclass(frozen=True, slots=True)
class Count:
    """A counter: its name without prefix, what it counts, its labels, and how to read it."""

    name: str
    help: str
    read: Callable[[EngineStats], Samples]
    labels: Labels = ()


def _one(path: str) -> Callable[[EngineStats], Samples]:
    """Of an attribute, perhaps of an attribute, of the statistics."""
    read = attrgetter(path)
    return lambda stats: [((), read(stats))]


def _each_proposer(name: str) -> Callable[[EngineStats], Samples]:
    """Of an attribute of each proposer's counters."""
    read = attrgetter(name)
    return lambda stats: [((key,), read(own)) for key, own in stats.speculation.by_proposer.items()]


def _accepted_per_pos(stats: EngineStats) -> Samples:
    for name, own in stats.speculation.by_proposer.items():
        for position, count in enumerate(own.num_accepted_tokens_per_pos):
            yield (name, str(position)), count


def _total_per_pos(stats: EngineStats) -> Samples:
    for position, count in enumerate(stats.speculation.num_accepted_tokens_per_pos):
        yield (str(position),), count


DRAFTS = ("spec_decode_num_drafts", "Drafts that were verified.")
DRAFT_TOKENS = ("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
ACCEPTED = ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
PER_POS = (
    "spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens that were accepted, by position in the draft from 0.",
)
TOTALS = (
    Count(*DRAFTS, _one("speculation.num_drafts")),
    Count(*DRAFT_TOKENS, _one("speculation.num_draft_tokens")),
    Count(*ACCEPTED, _one("speculation.num_accepted_tokens")),
    Count(*PER_POS, _total_per_pos, ("position",)),
)
BY_PROPOSER = (
    Count(*DRAFTS, _each_proposer("num_drafts"), ("proposer",)),
    Count(*DRAFT_TOKENS, _each_proposer("num_draft_tokens"), ("proposer",)),
    Count(*ACCEPTED, _each_proposer("num_accepted_tokens"), ("proposer",)),
    Count(*PER_POS, _accepted_per_pos, ("proposer", "position")),
)
PLAIN = (
    (
        "spec_decode_num_steps",
        "Verify steps: one per request and step that emitted tokens.",
        "speculation.num_steps",
    ),
    (
        "spec_decode_num_draft_steps",
        "Verify steps with a draft; one of several proposers is one.",
        "speculation.num_drafts",
    ),
    (
        "spec_decode_num_pruned_tokens",
        "Draft tokens that the planner left out.",
        "speculation.num_pruned_tokens",
    ),
    (
        "spec_decode_realised_tokens",
        "Tokens that the verify steps emitted.",
        "speculation.num_emitted_tokens",
    ),
    ("prompt_tokens", "Prompt tokens.", "num_prompt_tokens"),
    ("generation_tokens", "Tokens that were generated.", "num_output_tokens"),
    (
        "prefix_cache_queries",
        "Tokens that were looked for in the prefix cache.",
        "num_queried_tokens",
    ),
    ("prefix_cache_hits", "Tokens that the prefix cache had.", "num_cached_tokens"),
    ("num_preemptions", "Requests sent back to wait.", "num_preemptions"),
    ("target_forwards", "Forwards of the target.", "num_target_forwards"),
    ("draft_forwards", "Forwards of draft models.", "num_draft_forwards"),
    (
        "experts_read",
        "Experts of layers that the target's forwards read, once per forward.",
        "num_experts_read",
    ),
    (
        "experts_fetched",
        "Those of them that were not in memory and were read from disk.",
        "num_experts_fetched",
    ),
    (
        "weight_bytes_read",
        "Bytes of weights that were read from disk, because they do not stay in memory.",
        "num_weight_bytes_read",
    ),
    (
        "weight_wait_seconds",
        "Seconds that forwards waited for weights from disk.",
        "weight_wait_seconds",
    ),
    (
        "proposer_failures",
        "Drafts that were lost because a proposer failed.",
        "num_proposer_failures",
    ),
)
COUNTS = (
    *(Count(name, help, _one(path)) for name, help, path in PLAIN),
    Count(
        "spec_decode_expected_tokens",
        "Tokens that the planner expected of the verify steps.",
        lambda s: [((), s.speculation.num_steps + s.expected_accepted_tokens)],
    ),
    Count(
        "step_seconds",
        "Time of the engine's steps, by phase.",
        lambda s: [((phase,), seconds) for phase, seconds in s.seconds.items()],
        ("phase",),
    ),
)
WIDTHS = Count(
    "step_rows",
    "Rows of the steps in which all requests decode: the width that the planner chose.",
    lambda s: [((str(rows),), steps) for rows, steps in s.decode_steps_by_rows.items()],
    ("rows",),
)
GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests in the batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests that wait for a place.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV cache in use; 1 is all of it.",
        lambda s: s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else 0.0,
    ),
)
CACHE_CONFIG = (
    "cache_config_info",
    "Always 1: the KV cache's tokens per block and number of blocks are labels.",
    "block_size",
    "num_gpu_blocks",  # vLLM's name, by which routers look for it; here they are in any memory
)


class ModelCounts:
    """The latest snapshot of a model's engine, on top of what its earlier engines counted.

    Attributes:
        totals: by the counters' names.
        gauges: by their names.
        restarts: engines that were started after a crash.
        cache_config: the labels' values of :data:`CACHE_CONFIG`; None before they are known.
    """

    def __init__(self, counts: Iterable[Count]) -> None:
        self._counts = tuple(counts)
        self.totals: dict[str, dict[Labels, float]] = {c.name: {} for c in self._counts}
        self._before: dict[str, dict[Labels, float]] = {c.name: {} for c in self._counts}
        self.gauges = {name: 0.0 for name, _, _ in GAUGES}
        self.restarts = 0
        self.cache_config: Labels | None = None
        self._life = (0, 1)

    def update(self, stats: EngineStats | None, restarts: int, num_loads: int = 1) -> None:
        """Take a snapshot in; None where there is none."""
        self.restarts = restarts
        if (restarts, num_loads) != self._life:
            self._life = restarts, num_loads
            self._before = {name: dict(totals) for name, totals in self.totals.items()}
        if stats is None:
            return
        for count in self._counts:
            before, totals = self._before[count.name], self.totals[count.name]
            for labels, value in count.read(stats):
                # A snapshot may be older than the one before it, where an engine did not answer.
                total = before.get(labels, 0.0) + value
                totals[labels] = max(totals.get(labels, 0.0), total)
        self.gauges = {name: read(stats) for name, _, read in GAUGES}


class EngineMirror(Collector):
    """The counters of all models' engines.

    Args:
        by_proposer: give the speculation counters a label ``proposer``; otherwise they are totals.
    """

    def __init__(self, prefix: str, *, by_proposer: bool) -> None:
        self._prefix = prefix
        self._counts = (*(BY_PROPOSER if by_proposer else TOTALS), *COUNTS)
        self._models: dict[str, ModelCounts] = {}

    def model(self, name: str) -> ModelCounts:
        """The counters of another model."""
        return self._models.setdefault(name, ModelCounts((*self._counts, WIDTHS)))

    def collect(self) -> Iterator[Metric]:
        models = self._models.items()
        for count in self._counts:
            counter = self._family(CounterMetricFamily, count.name, count.help, *count.labels)
            for model, own in models:
                for labels, value in own.totals[count.name].items():
                    counter.add_metric((model, *labels), value)
            yield counter
        for name, help, _ in GAUGES:
            gauge = self._family(GaugeMetricFamily, name, help)
            for model, own in models:
                gauge.add_metric((model,), own.gauges[name])
            yield gauge
        restarts = self._family(
            CounterMetricFamily, "engine_restarts", "Engines started after a crash."
        )
        widths = self._family(HistogramMetricFamily, WIDTHS.name, WIDTHS.help)
        config = self._family(GaugeMetricFamily, *CACHE_CONFIG)
        for model, own in models:
            if own.cache_config is not None:
                config.add_metric((model, *own.cache_config), 1)
            restarts.add_metric((model,), own.restarts)
            widths.add_metric((model,), *_widths(own.totals[WIDTHS.name]))
        yield from (config, restarts, widths)

    def _family(self, kind: type[Family], name: str, help: str, *labels: str) -> Family:
        return kind(f"{self._prefix}:{name}", help, labels=("model_name", *labels))


def _widths(totals: dict[Labels, float]) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum of a histogram."""
    steps = {int(rows): count for (rows,), count in totals.items()}
    buckets = [
        (str(float(bound)), sum(count for rows, count in steps.items() if rows <= bound))
        for bound in WIDTH_BUCKETS
    ]
    total = sum(rows * count for rows, count in steps.items())
    return [*buckets, ("+Inf", sum(steps.values()))], total
