"""What keys and values in fewer bits cost in fidelity, and what they save in time.

All dtypes of the KV cache run over the same packed weights, each with a cache of its own. A model
(``--model``) reads a text, and where each context ends, its distributions of the following tokens
are compared with those over float32 keys and values: Kullback-Leibler divergence in nats, and how
often both hold the same token for the likeliest. Then forwards of one row and of eight, as a plain
and a verifying step have them, are timed in turns. Contexts that the model was not made for are
left out. Arithmetic that rounds activations diverges by about as much whatever was changed in a
key: ``--dtype float32``, which is slow, shows what the cache alone does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    ROOT,
    Report,
    Row,
    Sample,
    among,
    arguments,
    chosen,
    first_error,
    grid,
    note,
    numbers,
    table,
    take_turns,
)

from paceline.backends.resolve import resolve_dtype, resolve_ops
from paceline.cache.block_pool import blocks_for
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config import KV_DTYPES
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.backend import KV_BYTES, head_elements
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.threads import set_num_threads
from paceline.request.span import Span
from paceline_lab.quality.quality import log_softmax

WIDTHS = (1, 8)
CHUNK = 512
PROBES = 64
"""Tokens after a context whose distributions are compared."""
FORWARDS = 3
"""Of one timed sample."""


class Arm:
    """A model over keys and values of one dtype."""

    def __init__(self, decoder: Decoder, kv_dtype: str, most: int) -> None:
        blocks = 1 + blocks_for(most + PROBES)
        memory = decoder.ops.kv_memory(decoder.config, blocks, kv_dtype)
        self._runner = ModelRunner(decoder, KVCache(memory, prefix_caching=False))
        self._kv = self._runner.kv
        self._kv.open(0)

    @property
    def length(self) -> int:
        return self._kv[0].length

    def read(self, tokens: Sequence[int]) -> None:
        """Compute the keys and values of the tokens that are not read yet."""
        while self.length < len(tokens):
            part = tokens[self.length : self.length + CHUNK]
            assert self._kv.reserve(0, len(part))
            span = Span.chunk(0, self.length, part, sample=False)
            self._runner.forward(self._runner.pack([span]))
            self._kv.commit(0, range(len(part)))

    def logits(self, tokens: Sequence[int]) -> Any:
        """Of tokens after the context, ``[tokens, vocab]``; they are forgotten again."""
        count = len(tokens)
        assert self._kv.reserve(0, count)
        span = Span(0, self.length, tokens, range(-1, count - 1), range(count))
        logits = self._runner.forward(self._runner.pack([span])).logits
        self._kv.rollback(0)
        return logits


def timed(arms: Mapping[str, Arm], tokens: Sequence[int], repeats: int) -> list[Sample]:
    """Samples whose item is the number of rows."""

    def forwards(arm: Arm) -> Callable[[Any], Any]:
        def run(width: Any) -> None:
            for _ in range(FORWARDS):
                arm.logits(tokens[:width])

        return run

    runs = {name: forwards(arm) for name, arm in arms.items()}
    take_turns(runs, WIDTHS, 1, lambda _: {})  # warm caches
    return take_turns(runs, WIDTHS, repeats, lambda _: {})


def fidelity(logits: Any, exact: Any) -> dict[str, float]:
    """Divergence of distributions from the exact ones, both as logits ``[rows, vocab]``."""
    own, true = (log_softmax(x) for x in (logits, exact))
    divergence = (np.exp(true) * (true - own)).sum(-1)
    same = own.argmax(-1) == true.argmax(-1)
    return {
        "kl_mean": divergence.mean().item(),
        "kl_max": divergence.max().item(),
        "same_top": same.mean().item(),
    }


def kv_bytes(config: ModelConfig, kv_dtype: str) -> int:
    """Of one token in all layers."""
    heads = 2 * config.num_layers * config.num_kv_heads
    return heads * head_elements(config.head_dim, kv_dtype) * KV_BYTES[kv_dtype]


def judge(
    report: Report,
    label: Mapping[str, Any],
    arms: Mapping[str, Arm],
    probe: Sequence[int],
    options: argparse.Namespace,
    config: ModelConfig,
) -> None:
    """One context of one model: a row of results for each KV dtype."""
    note(f"{label['model']}: {label['context']} tokens")
    samples = timed(arms, probe, options.repeats)
    logits = {name: arm.logits(probe) for name, arm in arms.items()}
    for name in arms:
        own = [sample for sample in samples if sample.arm == name]
        row = {**label, "kv_dtype": name, "kv_bytes_per_token": kv_bytes(config, name)}
        times = {
            str(w): [s.seconds and s.seconds / FORWARDS * 1e3 for s in own if s.item == w]
            for w in WIDTHS
        }
        error = first_error(own)
        report.samples.append({**row, "ms": times, "error": error})
        for width, values in times.items():
            row[f"t{width}_ms"] = None if error else statistics.median(values)
        report.results.append({**row, **fidelity(logits[name], logits["float32"])})


def run_model(report: Report, options: argparse.Namespace) -> None:
    """A model's own text at the contexts that it was made for."""
    checkpoint = load_checkpoint(options.model)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    assert tokenizer is not None, "a text is read by the model's own tokenizer"
    text = "\n".join(path.read_text(encoding="utf-8") for path in options.text)
    tokens = tokenizer.encode(text)
    most = min(config.max_position, len(tokens)) - PROBES
    contexts = [min(context, most) for context in options.contexts if context - PROBES <= most]
    dtype = resolve_dtype(options.dtype, options.device, checkpoint)
    ops = resolve_ops(dtype, options.device, deterministic=False)
    decoder = Decoder(config, checkpoint.tensors, ops, config.max_position)
    arms = {kv_dtype: Arm(decoder, kv_dtype, most) for kv_dtype in options.kv_dtypes}
    for context in sorted(set(contexts)):
        for name, arm in arms.items():
            note(f"{name} reads {context - arm.length} tokens")
            arm.read(tokens[:context])
        label = {"model": checkpoint.name, "dtype": dtype, "context": context}
        probe = tokens[context : context + PROBES]
        judge(report, label, arms, probe, options, config)


def tables(results: Sequence[Row]) -> list[str]:
    def scientific(key: str) -> Callable[[Row], str]:
        return lambda row: f"{row[key]:.2e}" if key in row else "-"

    columns = (
        ("model", "model"),
        ("context", "context"),
        ("KV", "kv_dtype"),
        ("bytes/token", "kv_bytes_per_token"),
        *((f"T({width}) ms", f"t{width}_ms", 2) for width in WIDTHS),
        ("mean KL", scientific("kl_mean")),
        ("max KL", scientific("kl_max")),
        ("same top", lambda row: f"{row['same_top']:.1%}" if "same_top" in row else "-"),
    )
    return [table(*grid(results, *columns))]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file")
    parser.add_argument("--dtype", default="auto", help="of the arithmetic (default: auto)")
    parser.sized("--contexts", [2048, 8192, 32768], [2048], type=numbers)
    parser.add_argument("--kv-dtypes", type=among(KV_BYTES), default=list(KV_DTYPES[1:]))
    parser.sized("--repeats", 15, 3, "timed turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--text", type=Path, nargs="+", default=sorted(ROOT.glob("docs/*.md")), help="what is read"
    )
    options = parser.parse_args(argv)
    if "float32" not in options.kv_dtypes:
        parser.error("--kv-dtypes lacks float32, with which the others are compared")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    set_num_threads(options.threads)
    config = {
        "model": options.model.name,
        **chosen(options, "contexts", "repeats", "threads", "quick"),
        "probes": PROBES,
        "forwards_per_sample": FORWARDS,
    }
    report = Report("kv_dtypes", config)
    run_model(report, options)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
