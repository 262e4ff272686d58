"""What the comparisons of models from disk share: whose memory is limited how, and the turns.

The arm with all weights in memory comes first and ends, since it says what answers have to be. The
others stay open together, each in a control group of its own with as much memory, and answer each
prompt in turn: a disk is at times twice as fast as at others, so only what was answered within one
round is compared. Sequential reads past the cache take their turn too. Knows no model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import Sample, note, take_turns
from peers_client import LLAMA, OURS, Engine, Worker
from peers_models import MissingPeerError

from paceline.core.memory import memory
from paceline.profiling.doctor import disk_rate

DISK = "disk"
"""The arm that reads."""
GROUPS = {  # where a group may be made, its file for the limit and the one for processes
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "tasks"),
    Path("/sys/fs/cgroup"): ("memory.max", "cgroup.procs"),
}


@contextmanager
def memory_group(limit: int, name: str) -> Iterator[Path | None]:
    """The file through which a process joins a group of so much memory; None where none is made."""
    for root, (limit_file, tasks) in GROUPS.items():
        group = root / f"paceline-{os.getpid()}-{name.replace(' ', '-')}"
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


def answers_in_turns(
    arms: Sequence[str],
    resident: str,
    limit: int,
    files: Sequence[Path],
    opened: Callable[[str, Path | None], Worker],
    answered: Callable[[Worker, str, Any], dict[str, Any]],
    items: Sequence[Hashable],
) -> tuple[list[Sample], dict[str, int]]:
    """What all arms answered, and the most memory that each of their processes took.

    Args:
        resident: the arm that has all in memory.
        limit: bytes of each of the others.
        files: of the model; the disk's rate is that of reading those of Paceline's.
        opened: starts an arm's process, in a group where there is one.
    """
    streamed = [arm for arm in arms if arm != resident]
    _, available = memory()
    if available is not None and available < limit * len(streamed):
        sys.exit(
            f"{len(streamed)} arms of {limit >> 20} MB each stay open together, and "
            f"{available >> 20} MB are available: name fewer with --arms"
        )
    samples: list[Sample] = []
    peaks: dict[str, int] = {}
    for together in ([arm for arm in arms if arm == resident], streamed):
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for arm in together:
                for path in files:
                    drop_cached(path)
                has_limit = arm != resident
                group = stack.enter_context(memory_group(limit, arm)) if has_limit else None
                try:
                    workers[arm] = opened(arm, group)
                except MissingPeerError as error:
                    note(f"{arm}: {error}")
                    continue
                stack.callback(workers[arm].close)
            turns: dict[str, Callable[[Any], Any]] = {
                arm: lambda item, arm=arm, worker=worker: _told(
                    arm, item, answered(worker, arm, item)
                )
                for arm, worker in workers.items()
            }
            if together is streamed:
                turns[DISK] = lambda _: {"bytes_per_second": _rate_of(files)}
            samples += take_turns(turns, items, 1, lambda facts: facts)
            peaks |= {arm: worker.ask("usage")["peak"] for arm, worker in workers.items()}
    return samples, peaks


def _rate_of(files: Sequence[Path]) -> float:
    """Of reading what Paceline reads from its beginning to its end: a part alone that is read again
    and again comes faster from the caches of a virtual disk."""
    packed = {path: path.stat().st_size for path in files if path.suffix == ".safetensors"}
    seconds = sum(size / disk_rate(path, size) for path, size in packed.items())
    return sum(packed.values()) / seconds


def _told(arm: str, item: Hashable, facts: dict[str, Any]) -> dict[str, Any]:
    note(f"{arm}, {item}: {facts['tokens']} tokens in {facts['seconds']:.1f} s")
    return facts


def engine_of(arm: str) -> Engine:
    """What an arm's worker is started from; it has a log of its own."""
    if arm == LLAMA:
        return Engine(LLAMA, "peers_llama.py", "", (), "llama", lambda m: {"model": m})
    name, program = f"{OURS} streaming {arm}", "streaming_worker.py"
    return Engine(name, program, "", (), None, lambda m: {"model": m, "dtype": "auto"})


def until_llama_stops(worker: Worker, tokens: list[int], count: int) -> dict[str, Any]:
    """llama.cpp's greedy answer; the clock begins behind the prompt, as it does for the others."""
    prompt = {"token_ids": tokens}
    found = worker.ask("generate", mode="plain", prompt=prompt, max_tokens=count)
    return {**found, "seconds": found["seconds"] - found["first"]}


def tokens_rate(sample: Sample) -> float:
    """Tokens per second behind the prompt."""
    return float((sample.facts["tokens"] - 1) / sample.facts["seconds"])


def bytes_rate(sample: Sample) -> float:
    """Bytes per second that came from disk for an answer."""
    return float(sample.facts["bytes_read"] / sample.facts["seconds"])


def read_rate(sample: Sample) -> float:
    """Bytes per second of a sample of :data:`DISK`."""
    return float(sample.facts["bytes_per_second"])


def over(
    samples: Sequence[Sample],
    others: Sequence[Sample],
    rate: Callable[[Sample], float] = tokens_rate,
    others_rate: Callable[[Sample], float] = tokens_rate,
) -> float | None:
    """The median of one arm's rate over another's in the same round; None without such rounds."""
    known = {sample.item: others_rate(sample) for sample in others if not sample.failed}
    ratios = [
        rate(sample) / known[sample.item]
        for sample in samples
        if sample.item in known and not sample.failed
    ]
    return median(ratios) if ratios else None
