"""What ``paceline bench serve`` says: vLLM's rows, a table for two servers, and JSON.

A figure that a run does not have is in no row. Knows no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from paceline.cli.terminal import printable, table
from paceline.core.errors import ConfigError
from paceline_lab.bench.figures import DETAILED_KEYS, parse_goodput, percentile_name
from paceline_lab.bench.options import BenchServeOptions
from paceline_lab.bench.runs import Comparison, ServerArm

WIDTH, LABEL = 50, 40
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_COUNTS = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Peak concurrent requests", "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)
_SPECULATION = (
    ("Acceptance rate (%)", "spec_decode_acceptance_rate"),
    ("Acceptance length", "spec_decode_acceptance_length"),
    ("Drafts", "spec_decode_num_drafts"),
    ("Draft tokens", "spec_decode_draft_tokens"),
    ("Accepted tokens", "spec_decode_accepted_tokens"),
)
_RATIOS = {
    "output_throughput": ("Output tokens per second", 1.0),
    "ttft": ("TTFT (ms)", 1e3),
    "tpot": ("TPOT (ms)", 1e3),
    "e2el": ("E2EL (ms)", 1e3),
}
SHOWN = 10
"""Reasons of failures, and prompts that differ; the rest is in the file."""
_SETTINGS = (
    *("backend", "dataset_name", "trace_path", "temperature", "seed"),
    *("burstiness", "max_concurrency"),
)
"""Options that the document has under their own names."""


def percentiles(options: BenchServeOptions) -> list[float]:
    """The percentiles to report; ``ConfigError`` where they are none."""
    text = options.metric_percentiles
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= each <= 100 for each in numbers):
        raise ConfigError(f"--metric-percentiles is {text!r}; write numbers like 50,90,99")
    return numbers


def goodput(options: BenchServeOptions) -> dict[str, float]:
    """The limits in milliseconds, also where several stand in one value."""
    return parse_goodput(" ".join(options.goodput or ()).replace(",", " ").split())


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that was measured; ``counter`` says how prompts were, when they were made."""

    options: BenchServeOptions
    arm: ServerArm
    counter: str
    comparison: Comparison | None = None
    date: datetime = field(default_factory=datetime.now)

    @property
    def arms(self) -> list[ServerArm]:
        return [self.arm] if self.comparison is None else [self.arm, self.comparison.theirs]

    def figures(self, arm: ServerArm) -> dict[str, Any]:
        """An arm's figures under vLLM's keys."""
        return arm.figures(percentiles(self.options), goodput(self.options))

    def document(self) -> dict[str, Any]:
        """What is saved: settings, figures, and the other arm under ``comparison``."""
        options, rate = self.options, self.options.request_rate
        document = {
            "date": self.date.strftime("%Y%m%d-%H%M%S"),
            "tokenizer_id": self.counter,
            "num_prompts": len(self.arm.outcomes),
            "request_rate": "inf" if math.isinf(rate) else rate,
            **{name: getattr(options, name) for name in _SETTINGS},
            **self._kept(self.arm),
        }
        if self.comparison is not None:
            document["comparison"] = self._comparison(self.comparison)
        return document

    def _kept(self, arm: ServerArm) -> dict[str, Any]:
        target, dropped = arm.target, () if self.options.save_detailed else DETAILED_KEYS
        return {
            "base_url": target.url,
            "model_id": target.model,
            "extra_body": target.extra_body,
            **{name: each for name, each in self.figures(arm).items() if name not in dropped},
        }

    def _comparison(self, comparison: Comparison) -> dict[str, Any]:
        return {
            "figures": self._kept(comparison.theirs),
            "block": comparison.block,
            "prefix_cache_flushed": comparison.flushed,
            "ratios": {name: asdict(ratio) for name, ratio in comparison.ratios().items()},
            "texts_compared": len(comparison.pairs),
            "texts_differing": comparison.differing,
        }

    def lines(self) -> Iterator[str]:
        """Each arm's rows, then what the comparison says."""
        names = ("first", "second") if self.comparison else ("Serving Benchmark Result",)
        for name, arm in zip(names, self.arms, strict=True):
            title = f"{name}: {arm.target.url}" if self.comparison else name
            yield f" {title} ".center(WIDTH, "=")
            yield from self._rows(self.figures(arm))
            yield "=" * WIDTH
        if self.comparison is not None:
            yield from comparison_lines(self.comparison)

    def _rows(self, figures: Mapping[str, Any]) -> Iterator[str]:
        yield from (_row(name, figures[key]) for name, key in _COUNTS if figures[key] is not None)
        reasons = list(figures["failure_reasons"].items())
        yield from (f"  {count} x {printable(reason)}" for reason, count in reasons[:SHOWN])
        if len(reasons) > SHOWN:
            yield f"  and {len(reasons) - SHOWN} other reasons"
        for metric, title in _TITLES.items():
            yield title.center(WIDTH, "-")
            for key in ("mean", "median", *map(percentile_name, percentiles(self.options))):
                value = figures[f"{key.lower()}_{metric}_ms"]
                name = f"{key.capitalize()} {metric.upper()} (ms)"
                yield _row(name, "-" if value is None else value)
        if "spec_decode_num_drafts" in figures:
            yield "Speculative Decoding".center(WIDTH, "-")
            yield from (_row(name, figures[key]) for name, key in _SPECULATION)
            for place, rate in enumerate(figures["spec_decode_per_position_acceptance_rates"]):
                yield _row(f"Acceptance at position {place} (%)", 100 * rate)


def _row(name: str, value: float | str) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<{LABEL}} {shown}"


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Medians side by side, their ratio, and whether the answers are the same."""
    rows = []
    for name, ratio in comparison.ratios().items():
        title, scale = _RATIOS[name]
        ours, theirs = (f"{median * scale:.2f}" for median in (ratio.ours, ratio.theirs))
        rows.append(
            {
                "median": title,
                "first": ours,
                "second": theirs,
                "first / second": f"{ratio.value:.3f}",
                "95 % interval": ratio.interval,
                "pairs": str(ratio.num_pairs),
            }
        )
    if rows:
        yield table(rows)
    pairs, differing = len(comparison.pairs), comparison.differing
    if not pairs:
        yield "no request was completed by both"
    elif differing:
        shown = ", ".join(map(str, differing[:SHOWN]))
        more = ", ..." if len(differing) > SHOWN else ""
        yield f"DIFFERENT text for {len(differing)} of {pairs} prompts: {shown}{more}"
    else:
        yield f"the same text for all of {pairs} prompts"
    for arm, flushed in zip((comparison.ours, comparison.theirs), comparison.flushed, strict=True):
        if not flushed:
            yield f"{arm.target.url} cannot flush its prefix cache: prompts may have been in it"
