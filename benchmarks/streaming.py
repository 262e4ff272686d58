"""A model that does not fit in memory: layers from disk, with and without speculation.

Every engine runs in a process of its own, in a control group whose memory is a part of the file's
size: Paceline with ``--weight-memory``, plainly, with suffix matching and with a draft model, and
llama.cpp, which maps the file. They answer each prompt in turn, and how many times as fast as
another one is, is the median over these rounds. Before them, without a limit: Paceline with all
weights in memory, whose answers have to be the same. Times and counts begin behind the prompt. What
of the disk's rate is used is the bytes that were read per second over those of a sequential read of
the file past the cache, of which there is one in each round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import Sample, arguments, chosen, first_error, names, raw
from peers_client import LLAMA, Worker
from prompt_sets import load_prompts, spread
from report import Report, Row, Target, grid, identical_target, markdown
from streaming_arms import (
    DISK,
    answers_in_turns,
    bytes_rate,
    engine_of,
    over,
    read_rate,
    until_llama_stops,
)

from paceline.loading.checkpoint import load_checkpoint

PLAIN, SUFFIX, DRAFT, RESIDENT = "plain", "suffix", "draft model", "in memory, plain"
CODE, EDITS, PROSE = KINDS = ("humaneval", "edits", "prose")
SUFFIXES = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
DRAFTS = {"num_speculative_tokens": 16, "max_tree_nodes": 48, "max_branching": 3}


def run(options: argparse.Namespace, report: Report) -> None:
    prompts = load_prompts().sets
    tokenizer = load_checkpoint(options.packed).tokenizer
    assert tokenizer is not None
    items = [
        (kind, temperature, index)
        for index in range(options.num_prompts)
        for kind in options.kinds
        for temperature in options.temperatures
    ]
    encoded = {
        kind: [tokenizer.encode(text)[: options.prompt_tokens] for text in texts]
        for kind in options.kinds
        for texts in [spread(prompts[kind], options.num_prompts)]
    }
    limits = {"weight_memory": options.weight_memory << 20, "kv_cache_memory": 64 << 20}
    draft = {"method": "draft_model", "model": options.draft, **DRAFTS}
    speculative = {PLAIN: [], SUFFIX: [SUFFIXES], DRAFT: [draft, SUFFIXES], RESIDENT: []}

    def opened(arm: str, group: Path | None) -> Worker:
        if arm == LLAMA:
            return Worker(engine_of(arm), options.gguf, options.threads, group)
        more = {} if arm == RESIDENT else limits
        drafts = speculative[arm]
        return Worker(
            engine_of(arm), options.packed, options.threads, group, speculative=drafts, **more
        )

    def answered(worker: Worker, arm: str, item: tuple[str, float, int]) -> dict[str, Any]:
        kind, temperature, index = item
        tokens = encoded[kind][index]
        if arm == LLAMA:
            return until_llama_stops(worker, tokens, options.plain_tokens)
        count = options.plain_tokens if arm == PLAIN else options.max_tokens
        wish = {"max_tokens": count, "temperature": temperature}
        result: dict[str, Any] = worker.ask("answer", token_ids=tokens, **wish)
        return result

    files = [Path(options.gguf), *Path(options.packed).glob("*.safetensors")]
    limit = options.memory << 20
    samples, _ = answers_in_turns(options.arms, RESIDENT, limit, files, opened, answered, items)
    rates = [read_rate(sample) for sample in samples if sample.arm == DISK and not sample.failed]
    report.config["disk_bytes_per_second"] = median(rates) if rates else None
    report.samples = [raw(sample, {}) for sample in samples]
    report.results = rows(samples)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Of each arm, kind and temperature the tokens per second behind the prompt, and what rounds
    say of it: llama.cpp's is greedy in those of every temperature."""
    cells: dict[tuple[str, str, float], list[Sample]] = {}
    arms: dict[str, list[Sample]] = {}
    for sample in samples:
        arms.setdefault(sample.arm, []).append(sample)
        kind, temperature, _ = sample.item  # type: ignore[misc]
        cell = sample.arm, kind, 0.0 if sample.arm == LLAMA else temperature
        cells.setdefault(cell, []).append(sample)
    return [
        {"arm": arm, "kind": kind, "temperature": temperature}
        | _found(cells[arm, kind, temperature], arms)
        for arm in arms
        for of, kind, temperature in cells
        if of == arm != DISK
    ]


def _found(cell: Sequence[Sample], arms: dict[str, list[Sample]]) -> dict[str, Any]:
    error, facts = first_error(cell), [sample.facts for sample in cell]
    if error is not None:
        return {"error": error}
    seconds = sum(each["seconds"] for each in facts)
    row: dict[str, Any] = {
        "tokens_per_second": sum(each["tokens"] - 1 for each in facts) / seconds,
        "over_plain": over(cell, arms.get(PLAIN, [])),
        "over_llama": over(cell, arms.get(LLAMA, [])),
    }
    if "bytes_read" in facts[0]:
        row["bytes_per_second"] = sum(each["bytes_read"] for each in facts) / seconds
        decoding = max(1, sum(each["steps"] - 1 for each in facts))
        row["tokens_per_step"] = sum(each["tokens"] - 1 for each in facts) / decoding
        if row["bytes_per_second"]:
            row["disk_share"] = over(cell, arms.get(DISK, []), bytes_rate, read_rate)
        said = {s.item: s.facts["token_ids"] for s in arms.get(RESIDENT, []) if not s.failed}
        if said:
            row["identical"] = all(begins(said.get(s.item), s.facts["token_ids"]) for s in cell)
    return row


def begins(answer: list[int] | None, found: list[int]) -> bool:
    """Whether an answer begins with what was found of it."""
    return answer is not None and answer[: len(found)] == found


def targets(report: Report) -> list[Target]:
    by = {(row["arm"], row["kind"], row["temperature"]): row for row in report.results}

    def of(arm: str, kind: str, temperature: float, name: str) -> Any:
        return by.get((arm, kind, temperature), {}).get(name)

    def target(name: str, value: Any, wanted: float) -> Target:
        return Target(name, value, wanted, "at least")

    plain = [row for row in report.results if row["arm"] == PLAIN]
    shares = [row["disk_share"] for row in plain if row.get("disk_share") is not None]
    share = median(shares) if shares else None
    return [
        target("plain: share of the disk's sequential rate", share, 0.9),
        target("code, over own plain", of(DRAFT, CODE, 0.0, "over_plain"), 4.0),
        target("prose, over own plain", of(DRAFT, PROSE, 0.0, "over_plain"), 2.5),
        target("prose, 0.8, over own plain", of(DRAFT, PROSE, 0.8, "over_plain"), 2.0),
        target("code, over llama.cpp", of(DRAFT, CODE, 0.0, "over_llama"), 5.0),
        identical_target([r for r in report.results if "identical" in r], "answers"),
    ]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        *(("engine", "arm"), ("text", "kind"), ("temperature", "temperature", 1)),
        *(("tok/s", "tokens_per_second", 2), ("over plain", "over_plain", 2)),
        *(("over llama.cpp", "over_llama", 2), ("share of the disk", "disk_share", 2)),
        *(("tokens per step", "tokens_per_step", 2), ("identical", "identical")),
    )
    return [markdown(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--packed", required=True, help="folder that paceline convert wrote")
    parser.add_argument("--gguf", required=True, help="the file that it was made of")
    parser.add_argument("--name", required=True, help="of the model, for the result's file")
    parser.add_argument("--draft", required=True, help="draft model that fits")
    parser.add_argument("--memory", type=int, required=True, help="of a control group, in MB")
    parser.add_argument("--weight-memory", type=int, required=True, help="of that, in MB")
    parser.sized("--kinds", list(KINDS), [CODE, PROSE], type=names)
    parser.add_argument("--arms", type=names, default=[RESIDENT, PLAIN, SUFFIX, DRAFT, LLAMA])
    parser.add_argument("--threads", type=int, default=2)
    parser.sized("--prompt-tokens", 256, 96, "most of a prompt")
    parser.sized("--num-prompts", 4, 1, "of each kind")
    parser.sized("--max-tokens", 96, 16, "of each answer")
    parser.sized("--plain-tokens", 24, 8, "of those without drafts, in which all tokens cost alike")
    options = parser.parse_args(argv)
    options.temperatures = [0.0, 0.8]
    settings = ("memory", "weight_memory", "threads", "num_prompts", "max_tokens", "plain_tokens")
    report = Report(f"streaming_layers-{options.name}", chosen(options, "quick", *settings))
    report.config["model"] = Path(options.gguf).stem
    report.config["bytes"] = Path(options.gguf).stat().st_size
    run(options, report)
    report.targets = targets(report)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
