"""What of a copy's drafts the target takes, by the bits of the copy's layers: counts, no times.

The copy drafts chains, all of which are verified, so nothing depends on how fast the machine is.
Its bytes are those of the layers as they are packed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness import arguments, names, note
from prompt_sets import load_prompts, spread
from report import Report, Row, Target, grid, identical_target, markdown

from paceline import LLM, SamplingParams
from paceline.build.self_drafts import COPIES, copy_bytes
from paceline.cli.options.prompts import Encoder
from paceline.loading.checkpoint import load_checkpoint

TEMPERATURES = (0.0, 0.8)
WANTED = 2.0
"""Tokens of a step that the default drafts have to bring: see ``build/self_drafts.py``."""


def answered(llm: LLM, prompts: Sequence[list[int]], temperature: float, tokens: int) -> Row:
    """All prompts one by one: what was said, and the engine's counters of it."""
    params = SamplingParams(
        max_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True, logprobs=0
    )
    said, before = [], llm.stats().speculation
    for prompt in prompts:
        said.append(llm.generate(prompt, params).token_ids)
    counted = llm.stats().speculation
    steps = counted.num_steps - before.num_steps
    drafted = counted.num_draft_tokens - before.num_draft_tokens
    accepted = counted.num_accepted_tokens - before.num_accepted_tokens
    first, drafts = (
        [counts[0] if counts else 0 for counts in (each(before), each(counted))]
        for each in (lambda c: c.num_accepted_tokens_per_pos, lambda c: c.num_drafts_per_pos)
    )
    return {
        "said": said,
        "steps": steps,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "tokens_per_step": (sum(map(len, said)) - len(said)) / max(1, steps),
        "first": (first[1] - first[0]) / max(1, drafts[1] - drafts[0]),
    }


def run(options: argparse.Namespace, report: Report) -> None:
    checkpoint = load_checkpoint(options.model)
    source = load_prompts(options.prompts)
    report.config["prompts"] = source.source
    encode = Encoder(checkpoint.tokenizer).encode
    prompts = {
        kind: [encode(text) for text in spread(source.kind(kind), options.num_prompts)]
        for kind in options.kinds
    }
    limits: dict[str, Any] = {"max_model_len": 2048, "planner": "fixed", "max_num_seqs": 1}
    whole = checkpoint.num_bytes
    expected: dict[tuple[str, float], Any] = {}
    for bits in (0, *options.bits):
        draft = {"method": "self", "bits": bits, "num_speculative_tokens": options.depth}
        speculative = [{**draft, "min_accept_prob": 0.0}] if bits else []
        with LLM(checkpoint, speculative_config=speculative, **limits) as llm:
            for kind, texts in prompts.items():
                for temperature in TEMPERATURES:
                    found = answered(llm, texts, temperature, options.max_tokens)
                    said = found.pop("said")
                    if not bits:
                        expected[kind, temperature] = said
                        continue
                    report.samples.append(
                        {"bits": bits, "kind": kind, "temperature": temperature, **found}
                    )
                    copy = copy_bytes(checkpoint.config, f"int{bits}")
                    identical = said == expected[kind, temperature]
                    sizes = {"copy": copy / whole, "identical": identical}
                    report.results.append({**report.samples[-1], **sizes})
                    note(str(report.results[-1]))


def targets(report: Report) -> list[Target]:
    kept = [row for row in report.results if f"int{row['bits']}" in COPIES]
    least = min((row["tokens_per_step"] for row in kept), default=None)
    return [
        Target("tokens per step of the default's copies, the least", least, WANTED, "at least"),
        identical_target(report.results, "answers"),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        *(("bits", "bits"), ("of the weights' bytes", "copy", 2), ("text", "kind")),
        *(("temperature", "temperature", 1), ("first token accepted", "first", 2)),
        *(("tokens per step", "tokens_per_step", 2), ("identical", "identical")),
    )
    return [markdown(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", type=names, default=["code", "prose"])
    parser.add_argument(
        "--bits", type=lambda text: [int(word) for word in names(text)], default=[4, 3, 2]
    )
    parser.add_argument("--depth", type=int, default=8, help="tokens of a draft")
    parser.sized("--num-prompts", 8, 1, "of each kind")
    parser.sized("--max-tokens", 96, 24, "of each answer")
    options = parser.parse_args(argv)
    keys = ("quick", "model", "kinds", "bits", "depth", "num_prompts", "max_tokens")
    report = Report("self_bits", {key: getattr(options, key) for key in keys})
    run(options, report)
    report.targets = targets(report)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
