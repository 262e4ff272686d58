"""What a wide step costs the steps after it: forwards of one row with a wide one now and then.

The planner knows what a step of so many rows takes, and nothing of what it leaves behind. Patterns
take turns: only narrow steps, and one wide step in every ``PERIOD``. Between forwards the host is
busy for as long as in an engine. Reports medians by place in the period.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from harness import arguments, note
from report import Report

from paceline import LLM
from paceline.request.span import Span

PERIOD = 40
WIDTHS = (1, 4, 8, 16)
CONTEXT = 64
HOST_MS = 0.15
REQUEST = 1 << 30


def measure(engine: Any, repetitions: int) -> dict[int, list[list[float]]]:
    """Milliseconds by width of the wide step and place in the period."""
    runner, kv = engine.runner, engine.runner.kv
    kv.open(REQUEST)
    kv.reserve(REQUEST, CONTEXT + max(WIDTHS))
    runner.forward(runner.pack([Span.chunk(REQUEST, 0, [7] * CONTEXT, True)]))
    kv.commit(REQUEST, range(CONTEXT))
    kv.reserve(REQUEST, max(WIDTHS))

    def forward(rows: int) -> float:
        span = Span(REQUEST, CONTEXT, [9] * rows, range(-1, rows - 1), range(rows))
        batch, began = runner.pack([span]), time.perf_counter()
        runner.forward(batch, greedy=True)
        ended = time.perf_counter()
        while time.perf_counter() < ended + HOST_MS / 1e3:
            pass
        return (ended - began) * 1e3

    found: dict[int, list[list[float]]] = {w: [[] for _ in range(PERIOD)] for w in WIDTHS}
    for repetition in range(repetitions):
        for width in WIDTHS:
            times = [forward(width if at == 0 else 1) for at in range(PERIOD)]
            for at, ms in enumerate(times):
                if repetition:  # the first one begins with cold caches
                    found[width][at].append(ms)
    kv.free(REQUEST)
    return found


def rows_of(found: dict[int, list[list[float]]]) -> list[dict[str, Any]]:
    plain = median(ms for place in found[1] for ms in place)
    rows = []
    for width, places in found.items():
        medians = [median(place) for place in places]
        rows.append(
            {
                "width": width,
                "ms": medians[0],
                "extra_ms": medians[0] - plain,
                "after_ms": sum(ms - plain for ms in medians[1:]),
                "first_after_ms": medians[1],
                "plain_ms": plain,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.sized("--repeat", 25, 3, "of each pattern")
    options = parser.parse_args(argv)
    with LLM(options.model, speculative_config=[], max_model_len=512) as llm:
        found = llm._thread.call(lambda engine: measure(engine, options.repeat))
    report = Report("aftermath", {"model": options.model, "period": PERIOD, "host_ms": HOST_MS})
    report.samples = [{"width": w, "ms_by_place": places} for w, places in found.items()]
    report.results = rows_of(found)
    for row in report.results:
        note(", ".join(f"{key} {value:.2f}" for key, value in row.items()))
    return report.finish(options, [])


if __name__ == "__main__":
    sys.exit(main())
