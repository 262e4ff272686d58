"""How long loading a model takes beyond reading its file, and how much memory it holds.

Each round begins two processes in turn: one reads the file into fresh memory, the other builds an
engine of it and says how long its parts took and what is resident afterwards. What the vocabulary
costs does not depend on the weights, so it stands apart.

    python benchmarks/loading.py --models FILE [FILE ...] [--rounds 5] [--save]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import arguments, chosen, note
from report import Report, Row, grid, table

GB = 1e9


def resident() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


def read(path: str) -> dict[str, float]:
    began = time.perf_counter()
    files = sorted(Path(path).glob("*.safetensors")) or [path]
    arrays = [np.fromfile(file, np.uint8) for file in files]
    return {"seconds": time.perf_counter() - began, "bytes": sum(map(len, arrays))}


def load(path: str) -> dict[str, float]:
    from paceline.build.build import build_engine
    from paceline.config import EngineConfig
    from paceline.loading.checkpoint import load_checkpoint

    base, began = resident(), time.perf_counter()
    checkpoint = load_checkpoint(path)
    if checkpoint.tokenizer:
        checkpoint.tokenizer.fingerprint  # noqa: B018 - a cached property that building asks for
    parsed = time.perf_counter() - began
    words = resident() - base
    built = build_engine(checkpoint, EngineConfig(kv_cache_memory=1 << 30))
    return {
        "seconds": time.perf_counter() - began,
        "vocabulary_seconds": parsed,
        "resident": resident() - base,
        "vocabulary_resident": words,
        "interpreter": base,
        "layers": len(built.engine.runner.decoder.layers),
    }


ARMS = {"read": read, "load": load}


def in_process(arm: str, path: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--arm", arm, "--models", path]
    found: dict[str, float] = json.loads(subprocess.check_output(command).splitlines()[-1])
    return found


def measure(path: str, rounds: int) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm in samples:
            samples[arm].append(in_process(arm, path))
    size = samples["read"][0]["bytes"]
    reading = median(each["seconds"] for each in samples["read"])
    weights = median(each["seconds"] - each["vocabulary_seconds"] for each in samples["load"])
    held = median(each["resident"] for each in samples["load"])
    return {
        "model": Path(path).name,
        "bytes": size,
        "read_seconds_per_gb": reading / size * GB,
        "weights_seconds_per_gb": weights / size * GB,
        "vocabulary_seconds": median(each["vocabulary_seconds"] for each in samples["load"]),
        "resident_over_file": held / size,
        "vocabulary_bytes": median(each["vocabulary_resident"] for each in samples["load"]),
        "samples": samples,
    }


def tables(rows: Sequence[Row]) -> list[str]:
    columns = (
        ("model", "model"),
        ("MB", lambda row: round(row["bytes"] / 1e6)),
        ("read, s/GB", "read_seconds_per_gb", 2),
        ("weights, s/GB", "weights_seconds_per_gb", 2),
        ("beyond reading, s/GB", beyond_reading, 2),
        ("vocabulary, s", "vocabulary_seconds", 2),
        ("resident / file", "resident_over_file", 2),
        ("of it vocabulary, MB", lambda row: round(row["vocabulary_bytes"] / 1e6)),
    )
    return [table(*grid(rows, *columns))]


def beyond_reading(row: Row) -> float:
    return row["weights_seconds_per_gb"] - row["read_seconds_per_gb"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", required=True, help="GGUF files or folders")
    parser.sized("--rounds", 5, 1, "of both processes")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.arm:
        print(json.dumps(ARMS[options.arm](options.models[0])))
        return 0
    report = Report("loading", chosen(options, "rounds", "quick"))
    for path in options.models:
        note(f"loading: {path}")
        report.results.append(measure(path, options.rounds))
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
