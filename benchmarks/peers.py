"""Paceline beside llama.cpp: the same files and prompts in both engines, in turns.

The embedded models are inflated to the size of a real one (``inflate.py``), so every engine speaks
the same sensible text at a real model's cost; a GGUF file is a model too. Paceline and llama.cpp
read the very same file, made once by llama.cpp's own ``llama-quantize``. Each engine is a process
of its own under its own interpreter, and those that read files of one type stay loaded and asleep
while one of them is measured; ``make peers`` installs them. An engine that is not there is a row
that says why, and no failure.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peers_models as models
from harness import Sample, among, arguments, chosen, names, note, numbers, raw, take_turns
from peers_client import ENGINES, KINDS, Worker
from peers_models import MissingPeerError
from peers_report import results_of, tables, targets
from prompt_sets import load_prompts, spread
from report import Report, Target

from paceline.loading.checkpoint import load_checkpoint
from paceline.sampling import native

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512)
LONG_CONTEXTS = (8_000, 32_000)
PREFILL = 512
SEQUENCES = (1, 4, 8, 16)
PARALLEL_CONTEXT = 64
LONGEST_PROMPT = 256
SHORT_CONTEXT, SPARE_TOKENS = 1024, 32
ROOF_MEGABYTES = 512
"""Of the array whose reading shows the bandwidth: far more than the caches hold."""
Arms = Mapping[str, Worker]
Item = tuple[Any, ...]


# --- options --------------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument(
        "--models",
        type=names,
        default=["0.5b"],
        help=f"some of {', '.join(models.PAIRS)}, and GGUF files (default: 0.5b)",
    )
    parser.add_argument("--formats", type=among(KINDS), default=list(KINDS), help="of the files")
    parser.add_argument("--engines", type=among(ENGINES), default=list(ENGINES))
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: 2)")
    parser.sized("--widths", list(WIDTHS), [1, 8, 32], "new tokens of one forward", type=numbers)
    parser.sized("--contexts", list(CONTEXTS), [64], "tokens before those", type=numbers)
    parser.sized("--long-contexts", list(LONG_CONTEXTS), [], "of plain steps", type=numbers)
    parser.sized("--num-prompts", 6, 1)
    parser.sized("--max-tokens", 80, 24, "per prompt")
    parser.sized("--repeat", 3, 1, "turns of everything")
    options = parser.parse_args(argv)
    for model in options.models:
        if models.is_file(model) and not Path(model).is_file():
            allowed = ", ".join(models.PAIRS)
            parser.error(f"there is no model {model!r}; allowed: {allowed} and GGUF files")
    options.sequences = [1, 16] if options.quick else list(SEQUENCES)
    options.widths = sorted({1, *options.widths})  # the width that all costs are relative to
    options.inner = 2 if options.quick else 3
    options.steps = 8 if options.quick else 24
    return options


# --- engines --------------------------------------------------------------------------------------


def groups(options: argparse.Namespace) -> list[list[str]]:
    """Engines that run together: those of one type of file."""
    kinds = ([n for n in options.engines if ENGINES[n].kind == kind] for kind in options.formats)
    return [found for found in kinds if found]


@contextmanager
def running(
    options: argparse.Namespace, model: str, engines: Sequence[str], rows: list[dict[str, Any]]
) -> Iterator[dict[str, Worker]]:
    """The engines that can run here; ``rows`` gets one for each that cannot."""
    context = max([SHORT_CONTEXT, *(each + SPARE_TOKENS for each in options.long_contexts)])
    context = min(context, longest_context(model))
    with ExitStack() as stack:
        found: dict[str, Worker] = {}
        for name in engines:
            note(f"starting {name}")
            try:
                worker = Worker(ENGINES[name], model, options.threads, context=context)
            except MissingPeerError as error:
                note(f"{name}: {error}")
                rows.append({"engine": name, "measure": "engine", "missing": str(error)})
                continue
            stack.callback(worker.close)
            found[name] = worker
        yield found


def turns(
    arms: Mapping[str, Callable[[Item], Any]],
    items: Sequence[Item],
    repeats: int,
) -> list[Sample]:
    """Arms in turns, with the seconds that the workers measured themselves.

    Where a worker reports several times of one thing, the sample is their median.
    """
    note(f"{items[0][0]}: {len(arms)} arms, {len(items)} items, {repeats} turns")
    samples = take_turns(arms, items, repeats, lambda result: result)
    return [
        s if s.failed else replace(s, seconds=s.facts.get("seconds", s.seconds)) for s in samples
    ]


def read_bandwidth(threads: int) -> dict[str, Any]:
    """Bytes per second with which this many threads read memory; None without native kernels."""
    found = {"threads": threads, "megabytes": ROOF_MEGABYTES, "bytes_per_second": None}
    if native.kernels:
        native.kernels.set_threads(threads)
        found["bytes_per_second"] = native.kernels.bandwidth(ROOF_MEGABYTES) * 1e9
    return found


def middle(times: Sequence[float]) -> dict[str, Any]:
    return {"seconds": sorted(times)[len(times) // 2], "times": list(times)}


# --- what is measured -----------------------------------------------------------------------------


def forwards(arms: Arms, options: argparse.Namespace, tokens: list[int]) -> list[Sample]:
    """T(w): one forward over ``w`` tokens; and the reading of a prompt of 512."""

    def one(worker: Worker, item: Item) -> dict[str, Any]:
        if item[0] == "prefill":
            return middle(worker.ask("prefill", tokens=tokens[: item[1]], repeats=1))
        _, context, width = item
        wish = {"width": width, "context": context, "repeats": options.inner}
        return middle(worker.ask("forward", tokens=tokens, **wish))

    items: list[Item] = [("forward", c, w) for c in options.contexts for w in options.widths]
    items.append(("prefill", PREFILL))
    return turns({n: partial(one, w) for n, w in arms.items()}, items, options.repeat)


def long_steps(
    arms: Arms, options: argparse.Namespace, tokens: Sequence[int], limit: int, rows: list[Any]
) -> list[Sample]:
    """Plain steps after long contexts, in one turn: reading such a context takes minutes."""
    rng, found = random.Random(0), list[Sample]()
    for context in options.long_contexts:
        if context + SPARE_TOKENS > limit:
            why = f"the model ends at {limit} tokens"
            rows.append({"engine": "-", "measure": "mode", "mode": f"{context}", "missing": why})
            continue
        text = [rng.choice(tokens) for _ in range(context + SPARE_TOKENS)]

        def one(worker: Worker, item: Item, text: list[int] = text) -> dict[str, Any]:
            wish = {"context": item[1], "repeats": options.inner, "tokens": text}
            return middle(worker.ask("long", **wish))

        items: list[Item] = [("forward", context, 1)]
        found += turns({n: partial(one, w) for n, w in arms.items()}, items, 1)
    return found


def parallel(arms: Arms, options: argparse.Namespace, tokens: list[int]) -> list[Sample]:
    """Several sequences that decode at once."""

    def one(worker: Worker, item: Item) -> dict[str, Any]:
        wish = {"sequences": item[1], "tokens": tokens[:PARALLEL_CONTEXT], "steps": options.steps}
        return worker.ask("parallel", **wish)

    items: list[Item] = [("parallel", count) for count in options.sequences]
    return turns({n: partial(one, w) for n, w in arms.items()}, items, options.repeat)


def generations(
    arms: Arms, options: argparse.Namespace, prompts: Sequence[dict[str, Any]]
) -> list[Sample]:
    """Greedy text after code prompts. A first short run of each mode warms it up."""

    def one(worker: Worker, mode: str, max_tokens: int, item: Item) -> dict[str, Any]:
        return worker.ask("generate", mode=mode, prompt=prompts[item[1]], max_tokens=max_tokens)

    modes: dict[str, Callable[[Item], Any]] = {}
    for name, worker in arms.items():
        for mode in ("plain", *worker.engine.modes):
            try:
                one(worker, mode, 8, ("generate", 0))
            except Exception as error:  # the measured runs will fail, and count
                note(f"{name}, {mode}: {error!r}")
            modes[f"{name}, {mode}"] = partial(one, worker, mode, options.max_tokens)
    items: list[Item] = [("generate", index) for index in range(len(prompts))]
    return turns(modes, items, options.repeat)


def longest_context(model: str) -> int:
    """Tokens that the file of a model allows; those of inflated models say more than the folder."""
    if not models.is_file(model):
        return models.LONGEST_CONTEXT
    return load_checkpoint(model, with_tokenizer=False).config.max_position


def code_prompts(options: argparse.Namespace, model: str) -> tuple[str, list[dict[str, Any]]]:
    """Where the prompts are from, and code prompts whole enough to be read in one step."""
    tokenizer = load_checkpoint(str(models.tokenizer_source(model))).tokenizer
    assert tokenizer is not None
    source = load_prompts(options.prompts)
    found = [{"text": t, "token_ids": tokenizer.encode(t)} for t in source.kind("code")]
    short = [prompt for prompt in found if len(prompt["token_ids"]) <= LONGEST_PROMPT]
    return source.source, spread(short, options.num_prompts)


def measure_model(options: argparse.Namespace, model: str, report: Report) -> list[Target]:
    """All engines on one model; returns its targets."""
    source, prompts = code_prompts(options, model)
    rng = random.Random(0)
    text = [token for prompt in prompts for token in prompt["token_ids"]]
    tokens = [
        rng.choice(text) for _ in range(max(*options.contexts, PREFILL) + max(options.widths))
    ]
    report.config["prompts"] = source
    rows: list[dict[str, Any]] = []
    engines: dict[str, Any] = {}
    held = max(PREFILL, max(options.sequences) * (PARALLEL_CONTEXT + options.steps))
    for group in groups(options):
        with running(options, model, group, rows) as arms:
            facts = {name: worker.facts for name, worker in arms.items()}
            samples = forwards(arms, options, tokens)
            samples += parallel(arms, options, tokens)
            memory = {name: worker.ask("usage") for name, worker in arms.items()}
            samples += generations(arms, options, prompts)
            samples += long_steps(arms, options, tokens, longest_context(model), rows)
        report.samples += [raw(sample, {"model": models.label(model)}) for sample in samples]
        rows += results_of(samples, facts, memory, held)
        engines |= facts
    report.config.setdefault("engines", {})[models.label(model)] = engines
    report.results += [{"model": models.label(model), **row} for row in rows]
    return targets(rows, engines, report.config["roof"])


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    keys = ("models", "formats", "quick", "threads", "widths", "contexts", "long_contexts")
    keys += ("sequences", "repeat", "num_prompts", "max_tokens", "steps")
    report = Report("peers", chosen(options, *keys))
    report.config["roof"] = read_bandwidth(options.threads)
    for model in options.models:
        report.targets += [
            replace(target, name=f"{models.label(model)}: {target.name}")
            for target in measure_model(options, model, report)
        ]
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
