"""How ``paceline bench serve`` looks on a terminal: vLLM's rows, and a table for two arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.commands.bench_result import Result, percentiles, shown_metrics
from paceline.commands.display import printable, table
from paceline.workbench.serving.compare import Comparison
from paceline.workbench.serving.figures import percentile_name
from paceline.workbench.serving.ratios import Ratio

WIDTH, LABEL = 50, 40
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_COUNTS = (
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


def view(result: Result) -> Iterator[str]:
    """All lines: each arm's rows, then what the comparison says."""
    names = ("Serving Benchmark Result",) if result.comparison is None else ("first", "second")
    for name, arm in zip(names, result.arms, strict=True):
        title = name if result.comparison is None else f"{name}: {arm.target.url}"
        yield _ruled(f" {title} ", "=")
        yield from _rows(result, result.figures(arm))
        yield "=" * WIDTH
    if result.comparison is not None:
        yield from comparison_lines(result.comparison)


def _rows(result: Result, figures: Mapping[str, Any]) -> Iterator[str]:
    options = result.options
    yield _row("Successful requests", figures["completed"])
    yield _row("Failed requests", figures["failed"])
    reasons = list(figures["failure_reasons"].items())
    yield from (f"  {count} x {printable(reason)}" for reason, count in reasons[:SHOWN])
    if len(reasons) > SHOWN:
        yield f"  and {len(reasons) - SHOWN} other reasons"
    if options.max_concurrency is not None:
        yield _row("Maximum request concurrency", options.max_concurrency)
    if options.request_rate != float("inf"):
        yield _row("Request rate configured (RPS)", options.request_rate)
    yield from (_row(name, figures[key]) for name, key in _COUNTS if figures[key] is not None)
    for metric in shown_metrics(options):
        yield _ruled(_TITLES[metric], "-")
        for key in ("mean", "median", *map(percentile_name, percentiles(options))):
            value = figures[f"{key.lower()}_{metric}_ms"]
            yield _row(f"{key.capitalize()} {metric.upper()} (ms)", "-" if value is None else value)
    if "spec_decode_num_drafts" in figures:
        yield _ruled("Speculative Decoding", "-")
        yield from (_row(name, figures[key]) for name, key in _SPECULATION)
        rates = figures["spec_decode_per_position_acceptance_rates"]
        if rates:
            yield "Per-position acceptance (%):"
        for place, rate in enumerate(rates):
            yield _row(f"  Position {place}", 100 * rate)


def _ruled(title: str, character: str) -> str:
    return title.center(WIDTH, character)


def _row(name: str, value: float | str) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<{LABEL}} {shown}"


def comparison_lines(found: Comparison) -> Iterator[str]:
    """Medians side by side, their ratio, and whether the answers are the same."""
    ratios = found.ratios()
    if ratios:
        headers = ("median", "first", "second", "first / second", "95 % interval", "pairs")
        yield table(headers, [_ratio_cells(name, each) for name, each in ratios.items()])
    pairs, differing = len(found.pairs), found.differing
    if not pairs:
        yield "no request was completed by both"
    elif differing:
        shown = ", ".join(map(str, differing[:SHOWN]))
        more = ", ..." if len(differing) > SHOWN else ""
        yield f"DIFFERENT text for {len(differing)} of {pairs} prompts: {shown}{more}"
    else:
        yield f"the same text for all of {pairs} prompts"
    for arm, flushed in zip((found.ours, found.theirs), found.flushed, strict=True):
        if not flushed:
            yield f"{arm.target.url} cannot flush its prefix cache: prompts may have been in it"


def _ratio_cells(name: str, ratio: Ratio) -> list[str]:
    title, scale = _RATIOS[name]
    return [
        title,
        f"{ratio.ours * scale:.2f}",
        f"{ratio.theirs * scale:.2f}",
        f"{ratio.value:.3f}",
        ratio.interval,
        str(ratio.num_pairs),
    ]
