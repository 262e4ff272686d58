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
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peers_client as models
from harness import (
    Report,
    Row,
    Sample,
    Target,
    among,
    arguments,
    chosen,
    first_error,
    grid,
    names,
    note,
    number,
    numbers,
    pick,
    raw,
    table,
    take_turns,
)
from peers_client import ENGINES, KINDS, LLAMA, OURS, MissingPeerError, Worker
from prompt_sets import load_prompts, spread

from paceline.loading.checkpoint import load_checkpoint
from paceline.sampling import sampler

Rows = Sequence[Row]


# --- rows -----------------------------------------------------------------------------------------


def results_of(
    samples: Sequence[Sample],
    engines: Mapping[str, Mapping[str, Any]],
    memory: Mapping[str, Mapping[str, Any]],
    held: int,
) -> list[Row]:
    """One row per engine and thing measured.

    Args:
        memory: each worker's usage before any draft model was loaded.
        held: the most tokens whose keys and values were held at once until then.
    """
    groups: dict[tuple[str, Any], list[Sample]] = {}
    for sample in samples:
        item = ("generate",) if sample.item[0] == "generate" else sample.item  # type: ignore[index]
        groups.setdefault((sample.arm, item), []).append(sample)
    rows = []
    for (arm, item), group in groups.items():
        engine, _, mode = arm.partition(", ")
        kind, label = _KINDS[item[0]](item)
        row = {"engine": engine, "measure": item[0], **label, **({"mode": mode} if mode else {})}
        error = first_error(group)
        rows.append({**row, "error": error} if error else {**row, **kind(group)})
    _compare_with_plain(rows, samples)
    return rows + [_memory_row(name, memory[name], engines[name], held) for name in memory]


def _milliseconds(group: Sequence[Sample]) -> Row:
    return {"ms": 1000 * statistics.median(s.seconds or 0.0 for s in group)}


def _rate(group: Sequence[Sample]) -> Row:
    return {
        "tokens_per_second": statistics.median(s.facts["tokens"] / (s.seconds or 1) for s in group)
    }


def _generation(group: Sequence[Sample]) -> Row:
    """Tokens over the sum of each prompt's median time, with and without the prompt's reading."""
    prompts: dict[Any, list[Sample]] = {}
    for sample in group:
        prompts.setdefault(sample.item, []).append(sample)
    tokens, whole, decoding = 0.0, 0.0, 0.0
    for own in prompts.values():
        count = own[0].facts["tokens"]
        tokens += count
        whole += statistics.median(s.seconds or 0.0 for s in own)
        rest = statistics.median((s.seconds or 0.0) - s.facts["first"] for s in own)
        decoding += rest * count / max(1, count - 1)
    return {
        "tokens_per_second": tokens / whole,
        "decode_tokens_per_second": tokens / decoding if decoding else None,
    }


_KINDS: dict[str, Callable[[Any], tuple[Callable[[Sequence[Sample]], Row], Row]]] = {
    "forward": lambda item: (_milliseconds, {"context": item[1], "width": item[2]}),
    "prefill": lambda item: (_milliseconds, {"width": item[1]}),
    "parallel": lambda item: (_rate, {"sequences": item[1]}),
    "generate": lambda item: (_generation, {}),
}


def _compare_with_plain(rows: Sequence[Row], samples: Sequence[Sample]) -> None:
    """Give each mode its gain over the engine's own plain text, and whether that is equal."""
    texts = {(s.arm, s.item): s.facts.get("token_ids") for s in samples if not s.failed}
    for row in rows:
        plain = find(rows, engine=row["engine"], measure="generate", mode="plain")
        if row.get("mode") and "error" not in row and plain and "error" not in plain:
            row["speedup"] = row["tokens_per_second"] / plain["tokens_per_second"]
            arm = f"{row['engine']}, {row['mode']}"
            pairs = [
                (text, texts.get((f"{row['engine']}, plain", item)))
                for (of, item), text in texts.items()
                if of == arm and text is not None
            ]
            row["identical"] = all(a == b for a, b in pairs) if pairs else None


def _memory_row(
    name: str, used: Mapping[str, Any], facts: Mapping[str, Any], held: int
) -> dict[str, Any]:
    """What the process held at most, beside what it cannot do without.

    ``peak_bytes`` is all of it that was resident at once, anonymous memory and pages of files.
    ``loaded_bytes`` is that without ``baseline_bytes``, which the interpreter and the engine's
    libraries held before a model was loaded. ``needed_bytes`` are the weights and the keys and
    values of ``held`` tokens, each once; nothing is added for what is rounded up.
    """
    row: dict[str, Any] = {"engine": name, "measure": "memory", "peak_bytes": used["peak"]}
    row["baseline_bytes"] = used["baseline"]
    row["loaded_bytes"] = used["peak"] - used["baseline"]
    row["anonymous_bytes"], row["file_bytes"] = used["anonymous"], used["file"]
    if "weight_bytes" in facts:
        row["needed_bytes"] = facts["weight_bytes"] + held * facts["kv_bytes_per_token"]
    return row


def find(rows: Rows, **wanted: Any) -> Mapping[str, Any]:
    """The row that has these values; empty where nothing like it was measured."""
    return next(iter(pick(rows, **wanted)), {})


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def forward(rows: Rows, engine: str, width: int, context: int = 64) -> float | None:
    return find(rows, engine=engine, measure="forward", width=width, context=context).get("ms")


# --- tables ---------------------------------------------------------------------------------------


def tables(rows: Rows) -> list[str]:
    """Of each model: forwards, several sequences and memory, generation, and what is missing."""
    found = []
    for model in dict.fromkeys(row.get("model") for row in rows):
        own = [row for row in rows if row.get("model") == model]
        found += [*([f"{model}:"] if model else []), *_model_tables(own)]
    return found


def _model_tables(rows: Rows) -> list[str]:
    engines = list(dict.fromkeys(row["engine"] for row in rows if "missing" not in row))
    made = [_forward_table(rows, engines), _engine_table(rows, engines), _generate_table(rows)]
    missing = [[r["engine"], r.get("mode", "-"), r["missing"]] for r in rows if "missing" in r]
    missing += [
        [r["engine"], r.get("mode", r["measure"]), r["error"]] for r in rows if r.get("error")
    ]
    return made + ([table(["not measured", "what", "why"], missing)] if missing else [])


def _forward_table(rows: Rows, engines: Sequence[str]) -> str:
    some = [row for row in rows if row["measure"] == "forward"]
    widths = sorted({row["width"] for row in some})
    lines = []
    for context in sorted({row["context"] for row in some}):
        for engine in engines:
            times = [forward(rows, engine, width, context) for width in widths]
            costs = [number(ratio(time, times[0])) for time in times[1:]]
            lines.append([engine, context, *(number(time, 1) for time in times), *costs])
    headers = [f"w={width}" for width in widths] + [f"T({w})/T(1)" for w in widths[1:]]
    return table(["forward, ms", "context", *headers], lines)


def _engine_table(rows: Rows, engines: Sequence[str]) -> str:
    counts = sorted({row["sequences"] for row in rows if row.get("sequences")})
    lines = []
    for engine in engines:
        parallel = [
            find(rows, engine=engine, measure="parallel", sequences=count).get("tokens_per_second")
            for count in counts
        ]
        memory = find(rows, engine=engine, measure="memory")
        prefill = find(rows, engine=engine, measure="prefill").get("ms")
        cells = [number(prefill, 0), *(number(rate, 1) for rate in parallel)]
        held = [memory.get("loaded_bytes"), memory.get("peak_bytes")]
        cells += [number(each / 1e6 if each else None, 0) for each in held]
        lines.append([engine, *cells])
    headers = [f"{count} seq, tok/s" for count in counts]
    return table(["engine", "prefill 512, ms", *headers, "memory, MB", "with libraries"], lines)


def _generate_table(rows: Rows) -> str:
    columns = (
        ("code, greedy", "engine"),
        ("mode", "mode"),
        ("tok/s", "tokens_per_second", 1),
        ("without the prompt", "decode_tokens_per_second", 1),
        ("over plain", "speedup", 2),
        ("same text", lambda r: {True: "yes", False: "NO", None: "-"}[r.get("identical")]),
    )
    return table(*grid(pick(rows, measure="generate"), *columns))


WIDTHS_OF_8_BITS = {8: 1.3, 16: 2.0, 32: 3.8}
WIDTHS_OF_FEWER = {8: 1.5, 16: 2.7, 32: 5.2}
"""At a short context, where one 512-bit product takes two cycles; the time of fewer bits has less
reading and more unpacking in it."""
WIDTH_TARGETS = {"Q8_0": WIDTHS_OF_8_BITS, **dict.fromkeys(KINDS[1:], WIDTHS_OF_FEWER)}
PLAIN_TARGETS = {"Q8_0": 1.15, "Q6_K": 1.0, "Q4_K_M": 1.3, "Q4_0": 1.25}
LONG = 4096
"""Tokens of context from which on plain steps are a target of their own."""
_LEAST = "at least"


# --- targets --------------------------------------------------------------------------------------


def targets(
    rows: Rows, engines: Mapping[str, Mapping[str, Any]], roof: Mapping[str, Any]
) -> list[Target]:
    """Those of every type of file that an engine of ours has rows of."""
    named = {row["engine"] for row in rows}
    return [
        target
        for kind in PLAIN_TARGETS
        if (own := f"{OURS} {kind}") in named
        for target in [_roof_share(rows, own, engines.get(own, {}), roof), *_targets(rows, kind)]
    ]


def _targets(rows: Rows, kind: str) -> list[Target]:
    own, peer = f"{OURS} {kind}", f"{LLAMA} {kind}"
    short = min((row["context"] for row in rows if "context" in row), default=0)
    long = sorted({row["context"] for row in rows if row.get("context", 0) >= LONG})
    times = {width: forward(rows, own, width, short) for width in (1, *WIDTH_TARGETS[kind])}
    modes = [
        find(rows, engine=own, measure="generate", mode=mode).get("tokens_per_second")
        for mode in ("default", "plain")
    ]
    memory = find(rows, engine=own, measure="memory")
    used = ratio(memory.get("loaded_bytes"), memory.get("needed_bytes"))

    def over(name: str, wanted: float, key: str, **where: Any) -> Target:
        """Ours over the peer's; of times theirs over ours."""
        ours, theirs = (find(rows, engine=engine, **where).get(key) for engine in (own, peer))
        value = ratio(theirs, ours) if key == "ms" else ratio(ours, theirs)
        return Target(f"{name}, {own} over {peer}", value, wanted, _LEAST)

    step, plain = {"measure": "forward", "width": 1}, {"measure": "generate", "mode": "plain"}
    return [
        over("plain decoding", PLAIN_TARGETS[kind], "decode_tokens_per_second", **plain),
        *(
            Target(f"{own}, T({width})/T(1), context {short}", ratio(times[width], times[1]), most)
            for width, most in WIDTH_TARGETS[kind].items()
        ),
        *(
            over(f"plain step after {each} tokens", 1.1, "ms", **step, context=each)
            for each in long
        ),
        over("verifying 8 tokens", 3.0, "ms", measure="forward", width=8, context=64),
        over("prefill of 512", 2.5, "ms", measure="prefill"),
        Target(f"speculation over plain, {own}", ratio(*modes), 2.0, _LEAST),
        over("16 sequences", 3.0, "tokens_per_second", measure="parallel", sequences=16),
        Target(f"{own}, peak memory over weights and KV", used, 1.1),
    ]


def _roof_share(rows: Rows, name: str, facts: Mapping[str, Any], roof: Mapping[str, Any]) -> Target:
    """Bytes that a forward over one token must read, in its time, against the measured roof."""
    time, share = forward(rows, name, 1), None
    if time and facts:
        read = facts["weight_bytes"] + 64 * facts["kv_bytes_per_token"]
        share = ratio(read / (time / 1000), roof["bytes_per_second"])
    return Target(f"{name}, share of the read bandwidth at width 1", share, 0.85, _LEAST)


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
    if sampler.kernels:
        sampler.kernels.set_threads(threads)
        found["bytes_per_second"] = sampler.kernels.bandwidth(ROOF_MEGABYTES) * 1e9
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
