"""Paceline beside its peers: the same weights and prompts in every engine, in turns.

The embedded models are inflated to the size of a real one (``inflate.py``), so every engine speaks
the same sensible text at a real model's cost. Each engine is a process of its own under its own
interpreter, and all of them stay loaded and asleep while one is measured; ``make peers`` installs
them. An engine that is not there, or lacks a mode, is a row that says why, and no failure.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import peers_models as models
from harness import Sample, arguments, names, note, numbers, take_turns
from peers_client import ENGINES, Worker
from peers_models import MissingPeerError
from peers_report import results_of, tables
from peers_roof import read_bandwidth
from peers_targets import targets
from prompt_sets import SOURCES, load_prompts, spread
from report import Report

from paceline.models.checkpoint import load_checkpoint

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512)
PREFILL = 512
SEQUENCES = (1, 4, 8, 16)
PARALLEL_CONTEXT = 64
LONGEST_PROMPT = 256
IDLE_SECONDS = 2.0
MOST_IDLE_SHARE = 0.02
SLOW = "transformers bf16"
"""Where the processor has no bfloat16 arithmetic this one alone would fill a quick run."""
Arms = Mapping[str, Worker]
Item = tuple[Any, ...]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=list(models.PAIRS), default="0.5b")
    parser.add_argument("--engines", type=names, help=f"some of: {', '.join(ENGINES)}")
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: 2)")
    parser.add_argument("--widths", type=numbers, help="new tokens of one forward")
    parser.add_argument("--contexts", type=numbers, help="tokens before those")
    parser.add_argument("--num-prompts", type=int, help="default: 6, quick: 1")
    parser.add_argument("--max-tokens", type=int, help="per prompt (default: 80, quick: 24)")
    parser.add_argument("--repeat", type=int, help="turns of everything (default: 3, quick: 1)")
    options = parser.parse_args(argv)
    quick = options.quick
    everyone = [name for name in ENGINES if not (quick and name == SLOW)]
    options.engines = options.engines or everyone
    if unknown := [name for name in options.engines if name not in ENGINES]:
        parser.error(f"unknown engine {unknown[0]!r}; allowed are {', '.join(ENGINES)}")
    options.widths = options.widths or ([1, 8, 32] if quick else list(WIDTHS))
    options.contexts = options.contexts or ([64] if quick else list(CONTEXTS))
    options.sequences = [1, 16] if quick else list(SEQUENCES)
    options.num_prompts = options.num_prompts or (1 if quick else 6)
    options.max_tokens = options.max_tokens or (24 if quick else 80)
    options.repeat = options.repeat or (1 if quick else 3)
    options.widths = sorted({1, *options.widths})  # the width that all costs are relative to
    options.inner = 2 if quick else 3
    options.steps = 8 if quick else 24
    return options


# --- engines --------------------------------------------------------------------------------------


@contextmanager
def running(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[dict[str, Worker]]:
    """The engines that can run here; ``rows`` gets one for each that cannot."""
    with ExitStack() as stack:
        found: dict[str, Worker] = {}
        for name in options.engines:
            note(f"starting {name}")
            try:
                worker = Worker(ENGINES[name], options.model, options.threads)
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


def parallel(arms: Arms, options: argparse.Namespace, tokens: list[int]) -> list[Sample]:
    """Several sequences that decode at once."""

    def one(worker: Worker, item: Item) -> dict[str, Any]:
        wish = {"sequences": item[1], "tokens": tokens[:PARALLEL_CONTEXT], "steps": options.steps}
        return worker.ask("parallel", **wish)

    items: list[Item] = [("parallel", count) for count in options.sequences]
    return turns({n: partial(one, w) for n, w in arms.items()}, items, options.repeat)


def generations(
    arms: Arms, options: argparse.Namespace, prompts: Sequence[dict[str, Any]], rows: list[Any]
) -> list[Sample]:
    """Greedy text after code prompts: plainly, with the draft model, with lookup.

    A first short run of each mode warms it up; a mode that is not there becomes a row.
    """

    def one(worker: Worker, mode: str, max_tokens: int, item: Item) -> dict[str, Any]:
        worker.ask("prepare", mode=mode)
        return worker.ask("generate", mode=mode, prompt=prompts[item[1]], max_tokens=max_tokens)

    modes: dict[str, Callable[[Item], Any]] = {}
    for name, worker in arms.items():
        for mode in ("plain", *quick_modes(worker, options)):
            try:
                one(worker, mode, 8, ("generate", 0))
            except MissingPeerError as error:
                rows.append(
                    {"engine": name, "measure": "mode", "mode": mode, "missing": str(error)}
                )
                continue
            except Exception as error:  # the measured runs will fail, and count
                note(f"{name}, {mode}: {error!r}")
            modes[f"{name}, {mode}"] = partial(one, worker, mode, options.max_tokens)
    items: list[Item] = [("generate", index) for index in range(len(prompts))]
    return turns(modes, items, options.repeat)


def quick_modes(worker: Worker, options: argparse.Namespace) -> tuple[str, ...]:
    """All modes of an engine, or one draft length of each kind."""
    if not options.quick:
        return worker.engine.modes
    return tuple(mode for mode in worker.engine.modes if not mode.endswith((" 2", " 8")))


def usage(arms: Arms) -> dict[str, dict[str, Any]]:
    return {name: worker.ask("usage") for name, worker in arms.items()}


def idle_shares(arms: Arms) -> dict[str, float]:
    """Processor seconds per second that each worker burns while nobody asks it anything."""
    before, began = usage(arms), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    seconds, after = time.perf_counter() - began, usage(arms)
    burnt = {n: (after[n]["cpu_seconds"] - before[n]["cpu_seconds"]) / seconds for n in arms}
    for name, share in burnt.items():
        if share > MOST_IDLE_SHARE:
            note(f"{name} uses {share:.0%} of a core while it should sleep: it slows the others")
    return burnt


def code_prompts(options: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Where the prompts are from, and code prompts whole enough to be read in one step."""
    tokenizer = load_checkpoint(str(models.hugging_face(options.model, "target"))).tokenizer
    assert tokenizer is not None
    source = load_prompts(options.prompts)
    found = [{"text": t, "token_ids": tokenizer.encode(t)} for t in source.kind("code")]
    short = [prompt for prompt in found if len(prompt["token_ids"]) <= LONGEST_PROMPT]
    return source.source, spread(short, options.num_prompts)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source, prompts = code_prompts(options)
    rng = random.Random(0)
    text = [token for prompt in prompts for token in prompt["token_ids"]]
    tokens = [
        rng.choice(text) for _ in range(max(*options.contexts, PREFILL) + max(options.widths))
    ]
    keys = ("model", "quick", "threads", "widths", "contexts", "sequences", "repeat")
    config = {key: getattr(options, key) for key in (*keys, "num_prompts", "max_tokens", "steps")}
    report = Report("peers", {**config, "prompts": source})
    report.config["roof"] = roof = read_bandwidth(options.threads)
    with running(options, report.results) as arms:
        report.config["engines"] = facts = {name: worker.facts for name, worker in arms.items()}
        samples = forwards(arms, options, tokens)
        samples += parallel(arms, options, tokens)
        memory = usage(arms)
        samples += generations(arms, options, prompts, report.results)
        report.config["idle_cpu_share"] = idle_shares(arms)
    report.samples = [raw(sample) for sample in samples]
    held = max(PREFILL, max(options.sequences) * (PARALLEL_CONTEXT + options.steps))
    report.results += results_of(samples, facts, memory, held)
    report.targets = targets(report.results, facts, roof)
    return report.finish(options, tables(report.results))


def raw(sample: Sample) -> dict[str, Any]:
    """A sample as it is kept: everything but the tokens themselves."""
    facts = {name: value for name, value in sample.facts.items() if name != "token_ids"}
    kept = {"arm": sample.arm, "item": sample.item, "repeat": sample.repeat}
    return {**kept, **facts, "seconds": sample.seconds, "error": sample.error}


if __name__ == "__main__":
    sys.exit(main())
