"""What adapters cost: steps of rows that have none, one for all of them, or one each.

A step has one row of each of ``--rows`` requests, as decoding has; all adapters are for every
linear that can have one, in bfloat16, with random weights: times do not depend on what they hold.
Arms run in turns over the same packed model: one that is named, or a random one of a 0.5B one's
shape.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from harness import (
    PLAIN,
    Sample,
    arguments,
    chosen,
    first_error,
    note,
    numbers,
    pair_up,
    paired_ratio,
    raw,
    take_turns,
)
from kv_dtypes import HALF_BILLION, RandomTensors
from report import Report, Row, Target, grid, table

from paceline.backends.resolve import resolve_dtype, resolve_ops
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.cache.sequence_kv import blocks_for
from paceline.loading.adapter import places
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.low_rank import AdaptedLayers, LowRank
from paceline.models.threads import set_num_threads
from paceline.request.span import Span
from paceline.tensors.arrays import BFLOAT16

CONTEXT = 256
FORWARDS = 4
"""Of one timed sample."""
ONE, EACH = "one adapter", "one each"
LEAST_SHARE = 0.85
"""Of the speed of rows with one adapter, what rows with one each should have."""


def random_adapter(config: ModelConfig, rank: int, seed: int) -> AdaptedLayers:
    rng, found = np.random.default_rng(seed), []

    def weights(*shape: int) -> Any:
        return (0.01 * rng.standard_normal(shape, np.float32)).astype(BFLOAT16)

    for index in range(config.num_layers):
        layer: dict[str, list[LowRank]] = {}
        for name, place in places(config, index).items():
            if name.endswith(("qkv_proj", "gate_up_proj")):  # their parts have adapters
                continue
            down, up = weights(rank, place.inputs), weights(place.outputs, rank)
            layer.setdefault(place.linear, []).append(LowRank(place.first, down, up, 1.0))
        found.append(layer)
    return found


class Steps:
    """Steps of requests whose contexts are held without being computed."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        blocks = 1 + rows * blocks_for(CONTEXT + 1)
        memory = decoder.ops.kv_memory(decoder.config, blocks, decoder.ops.default_kv_dtype)
        self.runner = ModelRunner(decoder, KVCache(memory, prefix_caching=False))
        self._spans = [Span.chunk(row, CONTEXT, [1 + row], True) for row in range(rows)]
        kv = self.runner.kv
        for row in range(rows):
            kv.open(row)
            assert kv.reserve(row, CONTEXT)
            kv.memory.fill(kv[row].slots.astype(np.int64), 0.01)
            kv.commit(row, range(CONTEXT))
            assert kv.reserve(row, 1)

    def run(self, adapters: Sequence[Any]) -> None:
        for _ in range(FORWARDS):
            self.runner.forward(self.runner.pack(self._spans, adapters))


def arms_of(steps: Steps, rows: int, rank: int) -> dict[str, Callable[[Any], None]]:
    config = steps.runner.decoder.config
    made = [steps.runner.adapter(random_adapter(config, rank, seed)) for seed in range(rows)]
    given = {PLAIN: (), ONE: [made[0]] * rows, EACH: made}
    return {name: lambda _, each=each: steps.run(each) for name, each in given.items()}


def result(samples: Sequence[Sample], arm: str, label: Mapping[str, Any]) -> Row:
    own = [sample for sample in samples if sample.arm == arm]
    error = first_error(samples)
    if error is not None:
        return {**label, "arm": arm, "error": error}
    seconds = statistics.median(sample.seconds or 0.0 for sample in own)
    row = {**label, "arm": arm, "step_ms": seconds / FORWARDS * 1e3}
    for other in (PLAIN, ONE):
        if other != arm:
            ratio = paired_ratio(pair_up(samples, other, arm))
            row[f"speed against {other}"] = asdict(ratio)
    return row


def run_model(report: Report, options: argparse.Namespace, name: str, decoder: Decoder) -> None:
    for rank in options.ranks:
        note(f"{name}: rank {rank}")
        steps = Steps(decoder, options.rows)
        arms = arms_of(steps, options.rows, rank)
        take_turns(arms, [rank], 1, lambda _: {})  # warm caches
        samples = take_turns(arms, [rank], options.repeats, lambda _: {})
        label = {"model": name, "dtype": decoder.ops.dtype, "rows": options.rows, "rank": rank}
        report.samples += [raw(sample, label) for sample in samples]
        report.results += [result(samples, arm, label) for arm in arms]
        share = report.results[-1].get(f"speed against {ONE}", {}).get("value")
        title = f"{name}, rank {rank}: speed of {options.rows} adapters over that of one"
        report.targets.append(Target(title, share, LEAST_SHARE, "at least"))


def tables(results: Sequence[Row]) -> list[str]:
    def share(other: str) -> Callable[[Row], str]:
        key = f"speed against {other}"
        return lambda row: f"{row[key]['value']:.3f}" if key in row else "-"

    columns = (
        ("model", "model"),
        ("rank", "rank"),
        ("rows have", "arm"),
        ("T(step) ms", "step_ms", 2),
        ("speed / none", share(PLAIN)),
        ("speed / one", share(ONE)),
    )
    return [table(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder, GGUF file or name, in place of the random one")
    parser.add_argument("--dtype", default="auto", help="of the arithmetic (default: auto)")
    parser.sized("--ranks", [16, 64], [16], type=numbers)
    parser.sized("--repeats", 21, 5, "timed turns")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    set_num_threads(options.threads)
    report = Report(
        "lora", chosen(options, "model", "ranks", "repeats", "rows", "threads", "quick")
    )
    if options.model:
        checkpoint = load_checkpoint(options.model)
        name, config, tensors = checkpoint.name, checkpoint.config, checkpoint.tensors
        dtype = resolve_dtype(options.dtype, options.device, checkpoint)
    else:
        name, config, tensors = "random 0.5B", HALF_BILLION, RandomTensors(HALF_BILLION)
        dtype = "int8" if options.dtype == "auto" else options.dtype
    ops = resolve_ops(dtype, options.device)
    run_model(report, options, name, Decoder(config, tensors, ops, CONTEXT + 1))
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
