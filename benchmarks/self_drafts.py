"""What a target drafts by itself with fewer layers and fewer bits: how much is taken, and how fast.

Every draft is a chain, and all of it is verified: no planner. Acceptance is counted; the time of a
draft's step is measured beside that of the target's in shuffled rounds, and speed-ups are those of
whole answers in turns with plain decoding, all over one set of weights and one KV cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import Sample, arguments, names, note, take_turns
from peers_models import PEERS
from prompt_sets import SOURCES, load_prompts, spread
from report import Report
from self_drafts_report import COUNTED, DEPTH, PLAIN, outcome, raw, tables, targets_of

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.build import BuiltEngine, build_engine
from paceline.engine.compute_thread import COMPUTE
from paceline.engine.engine import Engine
from paceline.llm import embedded_model
from paceline.models.decoder import Decoder
from paceline.proposers.base import Proposer
from paceline.proposers.draft_model.self_draft import SelfDraftProposer, cheaper_decoder
from paceline.runtime.model_runner import ModelRunner
from paceline.sampling_params import SamplingParams
from paceline.span import Span
from paceline.workbench.profile_machine import Work
from paceline.workbench.profile_steps import Task, measure

TARGETS = ("embedded", "0.5b")
QUARTERS = (1, 2, 3, 4)
KINDS = ("code", "prose", "edit")
OWN_KV = "int4, KV of its own"
CONTEXT = 128
"""Tokens of a prompt at most, and those before the steps that are timed."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One row of the table: a decoder that drafts for the one that it is a part of."""

    bits: str
    layers: int
    decoder: Decoder

    @property
    def name(self) -> str:
        return f"{self.bits}, {self.layers} layers"


def folder_of(target: str) -> str | None:
    """Where a target lies; None where it was not made (``make peers``)."""
    if target == "embedded":
        return embedded_model("target")
    place = PEERS / "models" / target / "target"
    return str(place) if (place / "config.json").is_file() else None


def drafts_of(built: BuiltEngine) -> list[Draft]:
    """All bits and shares of the layers, the target as it is left out."""
    whole = built.engine.runner.decoder
    count, own = whole.config.num_layers, built.config.dtype
    decoders = {own: whole}
    if own == "int8":
        wanted = SpeculativeConfig("self", dtype="int4")
        decoders["int4"] = cheaper_decoder(wanted, whole, built.checkpoint)
    parts = [max(1, count * quarter // 4) for quarter in QUARTERS]
    return [
        Draft(bits, layers, decoder.with_layers(decoder.layers[:layers], decoder.ops))
        for bits, decoder in decoders.items()
        for layers in parts
        if (bits, layers) != (own, count)
    ]


def proposers_of(built: BuiltEngine, drafts: Sequence[Draft], folder: str) -> dict[str, Proposer]:
    kv, own = built.engine.kv, built.config.dtype
    found: dict[str, Proposer] = {}
    for draft in drafts:
        bits = "auto" if draft.bits == own else draft.bits
        config = SpeculativeConfig(
            "self", draft_layers=draft.layers, dtype=bits, num_speculative_tokens=DEPTH
        )
        found[draft.name] = SelfDraftProposer(config, ModelRunner(draft.decoder, kv))
    if own == "int8":
        alone = SpeculativeConfig("draft_model", folder, dtype="int4", num_speculative_tokens=DEPTH)
        (found[OWN_KV],) = built.proposers_for((alone,))
    return found


# --- measuring ------------------------------------------------------------------------------------


def step_times(built: BuiltEngine, drafts: Sequence[Draft], seconds: float) -> dict[str, float]:
    """Milliseconds of a step of one row, by name; the target's under :data:`PLAIN`."""
    runner, request_id = built.engine.runner, -1
    runners = {PLAIN: runner}
    runners |= {draft.name: ModelRunner(draft.decoder, runner.kv) for draft in drafts}
    tokens = [7 * i % 1000 for i in range(CONTEXT + 1)]
    runner.kv.open(request_id)
    runner.kv.reserve(request_id, CONTEXT + 1)
    runner.forward(runner.pack([Span.chunk(request_id, 0, tokens[:-1], sample=False)]))
    runner.kv.commit(request_id, range(CONTEXT))
    runner.kv.reserve(request_id, 1)
    span = Span.chunk(request_id, CONTEXT, tokens[-1:], sample=True)
    timings = measure(
        {name: Task(partial(step_seconds, each, span)) for name, each in runners.items()}, seconds
    )
    runner.kv.free(request_id)
    return {name: timing.ms for name, timing in timings.items()}


def step_seconds(runner: ModelRunner, span: Span) -> float:
    began = time.perf_counter()
    runner.forward(runner.pack([span]))
    return time.perf_counter() - began


def answer(
    engine: Engine, wish: SamplingParams, proposer: Proposer | None, prompt: Sequence[int]
) -> tuple[list[int], Any]:
    """Tokens and counters of one request, alone in the engine."""
    engine.set_speculation([] if proposer is None else [proposer])
    (request_id,) = engine.add_request(prompt, wish)
    counters = engine.requests[request_id].counters
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens += output.token_ids
    return tokens, counters


def counted(result: tuple[list[int], Any]) -> dict[str, Any]:
    tokens, counters = result
    return {"token_ids": tokens, **{name: getattr(counters, name) for name in COUNTED}}


def run_target(
    target: str, folder: str, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and samples of one target. A large one answers less: fewer, shorter, not again."""
    config = EngineConfig(
        device=options.device,
        max_num_seqs=1,
        max_model_len=512,
        enable_prefix_caching=False,
        planner="fixed",
        num_threads=options.threads,
        strict=True,
    )
    built = build_engine(folder, config)
    drafts = drafts_of(built)
    times = step_times(built, drafts, options.seconds)
    share = 1 if target == "embedded" else 3
    wish = SamplingParams(
        max_tokens=options.max_tokens // share,
        temperature=options.temperature,
        seed=0,
        ignore_eos=True,
    )
    prompts = encoded(built, options.prompts, max(1, options.num_prompts // share))
    arms: dict[str, Callable[[Any], Any]] = {
        name: partial(answer, built.engine, wish, proposer)
        for name, proposer in {PLAIN: None, **proposers_of(built, drafts, folder)}.items()
    }
    for run in arms.values():
        run(prompts[0][:16])
    samples = take_turns(arms, prompts, max(1, options.repeat // share), counted)
    rows = [row_of(built, draft, times, samples) for draft in drafts]
    if OWN_KV in arms:
        rows.append({"bits": "int4", "layers": "all, KV of its own", **outcome(samples, OWN_KV)})
    rows = [{"target": target, **row} for row in rows]
    return rows, [raw(sample, target, prompts) for sample in samples]


def encoded(built: BuiltEngine, source: str, count: int) -> list[tuple[int, ...]]:
    """The ends of ``count`` prompts of each kind."""
    tokenizer, sets = built.checkpoint.tokenizer, load_prompts(source)
    assert tokenizer is not None
    texts = [text for kind in KINDS for text in spread(sets.kind(kind), count)]
    return [tuple(tokenizer.encode(text)[-CONTEXT:]) for text in texts]


def row_of(
    built: BuiltEngine, draft: Draft, times: Mapping[str, float], samples: Sequence[Sample]
) -> dict[str, Any]:
    shape, kv_dtype = built.checkpoint.config, built.config.kv_cache_dtype
    whole = Work.of(shape, built.config.dtype, kv_dtype)
    part = Work.of(shape.first_layers(draft.layers), draft.bits, kv_dtype)
    return {
        "bits": draft.bits,
        "layers": f"{draft.layers} of {shape.num_layers}",
        "share_of_bytes": part.weight_bytes / whole.weight_bytes,
        "step_ms": times[draft.name],
        "step_ratio": times[draft.name] / times[PLAIN],
        **outcome(samples, draft.name),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--targets", type=names, help=f"of {','.join(TARGETS)} (quick: embedded)")
    parser.add_argument("--num-prompts", type=int, help="of each kind (default: 3, quick: 1)")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: 96, quick: 24)")
    parser.add_argument("--repeat", type=int, help="runs of each prompt (default: 2, quick: 1)")
    parser.add_argument("--seconds", type=float, help="of timed steps (default: 8, quick: 1)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    options = parser.parse_args(argv)
    quick = {"targets": TARGETS[:1], "num_prompts": 1, "max_tokens": 24, "repeat": 1, "seconds": 1}
    full = {"targets": TARGETS, "num_prompts": 3, "max_tokens": 96, "repeat": 2, "seconds": 8}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    config = {name: getattr(options, name) for name in (*full, "temperature", "quick")}
    source = load_prompts(options.prompts).source
    report = Report("self_drafts", {**config, "prompts": source, "depth": DEPTH})
    for target in options.targets:
        folder = folder_of(target)
        if folder is None:
            note(f"{target} is left out: there is no such model; `make peers` makes it")
            continue
        note(f"measuring: {target}")
        rows, samples = COMPUTE.call(partial(run_target, target, folder, options))
        report.results += rows
        report.samples += samples
    report.targets = targets_of(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
