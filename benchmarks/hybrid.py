"""Hybrids: their steps beside a dense model's of as many bytes, their states, and speculation.

Steps are measured on GGUF files (``research/random_hybrid.py`` makes files of real shapes): the
hybrid in Paceline and in llama.cpp, the dense model in Paceline, in turns. A step forwards w
tokens, folds what the step before committed into the states, and commits one token; the forward is
then repeated, so that it folds nothing, and a step of as many tokens is rolled back. Speculation is
measured on a hybrid that writes text, such as ``paceline train lm --layers`` makes; where it is a
GGUF file, llama.cpp's server answers the same prompts too, plainly, with its n-grams and with the
draft model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import Sample, arguments, chosen, names, note, raw
from harness import numbers as whole_numbers
from moe import KINDS, SUFFIX, engines, measure_texts, of_speculation
from peers import turns
from peers_client import LLAMA, OURS, Worker
from peers_models import LLAMA_BIN, MissingPeerError, made, write_gguf
from report import Report, Row, Target, grid, markdown, pick
from serve_peers import free_port, serving
from speedup import comparison, open_engines

from paceline import SamplingParams
from paceline.api.outputs import Completion, GenerationOutput
from paceline.cache.state_room import LEAST_NODES, log_bytes, state_bytes
from paceline.cli.options.resolve import without_memory
from paceline.config import parse_speculative_config
from paceline.loading.checkpoint import load_checkpoint

DENSE, SPECULATION, WITH_DRAFT = "dense", "suffix", "suffix and draft model"
SHORT = 64
WIDTHS = (1, 2, 4, 8, 16)
SPARE = 1024
"""Tokens beyond a context, for its steps."""
KV_MEMORY = 3 << 30
"""Bytes for keys, values and states, so that the states of all requests have room."""
REQUESTS, STEPS = 16, 24
"""Of which the states are measured, and how many steps they take."""
WANTED = {"code": 1.5, "edits": 2.0}
Arms = Mapping[str, Worker]


def opened(
    path: str, dense: str, options: argparse.Namespace, stack: ExitStack, report: Report
) -> dict[str, Worker]:
    """Paceline and llama.cpp with the hybrid, and Paceline with the dense model."""
    both, label = engines(path), {"model": Path(path).stem}
    context = max((SHORT, *options.contexts)) + SPARE
    wanted = {OURS: (both[OURS], path), DENSE: (engines(dense)[OURS], dense)}
    wanted |= {LLAMA: (both[LLAMA], path)}
    arms = {}
    for name, (engine, file) in wanted.items():
        note(f"starting {name}: {Path(file).name}")
        try:
            arms[name] = Worker(
                engine, file, options.threads, context=context, kv_cache_memory=KV_MEMORY
            )
        except MissingPeerError as error:
            note(f"{name}: {error}")
            report.results.append({**label, "arm": name, "missing": str(error)})
            continue
        stack.callback(arms[name].close)
    return arms


def one_step(
    worker: Worker, item: tuple[int, int, int], repeats: int, tokens: list[int]
) -> dict[str, Any]:
    """Steps of one kind at a context that the worker has read, or reads first."""
    context, width, accepted = item
    wish = {"context": context, "width": width, "repeats": repeats, "tokens": tokens}
    if worker.engine.name == LLAMA:
        return {"seconds": median(worker.ask("forward", **wish))}
    parts = worker.ask("steps", accepted=accepted, **wish)
    if context == SHORT:  # soon read again, and not left to grow
        worker.ask("forget")
    folds = [a - b for a, b in zip(parts["forward"], parts["again"], strict=True)]
    found = {name: median(seconds) for name, seconds in {**parts, "fold": folds}.items()}
    return {"seconds": found["forward"], **found}


def measure_steps(path: str, dense: str, options: argparse.Namespace, report: Report) -> None:
    """T(w) at a short and at longer contexts; llama.cpp has its turns at the short one alone, and
    the dense model none at the longest, which it would take minutes to read."""
    draw = random.Random(0)
    tokens = [draw.randrange(1000, 30_000) for _ in range(max((SHORT, *options.contexts)) + SPARE)]
    label = {"model": Path(path).stem}
    with ExitStack() as stack:
        arms = opened(path, dense, options, stack, report)
        report.results.append(label | measure_states(path, arms[OURS], tokens[:SHORT]))
        for context in (SHORT, *options.contexts):
            wide = context == SHORT or context <= options.widest
            wanted = set(arms) if context == SHORT else {OURS, DENSE} if wide else {OURS}
            here = {name: worker for name, worker in arms.items() if name in wanted}
            widths = options.widths if wide else [1]
            items = [(context, w, a) for w in widths for a in sorted({1, w})]
            runs = {
                name: partial(one_step, worker, repeats=options.inner, tokens=tokens)
                for name, worker in here.items()
            }
            samples = turns(runs, items, options.repeat)
            for worker in here.values():
                if worker.engine.name != LLAMA:
                    worker.ask("forget")
            report.samples += [raw(sample, label) for sample in samples]
            report.results += [label | row for row in step_rows(samples)]


def step_rows(samples: Sequence[Sample]) -> list[Row]:
    """By arm, context, width and committed tokens: T(w), and which share of it are commit, rollback
    and what folding takes longer than folding one token, which every token costs in any engine."""
    found: list[Row] = []
    firsts: dict[tuple[str, int], float] = {}
    folds: dict[tuple[str, int, int], float] = {}
    cells: dict[tuple[str, Any], list[Sample]] = {}
    for sample in samples:
        if sample.seconds is not None:
            cells.setdefault((sample.arm, sample.item), []).append(sample)
    for (arm, (context, width, accepted)), here in cells.items():
        seconds = median(sample.seconds or 0.0 for sample in here)
        firsts.setdefault((arm, context), seconds)
        row: dict[str, Any] = {"measure": "step", "arm": arm, "context": context, "width": width}
        row |= {"accepted": accepted, "ms": 1e3 * seconds}
        row["time_ratio"] = seconds / firsts[arm, context]
        if "fold" in here[0].facts:
            parts = {
                name: median(sample.facts[name] for sample in here)
                for name in ("fold", "commit", "rollback")
            }
            whole = seconds + parts["commit"] + parts["rollback"]
            row |= {f"{name}_ms": 1e3 * value for name, value in parts.items()}
            first = folds.setdefault((arm, context, width), parts["fold"])
            row["share"] = max(0.0, sum(parts.values()) - first) / whole
        found.append(row)
    return found


def measure_states(path: str, worker: Worker, tokens: list[int]) -> dict[str, Any]:
    """By how much the memory of a process grows with the states of many requests, beside what
    their states and logs have."""
    shape = load_checkpoint(path, with_tokenizer=False).config.recurrent
    assert shape is not None
    worker.ask("parallel", sequences=1, tokens=tokens, steps=STEPS)
    before = worker.ask("usage")["anonymous"]
    worker.ask("parallel", sequences=REQUESTS, tokens=tokens, steps=STEPS)
    grown = worker.ask("usage")["anonymous"] - before
    keys = (REQUESTS - 1) * (len(tokens) + STEPS) * worker.facts["kv_bytes_per_token"]
    needed = (REQUESTS - 1) * (state_bytes(shape) + (1 + LEAST_NODES) * log_bytes(shape))
    row = {"measure": "states", "arm": OURS, "requests": REQUESTS, "grown": grown - keys}
    return {**row, "needed": needed, "ratio": (grown - keys) / needed}


def measure_speculation(options: argparse.Namespace, report: Report) -> None:
    """Suffix matching, and where a draft model is given the two together, over plain decoding."""
    sources: dict[str, list[dict[str, str]]] = {SPECULATION: [SUFFIX]}
    if options.draft:
        sources[WITH_DRAFT] = [SUFFIX, {"model": options.draft}]
    configs = {arm: without_memory(parse_speculative_config(s)) for arm, s in sources.items()}
    more: dict[str, Any] = {"num_threads": options.threads, "max_num_seqs": 8}
    with ExitStack() as stack:
        arms: dict[str, Any] = open_engines(options, configs, stack, **more)
        for name, words in rivals(options).items():
            try:
                arms[name] = stack.enter_context(llama_server(options, words))
            except MissingPeerError as error:
                report.results.append({"arm": name, "missing": str(error)})
                note(f"{name}: {error}")
        measure_texts(arms, options, report)
    for row in report.results:
        if row["arm"].startswith(LLAMA) and row.get("measure") == "speculation":
            row["measure"] = "rival"


def rivals(options: argparse.Namespace) -> dict[str, list[object]]:
    """llama.cpp's ways of writing, by arm: what its server is told beyond the model."""
    if not options.model.endswith(".gguf"):
        return {}
    ways: dict[str, list[object]] = {"plain": []}
    ways["n-grams"] = ["--spec-type", "ngram-simple"]
    if options.draft and (Path(options.draft) / "config.json").exists():
        file = Path(options.model).with_suffix(".draft.gguf")
        made(file, lambda out: write_gguf(Path(options.draft), out))
        ways["draft model"] = ["--spec-type", "draft-simple", "-md", file]
    return {f"{LLAMA}, {way}": words for way, words in ways.items()}


class LlamaServer:
    """A server of llama.cpp in an engine's place."""

    def __init__(self, url: str) -> None:
        self._url = url

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[GenerationOutput]:
        return [self._answer(*each) for each in zip(prompts, params, strict=True)]

    def _answer(self, prompt: list[int], params: SamplingParams) -> GenerationOutput:
        wish = {"n_predict": params.max_tokens, "temperature": params.temperature}
        wish |= {"seed": params.seed, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        wish |= {"prompt": prompt, "cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(
            f"{self._url}/completion",
            json.dumps(wish).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found = json.load(answer)
        first = found["timings"]["prompt_ms"] / 1e3
        own = Completion(0, token_ids=found["tokens"], time_to_first_token=first)
        return GenerationOutput(prompt, [own])


@contextmanager
def llama_server(options: argparse.Namespace, words: Sequence[object]) -> Iterator[LlamaServer]:
    port = free_port()
    command: list[object] = [LLAMA_BIN / "llama-server", "-m", options.model, "--port", port]
    command += ["-t", options.threads, "-tb", options.threads, "-np", 1, "-c", 1024, "--no-webui"]
    with serving([*command, *words], port) as url:
        yield LlamaServer(url)


def targets(results: Sequence[Row]) -> list[Target]:
    found = []
    for model in dict.fromkeys(row["model"] for row in pick(results, measure="step")):
        found += _of_model(model, pick(results, model=model))
    arm = WITH_DRAFT if pick(results, arm=WITH_DRAFT) else SPECULATION
    for own in pick(results, measure="speculation", arm=arm, temperature=0.0):
        theirs = pick(results, measure="rival", kind=own["kind"], temperature=0.0)
        rates = [row["tokens_per_second"] for row in theirs if "tokens_per_second" in row]
        if rates and "tokens_per_second" in own:
            ratio = own["tokens_per_second"] / max(rates)
            name = f"{own['kind']}: speculation over the best of llama.cpp"
            found.append(Target(name, ratio, 2.0, "at least"))
    return found + of_speculation(results, arm, WANTED)


def _of_model(model: str, rows: Sequence[Row]) -> list[Target]:
    def step(arm: str, context: int, width: int, accepted: int = 1) -> Row:
        wanted = {"arm": arm, "context": context, "width": width, "accepted": accepted}
        return next(iter(pick(rows, measure="step", **wanted)), {})

    def ratio(above: float | None, below: float | None) -> float | None:
        return None if above is None or not below else above / below

    def of(name: str, value: float | None, bound: float, kind: str = "at most") -> Target:
        return Target(f"{model}: {name}", value, bound, kind)

    plain = ratio(step(LLAMA, SHORT, 1).get("ms"), step(OURS, SHORT, 1).get("ms"))
    found = [of("plain decoding over llama.cpp", plain, 1.2, "at least")]
    contexts = dict.fromkeys(row["context"] for row in pick(rows, measure="step", width=8))
    for context in contexts:
        for width in (8, 16):
            ours, theirs = (step(a, context, width).get("time_ratio") for a in (OURS, DENSE))
            name = f"T({width})/T(1) at context {context} over the dense model's"
            found.append(of(name, ratio(ours, theirs), 1.15))
    for row in pick(rows, measure="step", arm=OURS, context=SHORT):
        if row["width"] in (1, 8) and row["accepted"] == row["width"]:
            name = f"committing {row['accepted']}, and rollback, as a share of T({row['width']})"
            found.append(of(name, row["share"], 0.02))
    states = pick(rows, measure="states")
    found += [of("memory of 16 requests over states and logs", s["ratio"], 1.05) for s in states]
    return found


def tables(results: Sequence[Row]) -> list[str]:
    found = []
    steps = pick(results, measure="step")
    if steps:
        columns = (
            *(("file", "model"), ("engine", "arm"), ("context", "context"), ("rows", "width")),
            *(("committed", "accepted"), ("ms", "ms", 2), ("T(w)/T(1)", "time_ratio", 2)),
            *(("fold, ms", "fold_ms", 3), ("commit, ms", "commit_ms", 3)),
            *(("rollback, ms", "rollback_ms", 3), ("share", "share", 3)),
        )
        found.append(markdown(*grid(steps, *columns)))
        found.append(markdown(*grid(long_rows(steps), *LONG)))
    states = pick(results, measure="states")
    if states:
        columns = (
            *(("file", "model"), ("requests", "requests")),
            ("memory, MB", lambda row: row["grown"] / 1e6, 1),
            ("states and logs, MB", lambda row: row["needed"] / 1e6, 1),
            ("ratio", "ratio", 2),
        )
        found.append(markdown(*grid(states, *columns)))
    speculation = pick(results, measure="speculation")
    if speculation:
        found.append(comparison(speculation, {"text": "kind", "temperature": "temperature"}))
    theirs = pick(results, measure="rival")
    if theirs:
        found.append(comparison(theirs, {"text": "kind", "temperature": "temperature"}))
    return found


LONG = (
    *(("file", "model"), ("engine", "arm"), ("context", "context"), ("ms", "ms", 2)),
    *(("over the shortest", "longer", 2), ("share of attention", "attention", 2)),
)


def long_rows(steps: Sequence[Row]) -> list[Row]:
    """Plain steps after each context; what a longer one adds is attention, as states do not
    grow."""
    plain = [row for row in steps if row["width"] == 1 and row["arm"] != LLAMA]
    shortest = {(r["model"], r["arm"]): r["ms"] for r in plain if r["context"] == SHORT}
    found = []
    for row in plain:
        first = shortest[row["model"], row["arm"]]
        longer = row["ms"] / first
        found.append({**row, "longer": longer, "attention": max(0.0, 1.0 - 1.0 / longer)})
    return found


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument(
        "--files",
        type=names,
        default=[],
        help="GGUF files whose steps are measured, each followed by its dense model's",
    )
    parser.add_argument("--model", help="a hybrid that writes text, for speculation")
    parser.add_argument("--draft", help="a draft model for it")
    parser.add_argument("--name", help="of the results: hybrid-NAME (default: hybrid)")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: 2)")
    parser.add_argument("--kinds", type=names, default=list(KINDS))
    parser.add_argument("--widest", type=int, default=8000, help="longest context of wide steps")
    parser.sized("--widths", list(WIDTHS), [1, 8], "rows of a step", type=whole_numbers)
    parser.sized("--contexts", [8000, 32_000], [512], "beyond the short one", type=whole_numbers)
    parser.sized("--num-prompts", 8, 2, "of each kind")
    parser.sized("--max-tokens", 96, 48, "per prompt")
    parser.sized("--repeat", 3, 1, "turns of everything")
    options = parser.parse_args(argv)
    if len(options.files) % 2:
        parser.error("--files are pairs: a hybrid's, and a dense model's")
    options.inner = 3 if options.quick else 7
    options.widths = sorted({1, *options.widths})
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    settings = ("quick", "threads", "widths", "contexts", "num_prompts", "max_tokens", "repeat")
    files = [Path(each).name for each in options.files]
    name = f"hybrid-{options.name}" if options.name else "hybrid"
    report = Report(name, {**chosen(options, *settings), "files": files})
    for path, dense in zip(options.files[::2], options.files[1::2], strict=True):
        measure_steps(path, dense, options, report)
    if options.model:
        measure_speculation(options, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
