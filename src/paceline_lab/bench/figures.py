"""From outcomes to figures, under the keys of vLLM's benchmark. Failed requests are no samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError
from paceline_lab.bench.client import Outcome

METRICS: dict[str, Callable[[Outcome], list[float]]] = {
    "ttft": lambda outcome: [outcome.ttft],
    "tpot": lambda outcome: [outcome.tpot] if outcome.output_len > 1 else [],
    "itl": lambda outcome: outcome.itls,
    "e2el": lambda outcome: [outcome.latency],
}
"""The samples of a completed request, in seconds; an answer of one token has no TPOT."""
PER_REQUEST = ("ttft", "tpot", "e2el")
DETAILED_KEYS = (
    "input_lens",
    "output_lens",
    "start_times",
    "queue_times",
    "ttfts",
    "itls",
    "latencies",
    "generated_texts",
    "finish_reasons",
    "errors",
)
"""Lists with an entry per request."""


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds by metric, from ``ttft:200``.

    Raises:
        ConfigError: a pair is not one, or names no such metric.
    """
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in PER_REQUEST or not limits[name] >= 0:
            raise ConfigError(
                f"--goodput {pair!r} is not a limit; write METRIC:MILLISECONDS, where METRIC is "
                f"one of {', '.join(PER_REQUEST)}"
            )
    return limits


def figures_of(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float] = (99.0,),
    goodput: dict[str, float] | None = None,
) -> dict[str, Any]:
    """All figures of a run.

    Args:
        duration: seconds from the first request to the last answer.
        percentiles: which, beside mean, median and standard deviation.
        goodput: limits in milliseconds; requests within all of them are good.
    """
    done = [outcome for outcome in outcomes if not outcome.error]
    seconds = max(duration, 1e-9)
    inputs, outputs = sum(o.prompt_len for o in done), sum(o.output_len for o in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "failure_reasons": dict(Counter(o.error for o in outcomes if o.error).most_common()),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": _num_good(done, goodput) / seconds if goodput else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": peak_throughput(done),
        "max_concurrent_requests": peak_concurrency(done),
    }
    for metric, samples in METRICS.items():
        figures |= _statistics(metric, [s for o in done for s in samples(o)], percentiles)
    return figures | _details(outcomes)


def _num_good(outcomes: Sequence[Outcome], limits: dict[str, float]) -> int:
    """How many keep every limit."""
    return sum(
        all(s * 1e3 <= limit for name, limit in limits.items() for s in METRICS[name](outcome))
        for outcome in outcomes
    )


def _statistics(
    metric: str, samples: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """In milliseconds; None where there are no samples."""
    ms = np.array(samples) * 1e3
    named = {"mean": np.mean, "median": np.median, "std": np.std}
    statistics = {f"{name}_{metric}_ms": _or_none(function, ms) for name, function in named.items()}
    for each in percentiles:
        key = f"{percentile_name(each).lower()}_{metric}_ms"
        statistics[key] = _or_none(lambda values, q=each: np.percentile(values, q), ms)
    return statistics


def _or_none(function: Any, values: np.ndarray[Any, Any]) -> float | None:
    return float(function(values)) if len(values) else None


def percentile_name(percentile: float) -> str:
    """``P99``, ``P99.9``."""
    return f"P{percentile:g}"


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests that ran at one moment; one that ends as another starts is not beside it."""
    starts = [(outcome.start, 1) for outcome in outcomes]
    ends = [(outcome.start + outcome.latency, -1) for outcome in outcomes]
    running = np.cumsum([step for _, step in sorted([*starts, *ends])])
    return int(running.max(initial=0))


def peak_throughput(outcomes: Sequence[Outcome]) -> float:
    """Most output tokens within a second of the run; a text's share is the same for each."""
    times: list[float] = []
    weights: list[float] = []
    for outcome in outcomes:
        arrivals = outcome.start + outcome.ttft + np.cumsum([0.0, *outcome.itls])
        times += arrivals.tolist()
        weights += [outcome.output_len / len(arrivals)] * len(arrivals)
    if not times:
        return 0.0
    seconds = np.floor(np.array(times) - min(outcome.start for outcome in outcomes)).astype(int)
    return float(np.bincount(seconds, weights).max())


def _details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """The lists of :data:`DETAILED_KEYS`; what a failed request has no value for is None."""
    rows = [
        (o.prompt_len, o.output_len, o.start, o.queued, o.ttft, o.itls, o.latency, o.text)
        if not o.error
        else (o.prompt_len, 0, o.start, o.queued, None, [], None, "")
        for o in outcomes
    ]
    ends = [(outcome.finish_reason, outcome.error) for outcome in outcomes]
    columns = zip(*[(*row, *end) for row, end in zip(rows, ends, strict=True)], strict=True)
    return dict(zip(DETAILED_KEYS, map(list, columns), strict=True))
