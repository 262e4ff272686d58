"""The native attention of one layer: time over contexts, rows, head shapes and types of keys.

A sample is one call on queries that are ready, by all threads, over the keys and values of one
layer. Calls go round more layers than the caches hold, whose blocks are scattered, as in a forward.
With ``--against`` another build of the kernels takes turns with this one, call by call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Report, Row, among, arguments, grid, note, numbers, table

import paceline._native as native

TILE, GROUP = 16, 32
OUT_OF_CACHE = 96_000_000  # bytes of keys and values that calls go round
SECONDS, QUICK_SECONDS = 1.0, 0.2  # per cell


class Heads(NamedTuple):
    queries: int
    kv: int
    dim: int

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


SHAPES = {
    "smollm2": Heads(9, 3, 64),
    "gemma3-270m": Heads(4, 1, 256),
    "llama-1b": Heads(32, 8, 64),
    "qwen3-0.6b": Heads(16, 8, 128),
}
KINDS = ("float16", "int8")


def cached(heads: Heads, blocks: int, kind: str, seed: int) -> tuple[Any, Any]:
    """Keys and values of a layer, finite whatever their type."""
    rng = np.random.default_rng(seed)
    if kind == "float16":
        keys = rng.standard_normal((blocks, heads.kv, heads.dim, TILE), np.float32)
        values = rng.standard_normal((blocks, heads.kv, TILE, heads.dim), np.float32)
        return keys.astype(np.float16), values.astype(np.float16)
    held = heads.dim + 2 * -(-heads.dim // GROUP)  # codes, and a bfloat16 for each group
    keys = rng.integers(-100, 100, (blocks, heads.kv, held, TILE), np.int8)
    values = rng.integers(-100, 100, (blocks, heads.kv, TILE, held), np.int8)
    keys[:, :, heads.dim :] = values[..., heads.dim :] = 0x3C  # a small number, as any two bytes
    return keys, values


def measure(
    modules: Sequence[Any], heads: Heads, kind: str, context: int, rows: int, seconds: float
) -> list[list[float]]:
    """Seconds of each call, by module; the modules take turns."""
    blocks = context // TILE + 2
    layers = [cached(heads, blocks, kind, seed) for seed in range(2)]
    copies = OUT_OF_CACHE // (layers[0][0].nbytes + layers[0][1].nbytes) + 2
    layers += [(layers[i % 2][0].copy(), layers[i % 2][1].copy()) for i in range(copies - 2)]
    rng = np.random.default_rng(9)
    table = rng.permutation(blocks).astype(np.int32)
    q = rng.standard_normal((rows, heads.queries, heads.dim), np.float32)
    positions = np.arange(context, context + rows, dtype=np.int32)
    found: list[list[float]] = [[] for _ in modules]
    begin, turn = time.perf_counter(), 0
    while turn < 2 * copies or time.perf_counter() - begin < seconds:
        keys, values = layers[turn % copies]
        arm = (turn + turn // copies) % len(modules)  # another one of each layer in the next round
        start = time.perf_counter()
        modules[arm].attend(
            q, keys, values, table, context, positions, [None] * rows, heads.scale, 0.0, 0, 8
        )
        found[arm].append(time.perf_counter() - start)
        turn += 1
    return found


def other_build(path: Path) -> Any:
    """Another build of the kernels beside this one."""
    loader = ExtensionFileLoader("_native", str(path))
    spec = spec_from_loader("_native", loader)
    assert spec is not None
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # its types have the names of this build's, and are not used
        module = module_from_spec(spec)
        loader.exec_module(module)
    return module


def run_cell(report: Report, modules: Sequence[Any], label: Row, seconds: float) -> None:
    heads = SHAPES[label["model"]]
    note(" ".join(map(str, label.values())))
    times = measure(modules, heads, label["keys"], label["context"], label["rows"], seconds)
    medians = [statistics.median(each) for each in times]
    held = heads.dim * 2 if label["keys"] == "float16" else heads.dim + 2 * -(-heads.dim // GROUP)
    read = 2 * held * heads.kv * (label["context"] + label["rows"])
    found: Row = {"us": medians[0] * 1e6, "gb_per_s": read / medians[0] / 1e9}
    if len(times) > 1:
        found["ratio"] = medians[0] / medians[1]
    for arm, own in zip(("this", "other"), times, strict=False):
        report.samples.append({**label, "build": arm, "us": [round(t * 1e6, 1) for t in own]})
    report.results.append({**label, **found})


def tables(results: Sequence[Row]) -> list[str]:
    columns: list[Any] = [
        ("model", "model"),
        ("keys", "keys"),
        ("context", "context"),
        ("rows", "rows"),
        ("us", "us", 1),
        ("GB/s", "gb_per_s", 1),
    ]
    if any("ratio" in row for row in results):
        columns.append(("over other", "ratio", 2))
    return [table(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", type=among(SHAPES), default=list(SHAPES))
    parser.add_argument("--keys", type=among(KINDS), default=list(KINDS))
    parser.add_argument("--contexts", type=numbers, default=[512, 4096])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--against", type=Path, help="another build's module, to take turns with")
    options: argparse.Namespace = parser.parse_args(argv)
    modules = [native, *([other_build(options.against)] if options.against else [])]
    for module in modules:
        module.set_threads(options.threads)
    config = {"threads": options.threads, "isa": native.isa(), "quick": options.quick}
    report = Report("attention", config)
    for model in options.models:
        for kind in options.keys:
            for context in options.contexts[:1] if options.quick else options.contexts:
                for rows in options.rows:
                    label: Row = {"model": model, "keys": kind, "context": context, "rows": rows}
                    run_cell(report, modules, label, QUICK_SECONDS if options.quick else SECONDS)
    roof = f"{native.isa()}, {options.threads} threads"
    return report.finish(options, [roof, *tables(report.results)])


if __name__ == "__main__":
    sys.exit(main())
