"""The native linears: time, bandwidth and products per second over rows and shapes.

A sample is one call on rows of inputs that are ready, by all threads. Calls go round more copies of
the weights than the caches hold, so that every call reads them from memory, as a forward does. Few
rows are bound by memory and judged by ``GB/s`` beside the machine's read bandwidth; many rows are
bound by arithmetic and judged by ``GMAC/s``, or with ``--ghz`` by products per cycle and core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness import Report, Row, among, arguments, grid, note, numbers, table

import paceline._native as native
from paceline.tensors.quantised_blocks import row_bytes

ROWS = [1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 512]
SHAPES = ((4096, 1024), (1024, 3072), (1024, 1024), (32000, 1024))
KINDS = ("Q8_0", "Q4_K", "Q6_K", "Q4_0", "BF16")
OUT_OF_CACHE = 160_000_000  # bytes of weights that calls go round
SECONDS, QUICK_SECONDS = 1.0, 0.15  # per cell
PASSES = 3  # at least
BANDWIDTH_MEGABYTES = 512


def linears(kind: str, n: int, k: int) -> list[Any]:
    """Copies of one linear in a format of weights, more than fit the caches."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (n, row_bytes(kind, k)), dtype=np.uint8)
    rows &= 0xBB  # whatever bytes are a 16-bit float, they are a finite one
    packed = native.pack(kind, rows, k)
    copies = OUT_OF_CACHE // packed.nbytes + 2
    return [native.Linear([(kind, packed.copy(), n)], None, k) for _ in range(copies)]


def measure(copies: Sequence[Any], rows: int, seconds: float) -> list[float]:
    first = native.time_linears(copies, rows, 1)  # touches every page
    passes = max(PASSES, int(seconds / sum(first)))
    return list(native.time_linears(copies, rows, passes))


def run_shape(
    report: Report, kind: str, shape: tuple[int, int], options: argparse.Namespace
) -> None:
    copies = linears(kind, *shape)
    for rows in options.rows:
        label = {"kind": kind, "n": shape[0], "k": shape[1], "rows": rows}
        note(f"{kind} {shape[0]}x{shape[1]}: {rows} rows")
        times = measure(copies, rows, QUICK_SECONDS if options.quick else SECONDS)
        median = statistics.median(times)
        found = {"us": median * 1e6, "best_us": min(times) * 1e6, "calls": len(times)}
        found["gb_per_s"] = copies[0].nbytes / median / 1e9
        found["gmac_per_s"] = rows * shape[0] * shape[1] / median / 1e9
        report.samples.append({**label, "us": [round(each * 1e6, 1) for each in times]})
        report.results.append({**label, **found})


def tables(results: Sequence[Row], threads: int, ghz: float | None) -> list[str]:
    columns: list[Any] = [
        ("linear", lambda row: f"{row['kind']} {row['n']}x{row['k']}"),
        ("rows", "rows"),
        ("us", "us", 1),
        ("best us", "best_us", 1),
        ("GB/s", "gb_per_s", 1),
        ("GMAC/s", "gmac_per_s", 1),
    ]
    if ghz:
        columns.append(("MAC/cycle", lambda row: row["gmac_per_s"] / threads / ghz, 1))
    return [table(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--kinds", type=among(KINDS), default=list(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=native.isas(), help="level (default: the best)")
    parser.add_argument("--ghz", type=float, help="clock, to state products per cycle and core")
    options = parser.parse_args(argv)
    native.set_threads(options.threads)
    if options.isa:
        native.set_isa(options.isa)
    bandwidth = native.bandwidth(BANDWIDTH_MEGABYTES)
    config = {"threads": options.threads, "isa": native.isa(), "bandwidth_gb_per_s": bandwidth}
    report = Report("kernels", {**config, "quick": options.quick})
    for kind in options.kinds:
        for shape in SHAPES[2:3] if options.quick else SHAPES:
            run_shape(report, kind, shape, options)
    roof = f"{native.isa()}, {options.threads} threads; read bandwidth {bandwidth:.1f} GB/s"
    return report.finish(options, [roof, *tables(report.results, options.threads, options.ghz)])


if __name__ == "__main__":
    sys.exit(main())
