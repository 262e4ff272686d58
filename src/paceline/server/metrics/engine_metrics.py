"""The engine's counters as Prometheus metrics.

Owns their names, labels and meaning, and that they never fall: an engine that was started again
counts from zero, and what its predecessors counted is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

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
Read = Callable[[Any], Samples]
"""Of the engine's statistics, or of a proposer's counters."""


@dataclass(frozen=True, slots=True)
class Count:
    """A counter or gauge: its name without prefix, its help, how to read it, and its labels."""

    name: str
    help: str
    read: Read
    labels: Labels = ()
    is_gauge: bool = False


def _one(path: str) -> Read:
    """Of an attribute, perhaps of an attribute, of what is counted."""
    read = attrgetter(path)
    return lambda counted: [((), read(counted))]


def _of_drafts(name: str, help: str, read: Read, *labels: str, by_proposer: bool) -> Count:
    """A counter of each proposer, with a label for it, or of all together."""
    if not by_proposer:
        return Count(name, help, lambda stats: read(stats.speculation), labels)

    def read_each(stats: EngineStats) -> Samples:
        for proposer, own in stats.speculation.by_proposer.items():
            yield from (((proposer, *values), count) for values, count in read(own))

    return Count(name, help, read_each, ("proposer", *labels))


DRAFTS: tuple[tuple[str, str, Read, *tuple[str, ...]], ...] = (
    ("spec_decode_num_drafts", "Drafts that were verified.", _one("num_drafts")),
    (
        "spec_decode_num_draft_tokens",
        "Draft tokens that were verified.",
        _one("num_draft_tokens"),
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        _one("num_accepted_tokens"),
    ),
    (
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were accepted, by position in the draft from 0.",
        lambda own: [
            ((str(position),), count)
            for position, count in enumerate(own.num_accepted_tokens_per_pos)
        ],
        "position",
    ),
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
    Count("num_requests_running", "Requests in the batch.", _one("num_running"), is_gauge=True),
    Count(
        "num_requests_waiting",
        "Requests that wait for a place.",
        _one("num_waiting"),
        is_gauge=True,
    ),
    Count(
        "kv_cache_usage_perc",
        "Share of the KV cache in use; 1 is all of it.",
        lambda s: [((), s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else 0.0)],
        is_gauge=True,
    ),
)
WIDTHS = Count(
    "step_rows",
    "Rows of the steps in which all requests decode: the width that the planner chose.",
    lambda s: [((str(rows),), steps) for rows, steps in s.decode_steps_by_rows.items()],
    ("rows",),
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
        values: by the names of counters and gauges, then by their labels.
        restarts: engines that were started after a crash.
        cache_config: the labels' values of :data:`CACHE_CONFIG`; None before they are known.
    """

    def __init__(self, counts: Iterable[Count]) -> None:
        self._counts = tuple(counts)
        self.values: dict[str, dict[Labels, float]] = {
            count.name: {(): 0.0} if count.is_gauge else {} for count in self._counts
        }
        self._before: dict[str, dict[Labels, float]] = {}
        self.restarts = 0
        self.cache_config: Labels | None = None
        self._life = (0, 1)

    def update(self, stats: EngineStats | None, restarts: int, num_loads: int = 1) -> None:
        """Take a snapshot in; None where there is none."""
        self.restarts = restarts
        if (restarts, num_loads) != self._life:
            self._life = restarts, num_loads
            self._before = {name: dict(values) for name, values in self.values.items()}
        for count in () if stats is None else self._counts:
            values = self.values[count.name]
            before = {} if count.is_gauge else self._before.get(count.name, {})
            for labels, value in count.read(stats):
                total = before.get(labels, 0.0) + value
                # A snapshot may be older than the one before it, where an engine did not answer.
                least = 0.0 if count.is_gauge else values.get(labels, 0.0)
                values[labels] = max(least, total)


class EngineMirror(Collector):
    """The counters of all models' engines.

    Args:
        by_proposer: give the speculation counters a label ``proposer``; otherwise they are totals.
    """

    def __init__(self, prefix: str, *, by_proposer: bool) -> None:
        self._prefix = prefix
        self._counts = (*(_of_drafts(*each, by_proposer=by_proposer) for each in DRAFTS), *COUNTS)
        self._models: dict[str, ModelCounts] = {}

    def model(self, name: str) -> ModelCounts:
        """The counters of another model."""
        return self._models.setdefault(name, ModelCounts((*self._counts, WIDTHS)))

    def collect(self) -> Iterator[Metric]:
        models = self._models.items()
        for count in self._counts:
            kind: Any = GaugeMetricFamily if count.is_gauge else CounterMetricFamily
            family = self._family(kind, count.name, count.help, *count.labels)
            for model, own in models:
                for labels, value in own.values[count.name].items():
                    family.add_metric((model, *labels), value)
            yield family
        restarts = self._family(
            CounterMetricFamily, "engine_restarts", "Engines started after a crash."
        )
        widths = self._family(HistogramMetricFamily, WIDTHS.name, WIDTHS.help)
        config = self._family(GaugeMetricFamily, *CACHE_CONFIG)
        for model, own in models:
            if own.cache_config is not None:
                config.add_metric((model, *own.cache_config), 1)
            restarts.add_metric((model,), own.restarts)
            widths.add_metric((model,), *_widths(own.values[WIDTHS.name]))
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
