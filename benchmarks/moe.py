"""Mixtures of experts: steps beside the bytes that they read, and what speculation brings.

Steps are measured on GGUF files, in Paceline and llama.cpp in turns (``research/random_mixture.py``
makes files of real shapes). A step of w rows reads the dense weights once and each expert that one
of its rows chose once; Paceline counts these. Speculation is measured on a mixture that writes
text, such as ``paceline train lm --num-experts`` makes, with the planner that prices the experts
which a draft node adds and with the same planner that does not.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import gguf
from harness import CONTROL, PLAIN, Sample, against_plain, arguments, chosen, names, note, raw
from harness import numbers as whole_numbers
from peers import PREFILL, ROOF_MEGABYTES, middle, read_bandwidth, turns
from peers_client import LLAMA, OURS, Engine, Worker
from peers_models import MissingPeerError
from prompt_sets import load_prompts, spread
from report import Report, Row, Target, grid, identical_target, markdown, pick
from speedup import (
    MAX_MODEL_LEN,
    TEMPERATURES,
    behind_prompt,
    comparison,
    open_engines,
    run_cell,
)

from paceline import LLM
from paceline.api.llm import embedded_model
from paceline.cli.options.prompts import Encoder
from paceline.cli.options.resolve import without_memory
from paceline.config import parse_speculative_config
from paceline.loading.gguf.container import read_container

CONTEXT = 64
WIDTHS = (1, 2, 4, 8)
STACK = "_exps."
PRICED, UNPRICED = "experts priced", "not priced"
KINDS = ("code", "edits", "prose")
SUFFIX = {"method": "suffix"}


def engines(path: str) -> dict[str, Engine]:
    """Both engines on one file."""
    files = {"model": path, "dtype": "auto"}
    return {
        OURS: Engine(OURS, "peers_paceline.py", "", (), None, lambda _: files),
        LLAMA: Engine(LLAMA, "peers_llama.py", "", (), "llama", lambda _: files),
    }


def weights(path: str) -> tuple[int, float]:
    """Bytes that every step reads, and of one expert's matrices in one layer.

    Of the embedding a step reads a few rows, which do not count.
    """
    container = read_container(Path(path))
    sizes = {}
    for name, info in container.tensors.items():
        per_block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type_code)]
        sizes[name] = info.num_elements // per_block * num_bytes
    experts = sum(size for name, size in sizes.items() if STACK in name)
    layers = sum("ffn_down_exps.weight" in name for name in sizes)
    architecture = container.metadata["general.architecture"]
    number = int(container.metadata[f"{architecture}.expert_count"])
    embedding = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    return sum(sizes.values()) - experts - embedding, experts / (number * layers)


def measure_steps(path: str, options: argparse.Namespace, report: Report) -> None:
    draw = random.Random(0)
    tokens = [draw.randrange(1000, 30_000) for _ in range(PREFILL + max(options.widths))]
    dense, expert = weights(path)
    label = {"model": Path(path).stem}
    with ExitStack() as stack:
        arms: dict[str, Worker] = {}
        for name, engine in engines(path).items():
            try:
                arms[name] = Worker(engine, path, options.threads)
            except MissingPeerError as error:
                note(f"{name}: {error}")
                report.results.append({**label, "arm": name, "missing": str(error)})
                continue
            stack.callback(arms[name].close)
        read = {
            w: arms[OURS].ask("experts", width=w, context=CONTEXT, tokens=tokens)
            for w in options.widths
        }

        def one(worker: Worker, item: tuple[str, int]) -> dict[str, Any]:
            if item[0] == "prefill":
                return middle(worker.ask("prefill", tokens=tokens[:PREFILL], repeats=1))
            wish = {"width": item[1], "context": CONTEXT, "repeats": options.inner}
            return middle(worker.ask("forward", tokens=tokens, **wish))

        items = [("forward", w) for w in options.widths] + [("prefill", PREFILL)]
        samples = turns({n: partial(one, w) for n, w in arms.items()}, items, options.repeat)
    report.samples += [raw(sample, label) for sample in samples]
    roof = read_bandwidth(options.threads)["bytes_per_second"]
    report.config["bytes_per_second"] = roof
    for arm in arms:
        report.results += [
            {**label, "arm": arm, **row}
            for row in step_rows(samples, arm, dense, expert, read, roof)
        ]


def step_rows(
    samples: Sequence[Sample],
    arm: str,
    dense: int,
    expert: float,
    read: Mapping[int, int],
    roof: float | None,
) -> list[Row]:
    """T(w) and the bytes of its union, both also relative to one row's; and the prefill."""
    times: dict[Any, list[float]] = {}
    for sample in samples:
        if sample.arm == arm and sample.seconds is not None:
            times.setdefault(sample.item, []).append(sample.seconds)
    found: list[Row] = []
    num_bytes = {w: dense + expert * count for w, count in read.items()}
    for item, values in times.items():
        row: dict[str, Any] = {"measure": item[0], "width": item[1], "ms": 1e3 * median(values)}
        if item[0] == "forward":
            row |= {"experts": read[item[1]], "bytes": num_bytes[item[1]]}
            row["time_ratio"] = median(values) / median(times["forward", 1])
            row["bytes_ratio"] = num_bytes[item[1]] / num_bytes[1]
            row["roof"] = num_bytes[item[1]] / median(values) / roof if roof else None
        found.append(row)
    return found


def measure_speculation(options: argparse.Namespace, report: Report) -> None:
    sources = [SUFFIX, *([{"model": options.draft}] if options.draft else [])]
    config = without_memory(parse_speculative_config(sources))
    more: dict[str, Any] = {"num_threads": options.threads, "max_num_seqs": 8}
    with ExitStack() as stack:
        arms = open_engines(options, {PRICED: config}, stack, **more)
        with patch("paceline.build.build.expert_cost", lambda _: None):
            other = open_engines(options, {UNPRICED: config}, stack, **more)
        arms = {PLAIN: arms[PLAIN], PRICED: arms[PRICED], UNPRICED: other[UNPRICED]} | {
            CONTROL: arms[CONTROL]
        }
        measure_texts(arms, options, report)


def measure_texts(arms: Mapping[str, LLM], options: argparse.Namespace, report: Report) -> None:
    """What speculation brings on each kind of text, at both temperatures, behind the prompt."""
    source, encode = load_prompts(options.prompts), Encoder(arms[PLAIN].tokenizer).encode
    for kind in options.kinds:
        texts = spread(source.kind(kind), options.num_prompts)
        groups = [[encode(text)[-(MAX_MODEL_LEN - options.max_tokens) :]] for text in texts]
        for temperature in TEMPERATURES:
            label = {"model": Path(options.model).name, "kind": kind, "temperature": temperature}
            note(f"{kind}, temperature {temperature}")
            samples = behind_prompt(run_cell(arms, groups, options, temperature))
            report.samples += [raw(sample, label) for sample in samples]
            report.results += [
                {**label, "measure": "speculation", **against_plain(samples, arm)}
                for arm in arms
                if arm != PLAIN
            ]


def targets(results: Sequence[Row]) -> list[Target]:
    found = []
    for model in dict.fromkeys(row["model"] for row in results if "width" in row):
        ours, theirs = (
            {
                (r["measure"], r["width"]): r
                for r in pick(results, model=model, arm=arm)
                if "ms" in r
            }
            for arm in (OURS, LLAMA)
        )
        found += _of_steps(model, ours, theirs)
    return found + of_speculation(results, PRICED, {"code": 1.3, "edits": 1.3})


def of_speculation(results: Sequence[Row], arm: str, wanted: Mapping[str, float]) -> list[Target]:
    """What greedy decoding should gain by kind of text, and all else not lose."""
    found = []
    speculation = pick(results, measure="speculation", arm=arm)
    for row in speculation:
        name = f"{row['kind']}, temperature {row['temperature']}: speculation over own plain"
        gain = wanted.get(row["kind"]) if row["temperature"] == 0 else None
        if gain is None:
            name += ", upper 95 % bound"
        value = row.get("speedup", {}).get("high" if gain is None else "value")
        found.append(Target(name, value, gain or 0.99, "at least"))
    if speculation:
        found.append(identical_target(pick(results, measure="speculation")))
    return found


def _of_steps(model: str, ours: Mapping[Any, Row], theirs: Mapping[Any, Row]) -> list[Target]:
    def ratio(*item: Any) -> float | None:
        return theirs[item]["ms"] / ours[item]["ms"] if item in theirs else None

    found = [
        Target(f"{model}: plain decoding over llama.cpp", ratio("forward", 1), 1.25, "at least"),
        Target(f"{model}: prefill over llama.cpp", ratio("prefill", PREFILL), 2.0, "at least"),
        Target(
            f"{model}: share of the roof at width 1", ours["forward", 1]["roof"], 0.8, "at least"
        ),
    ]
    for width in (4, 8):
        row = ours.get(("forward", width))
        if row is not None:
            name = f"{model}: T({width})/T(1) over the ratio of bytes read"
            found.append(Target(name, row["time_ratio"] / row["bytes_ratio"], 1.15, "at most"))
    return found


def tables(results: Sequence[Row]) -> list[str]:
    steps = [row for row in results if "width" in row]
    found = []
    if steps:
        columns = (
            *(("file", "model"), ("engine", "arm"), ("step", "measure"), ("rows", "width")),
            *(("ms", "ms", 2), ("experts read", "experts"), ("T(w)/T(1)", "time_ratio", 2)),
            *(("bytes(w)/bytes(1)", "bytes_ratio", 2), ("share of roof", "roof", 2)),
        )
        found.append(markdown(*grid(steps, *columns)))
    speculation = pick(results, measure="speculation")
    if speculation:
        found.append(comparison(speculation, {"text": "kind", "temperature": "temperature"}))
    return found


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument(
        "--files", type=names, default=[], help="GGUF files whose steps are measured"
    )
    parser.add_argument("--model", help="a mixture that writes text, for speculation")
    parser.add_argument(
        "--draft",
        help="its draft model (default: the embedded one)",
        default=embedded_model("draft"),
    )
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: 2)")
    parser.add_argument("--kinds", type=names, default=list(KINDS))
    parser.sized("--widths", list(WIDTHS), [1, 4], "rows of a step", type=whole_numbers)
    parser.sized("--num-prompts", 8, 2, "of each kind")
    parser.sized("--max-tokens", 96, 48, "per prompt")
    parser.sized("--repeat", 3, 1, "turns of everything")
    options = parser.parse_args(argv)
    options.inner = 2 if options.quick else 5
    options.widths = sorted({1, *options.widths})
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    settings = ("quick", "threads", "widths", "num_prompts", "max_tokens", "repeat")
    config = {**chosen(options, *settings), "roof_megabytes": ROOF_MEGABYTES}
    report = Report("moe", {**config, "files": [Path(each).name for each in options.files]})
    steps: list[Callable[[], None]] = [
        partial(measure_steps, path, options, report) for path in options.files
    ]
    if options.model:
        steps.append(partial(measure_speculation, options, report))
    for step in steps:
        step()
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
