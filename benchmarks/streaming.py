"""A model that does not fit in memory: layers from disk, with and without speculation.

Every engine runs in a process of its own, in a control group whose memory is a part of the file's
size: Paceline with ``--weight-memory``, plainly, with suffix matching and with a draft model, and
llama.cpp, which maps the file. Beside them, without a limit: Paceline with all weights in memory,
whose answers have to be the same. Times and counts begin behind the prompt. What of the disk's rate
is used is the bytes that were read per second over those of a sequential read of the file past the
cache, of which there is one before each engine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import Sample, arguments, chosen, names, note, raw, take_turns
from peers_client import LLAMA, OURS, Engine, Worker
from peers_models import MissingPeerError
from prompt_sets import load_prompts, spread
from report import Report, Row, Target, grid, identical_target, markdown

from paceline.models.checkpoint import load_checkpoint
from paceline.workbench.doctor import disk_rate

PLAIN, SUFFIX, DRAFT, RESIDENT = "plain", "suffix", "draft model", "in memory, plain"
CODE, EDITS, PROSE = KINDS = ("humaneval", "edits", "prose")
SUFFIXES = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
GROUPS = {  # where a group may be made, its file for the limit and the one for processes
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "tasks"),
    Path("/sys/fs/cgroup"): ("memory.max", "cgroup.procs"),
}


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """The file through which a process joins a group of so much memory; None where none is made."""
    for root, (limit_file, tasks) in GROUPS.items():
        group = root / f"paceline-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit_file).write_text(str(limit))
        except OSError:
            continue
        try:
            yield group / tasks
        finally:
            time.sleep(0.5)  # processes that have ended leave it
            group.rmdir()
        return
    note("no control group can be made here: nothing but --weight-memory limits anybody")
    yield None


def drop_cached(path: Path) -> None:
    """What the system holds of a file: pages that another group read count for nobody."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(options: argparse.Namespace, report: Report) -> None:
    prompts = load_prompts().sets
    tokenizer = load_checkpoint(options.packed).tokenizer
    assert tokenizer is not None
    items = [
        (kind, temperature, index)
        for kind in options.kinds
        for temperature in options.temperatures
        for index in range(options.num_prompts)
    ]
    encoded = {
        kind: [tokenizer.encode(text)[: options.prompt_tokens] for text in texts]
        for kind in options.kinds
        for texts in [spread(prompts[kind], options.num_prompts)]
    }
    limits = {"weight_memory": options.weight_memory << 20, "kv_cache_memory": 64 << 20}
    draft = {"method": "draft_model", "model": options.draft, **DRAFTS}
    speculative = {PLAIN: [], SUFFIX: [SUFFIXES], DRAFT: [draft, SUFFIXES], RESIDENT: []}
    files = Engine(
        OURS, "streaming_worker.py", "", (), None, lambda m: {"model": m, "dtype": "auto"}
    )
    llama = Engine(LLAMA, "peers_llama.py", "", (), "llama", lambda m: {"model": m})
    with ExitStack() as stack:
        group = stack.enter_context(memory_group(options.memory << 20))
        report.config["control_group"] = group is not None

        def open_worker(engine: Engine, model: str, tasks: Path | None, **more: Any) -> Worker:
            return Worker(engine, model, options.threads, tasks, **more)

        def one(arm: str, item: tuple[str, float, int]) -> dict[str, Any]:
            kind, temperature, index = item
            tokens = encoded[kind][index]
            if arm == LLAMA:
                prompt = {"token_ids": tokens}
                found = workers[arm].ask(
                    "generate", mode=PLAIN, prompt=prompt, max_tokens=options.llama_tokens
                )
                return {**found, "seconds": found["seconds"] - found["first"]}
            wish = {"token_ids": tokens, "max_tokens": options.max_tokens}
            result: dict[str, Any] = workers[arm].ask("answer", temperature=temperature, **wish)
            return result

        # One after another: what one holds of the file is no other's.
        rates = []
        for arm in options.arms:
            rates.append(disk_rate(Path(options.gguf)))
            for path in [Path(options.gguf), *Path(options.packed).glob("*.safetensors")]:
                drop_cached(path)
            try:
                workers = {
                    arm: open_worker(llama, options.gguf, group)
                    if arm == LLAMA
                    else open_worker(
                        files,
                        options.packed,
                        None if arm == RESIDENT else group,
                        **({} if arm == RESIDENT else limits),
                        speculative=speculative[arm],
                    )
                }
            except MissingPeerError as error:
                note(f"{arm}: {error}")
                continue
            with_rate = [item for item in items if arm != LLAMA or item[1] == 0.0]
            found = take_turns(
                {arm: lambda item, arm=arm: one(arm, item)}, with_rate, 1, lambda facts: facts
            )
            report.samples += [raw(sample, {}) for sample in found]
            report.results += rows(arm, found)
            note(f"{arm}: {report.results[-1]}")
            workers[arm].close()
        report.config["disk_bytes_per_second"] = median(rates)
    compare(report)


DRAFTS = {"num_speculative_tokens": 16, "max_tree_nodes": 48, "max_branching": 3}


def rows(arm: str, samples: Sequence[Sample]) -> list[Row]:
    """Of each kind and temperature the tokens per second behind the prompt."""
    found: list[Row] = []
    cells: dict[tuple[str, float], list[Sample]] = {}
    for sample in samples:
        cells.setdefault(sample.item[:2], []).append(sample)  # type: ignore[index]
    for (kind, temperature), cell in cells.items():
        row: Row = {"arm": arm, "kind": kind, "temperature": temperature}
        if any(sample.error for sample in cell):
            row["error"] = next(sample.error for sample in cell if sample.error)
        else:
            facts = [sample.facts for sample in cell]
            seconds = sum(each["seconds"] for each in facts)
            row["tokens_per_second"] = sum(each["tokens"] - 1 for each in facts) / seconds
            row["answers"] = [each["token_ids"] for each in facts]
            if "bytes_read" in facts[0]:
                row["bytes_per_second"] = sum(each["bytes_read"] for each in facts) / seconds
                decoding = max(1, sum(each["steps"] - 1 for each in facts))
                row["tokens_per_step"] = sum(each["tokens"] - 1 for each in facts) / decoding
        found.append(row)
    return found


def compare(report: Report) -> None:
    """Rates over own plain streaming and over llama.cpp; identity with the resident model."""
    by = {(row["arm"], row["kind"], row["temperature"]): row for row in report.results}
    for (arm, kind, temperature), row in by.items():
        if "tokens_per_second" not in row:
            continue
        plain = by.get((PLAIN, kind, temperature), {}).get("tokens_per_second")
        peer = by.get((LLAMA, kind, 0.0), {}).get("tokens_per_second")
        row["over_plain"] = row["tokens_per_second"] / plain if plain else None
        row["over_llama"] = row["tokens_per_second"] / peer if peer else None
        rate = report.config["disk_bytes_per_second"]
        if row.get("bytes_per_second"):
            row["disk_share"] = row["bytes_per_second"] / rate
        expected = by.get((RESIDENT, kind, temperature), {}).get("answers")
        if expected is not None and arm != LLAMA:
            row["identical"] = row["answers"] == expected
    for row in report.results:
        row.pop("answers", None)


def targets(report: Report) -> list[Target]:
    by = {(row["arm"], row["kind"], row["temperature"]): row for row in report.results}

    def of(arm: str, kind: str, temperature: float, name: str) -> Any:
        return by.get((arm, kind, temperature), {}).get(name)

    def target(name: str, value: Any, wanted: float) -> Target:
        return Target(name, value, wanted, "at least")

    shares = [
        row["disk_share"] for row in report.results if row["arm"] == PLAIN and "disk_share" in row
    ]
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
    parser.add_argument("--draft", required=True, help="draft model that fits")
    parser.add_argument("--memory", type=int, required=True, help="of a control group, in MB")
    parser.add_argument("--weight-memory", type=int, required=True, help="of that, in MB")
    parser.add_argument("--kinds", type=names, default=list(KINDS))
    parser.add_argument("--arms", type=names, default=[RESIDENT, PLAIN, SUFFIX, DRAFT, LLAMA])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="most of a prompt")
    parser.sized("--num-prompts", 4, 1, "of each kind")
    parser.sized("--max-tokens", 96, 24, "of each answer")
    parser.sized("--llama-tokens", 12, 4, "of llama.cpp's answers, which take long")
    options = parser.parse_args(argv)
    options.temperatures = [0.0, 0.8]
    settings = ("memory", "weight_memory", "threads", "num_prompts", "max_tokens", "llama_tokens")
    report = Report("streaming", chosen(options, "quick", *settings))
    report.config["model"] = Path(options.gguf).stem
    run(options, report)
    report.targets = targets(report)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
