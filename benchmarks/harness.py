"""What all benchmarks share: options, runs in turns, statistics, and the report of the outcome.

A benchmark is its workload and its tables; the rest is here. Knows nothing of what is measured. An
arm that raises becomes a failed sample, which carries its error and no number; a target that rests
on it has no value and is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from paceline.models.threads import num_threads

ROOT = Path(__file__).resolve().parent.parent
Item = TypeVar("Item")
SOURCES = ("auto", "public", "embedded")
"""Of prompts."""
PLAIN, CONTROL = "plain", "plain again"
"""The arm that others are compared with, and the same again, which shows the machine's unrest."""
COUNTED = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
"""Counters that every run of an arm reports."""
BOOTSTRAP_DRAWS = 2000
CONFIDENCE = 0.95


class Options(argparse.ArgumentParser):
    """A parser that knows that some options have another default in a quick run."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=(description or "").split("\n")[0])
        self._sizes: dict[str, tuple[Any, Any]] = {}

    def sized(self, name: str, whole: Any, quick: Any, text: str = "", **more: Any) -> None:
        """An option whose default depends on ``--quick``; numbers, unless ``type`` says more."""
        shown = [",".join(map(str, v)) if isinstance(v, list) else v for v in (whole, quick)]
        words = f"{text} (default: {shown[0]}, quick: {shown[1]})".strip()
        added = self.add_argument(name, help=words, **{"type": type(whole), **more})
        self._sizes[added.dest] = whole, quick

    def parse_args(self, *given: Any, **named: Any) -> Any:
        found = super().parse_args(*given, **named)
        for name, sizes in self._sizes.items():
            if getattr(found, name) is None:
                setattr(found, name, sizes[found.quick])
        return found


def arguments(description: str | None, prompts: bool = False) -> Options:
    """The options that every benchmark has.

    Args:
        prompts: its prompts can be chosen.
    """
    parser = Options(description)
    parser.add_argument("--quick", action="store_true", help="a reduced run, at most two minutes")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line on stdout")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    parser.add_argument(
        "--save", action="store_true", help="also write it to benchmarks/results/DEVICE/NAME.json"
    )
    if prompts:
        parser.add_argument("--prompts", choices=SOURCES, default="auto")
    return parser


def names(text: str) -> list[str]:
    """An option's value: words with commas between them."""
    return [word.strip() for word in text.split(",") if word.strip()]


def among(allowed: Iterable[Item]) -> Callable[[str], list[Item]]:
    """The type of an option that takes some of these words or numbers."""
    known = {str(each): each for each in allowed}

    def some(text: str) -> list[Item]:
        for word in (found := names(text)):
            if word not in known:
                wrong = f"{word!r} is unknown; allowed: {', '.join(known)}"
                raise argparse.ArgumentTypeError(wrong)
        return [known[word] for word in found]

    return some


def numbers(text: str) -> list[int]:
    """An option's value: whole numbers with commas between them."""
    return [int(word) for word in names(text)]


def chosen(options: argparse.Namespace, *settings: str) -> dict[str, Any]:
    """These options by name, for a report."""
    return {name: getattr(options, name) for name in settings}


def note(text: str) -> None:
    """Progress and warnings; standard output is kept for tables and the JSON line."""
    print(text, file=sys.stderr, flush=True)


# --- samples --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one arm on one item.

    Attributes:
        seconds: wall time; None when the run failed.
        facts: what was counted about its result, outside the measured time.
        error: why it failed; None when it did not.
    """

    arm: str
    item: Hashable
    repeat: int = 0
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None


def run_sample(
    arm: str,
    item: Hashable,
    run: Callable[[], Any],
    count: Callable[[Any], Mapping[str, Any]],
    repeat: int = 0,
) -> Sample:
    """Time one run, and count its result afterwards with the code that counts for every arm."""
    try:
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        return Sample(arm, item, repeat, seconds, dict(count(result)))
    except Exception as error:
        note(f"{arm}, {item}: failed: {error!r}")
        return Sample(arm, item, repeat, error=repr(error))


def first_error(samples: Iterable[Sample]) -> str | None:
    return next((sample.error for sample in samples if sample.failed), None)


def raw(sample: Sample, label: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as it is kept: everything but the tokens and texts themselves."""
    facts = {n: value for n, value in sample.facts.items() if n not in ("token_ids", "answers")}
    kept = {"arm": sample.arm, "item": sample.item, "repeat": sample.repeat}
    return {**label, **kept, "seconds": sample.seconds, **facts, "error": sample.error}


def take_turns(
    arms: Mapping[str, Callable[[Any], Any]],
    items: Sequence[Hashable],
    repeats: int,
    count: Callable[[Any], Mapping[str, Any]],
) -> list[Sample]:
    """Run every arm on every item; the order of the arms is reversed in every other turn.

    With two arms that is A B B A A B B A ..., so that a machine that drifts favours neither.
    """
    samples, turn = [], 0
    for repeat in range(repeats):
        for item in items:
            order = list(arms.items())
            for arm, run in order if turn % 2 == 0 else reversed(order):
                samples.append(run_sample(arm, item, lambda: run(item), count, repeat))  # noqa: B023
            turn += 1
    return samples


# --- statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """How often one duration fits into another, with a bootstrap interval.

    Attributes:
        value: sum over the items of the median numerator, over that of the denominator.
        low, high: percentile interval; items are drawn, then pairs within them.
        median: of the ratios of the single pairs.
    """

    value: float
    low: float
    high: float
    median: float
    pairs: int


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of no values."""
    return statistics.geometric_mean(values) if values else None


Pairs = Sequence[tuple[float, float]]


def paired_ratio(items: Sequence[Pairs], draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> Ratio:
    """The ratio of paired durations, one sequence of (numerator, denominator) per item."""
    items = [pairs for pairs in items if pairs]
    if not items:
        raise ValueError("no pair of samples succeeded")
    rng = random.Random(seed)
    drawn = sorted(
        _ratio_of_sums([_redrawn(rng.choice(items), rng) for _ in items]) for _ in range(draws)
    )
    tail = (1 - CONFIDENCE) / 2
    single = [above / below for pairs in items for above, below in pairs]
    return Ratio(
        value=_ratio_of_sums(items),
        low=drawn[int(tail * draws)],
        high=drawn[min(draws - 1, int((1 - tail) * draws))],
        median=statistics.median(single),
        pairs=len(single),
    )


def _redrawn(pairs: Pairs, rng: random.Random) -> Pairs:
    return rng.choices(pairs, k=len(pairs))


def _ratio_of_sums(items: Sequence[Pairs]) -> float:
    above = sum(statistics.median(pair[0] for pair in pairs) for pairs in items)
    return above / sum(statistics.median(pair[1] for pair in pairs) for pairs in items)


def pair_up(samples: Iterable[Sample], above: str, below: str) -> list[list[tuple[float, float]]]:
    """Durations of two arms in the same turn, item by item; a turn with a failure is left out."""
    found: dict[Hashable, dict[int, dict[str, float]]] = {}
    for sample in samples:
        if sample.seconds is not None:
            turns = found.setdefault(sample.item, {})
            turns.setdefault(sample.repeat, {})[sample.arm] = sample.seconds
    return [
        [(turn[above], turn[below]) for turn in turns.values() if above in turn and below in turn]
        for turns in found.values()
    ]


def against_plain(samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """One row: an arm against the plain one, whether their tokens are the same, or its error."""
    own = [sample for sample in samples if sample.arm == arm]
    plain = [sample for sample in samples if sample.arm == PLAIN]
    error = first_error([*own, *plain])
    if error is not None:
        return {"arm": arm, "error": error}
    expected = {(s.item, s.repeat): s.facts["token_ids"] for s in plain}
    steps = sum(sample.facts["num_steps"] for sample in own)
    tokens = sum(sample.facts["output_tokens"] for sample in own)
    return {
        "arm": arm,
        "speedup": asdict(paired_ratio(pair_up(samples, PLAIN, arm))),
        "plain_tokens_per_second": _rate(plain),
        "tokens_per_second": _rate(own),
        "output_tokens": tokens,
        "mean_acceptance_length": tokens / steps if steps else 0.0,
        "identical": all(s.facts["token_ids"] == expected[s.item, s.repeat] for s in own),
    }


def _rate(samples: Sequence[Sample]) -> float:
    tokens = sum(sample.facts["output_tokens"] for sample in samples)
    return tokens / sum(sample.seconds or 0.0 for sample in samples)


RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Target:
    """What was aimed at, and what was measured if anything was."""

    name: str
    value: float | None
    target: float
    bound: str = "at most"

    def __post_init__(self) -> None:
        if self.bound not in ("at most", "at least"):
            raise ValueError(f"bound is {self.bound!r}; allowed: 'at most' and 'at least'")

    @property
    def met(self) -> bool:
        if self.value is None or self.value != self.value:
            return False
        return self.value <= self.target if self.bound == "at most" else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        value = None if self.value != self.value else self.value  # JSON knows no NaN
        return {**asdict(self), "value": value, "met": self.met}


@dataclass(slots=True)
class Report:
    """``samples`` are raw; ``results`` are derived from them, one mapping per table row."""

    benchmark: str
    config: dict[str, Any]
    samples: list[Any] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def document(self, device: str) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "device": device_name(device),
            "commit": commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(device),
            "config": self.config,
            "num_failed": sum(1 for sample in self.samples if _failed(sample)),
            "results": self.results,
            "targets": [target.to_json() for target in self.targets],
            "samples": [asdict(s) if isinstance(s, Sample) else s for s in self.samples],
        }

    def finish(self, options: argparse.Namespace, tables: Sequence[str]) -> int:
        """Print, save, and end with the JSON line.

        Returns:
            The exit code: 1 when a sample failed. A target that is not met is a result.
        """
        document = self.document(options.device)
        line = json.dumps(document)
        if not options.json:
            print(*tables, sep="\n\n")
            shown = table(*target_grid(document["targets"], lambda met: "yes" if met else "NO"))
            print(f"\n{shown}\n" if self.targets else "")
        files = [options.output] if options.output else []
        if options.save:
            files.append(RESULTS / slug(document["device"]) / f"{self.benchmark}.json")
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_by_key(document), encoding="utf-8")
            note(f"saved {file}")
        print(line, flush=True)
        return 1 if document["num_failed"] else 0


def _by_key(document: dict[str, Any]) -> str:
    """The document with one key, or one row of the results, per line: small and readable diffs.

    It names no folder of the machine that it was made on.
    """
    lines = []
    for key, value in document.items():
        text = json.dumps(value)
        if key in ("results", "targets") and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    return text.replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")


def _failed(sample: Any) -> bool:
    return sample.failed if isinstance(sample, Sample) else sample.get("error") is not None


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text under their headers; the first to the left, numbers to the right."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths)))  # noqa: B905
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; the first column is text, the others are aligned to the right."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    lines = [headers, rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def yes(value: bool) -> str:
    return "yes" if value else "**no**"


def ratio_cell(row: Mapping[str, Any]) -> str:
    ratio = row.get("speedup")
    return f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"


Row = Mapping[str, Any]
Key = str | Callable[[Row], object]


def grid(
    rows: Iterable[Mapping[str, Any]], *columns: tuple[str, Key] | tuple[str, Key, int]
) -> tuple[list[str], list[list[object]]]:
    """Headers and cells of a table.

    Args:
        columns: a header; a key of the row (``a/b`` is a key in a mapping under one) or a function
            of it; and for a number its digits.
    """
    return [column[0] for column in columns], [
        [_cell(row, *column[1:]) for column in columns] for row in rows
    ]


def _cell(row: Any, key: Key, digits: int | None = None) -> object:
    if not isinstance(key, str):
        row = key(row)
    else:
        for part in key.split("/"):
            row = None if row is None else row.get(part)
    return number(row, digits) if digits is not None else "-" if row is None else row


def target_grid(
    targets: Iterable[Mapping[str, Any]], verdict: Callable[[bool], str]
) -> tuple[list[str], list[list[object]]]:
    """Of targets as a document has them."""
    return grid(
        targets,
        ("target", "name"),
        ("measured", "value", 2),
        ("wanted", lambda t: f"{t['bound']} {t['target']:g}"),
        ("met", lambda t: verdict(t["met"])),
    )


def identical_target(results: Sequence[Mapping[str, Any]], what: str = "output") -> Target:
    """The share of rows with the same output in all arms; no value where a row failed."""
    done = bool(results) and all("error" not in row for row in results)
    same = sum(bool(row.get("identical")) for row in results)
    name = f"share of rows with identical {what}"
    return Target(name, same / len(results) if done else None, 1.0, "at least")


def interval(ratio: Mapping[str, Any], digits: int = 2) -> str:
    return f"{number(ratio.get('low'), digits)} to {number(ratio.get('high'), digits)}"


def verdict(row: Mapping[str, Any]) -> str:
    """A cell: whether outputs are identical, or why there are none."""
    return row.get("error") or ("yes" if row["identical"] else "NO")


def pick(rows: Iterable[Mapping[str, Any]], **wanted: object) -> list[Mapping[str, Any]]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def number(value: float | None, digits: int = 2) -> str:
    """A cell; what was not measured is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


# --- where it ran ---------------------------------------------------------------------------------


def device_name(device: str) -> str:
    """The accelerator's name, or the processor's with its number of cores.

    Clouds give processors of several generations one name, so what multiplies bytes is part of it.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        text = cpuinfo.read_text()
        found = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
        model = (found[1] if found else model) + zen(text)
        flags = {"amx_int8": "AMX", "avx512_vnni": "AVX-512 VNNI"}
        known = [name for flag, name in flags.items() if re.search(rf"\b{flag}\b", text)]
        model += f" with {known[0]}" if known else ""
    return f"{re.sub(r'[(]R[)]|[(]TM[)]', '', model)}, {os.cpu_count()} cores"


def zen(cpuinfo: str) -> str:
    """The generation of an AMD server processor, of which clouds name none; else nothing.

    Families and models as AMD's manuals of the processors assign them.
    """
    numbers = re.findall(r"^(?:cpu family|model)\s*: *(\d+)$", cpuinfo, re.MULTILINE)[:2]
    if "AuthenticAMD" not in cpuinfo or len(numbers) < 2:
        return ""
    family, model = map(int, numbers)
    if family == 25:
        return " (Zen 4)" if model // 16 in (1, 6, 7, 10) else " (Zen 3)"
    return {23: " (Zen 2)", 26: " (Zen 5)"}.get(family, "") if model >= 48 or family > 23 else ""


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def machine(device: str) -> dict[str, Any]:
    """Versions, threads, and how busy the machine was when the benchmark ended."""

    versions = {"python": platform.python_version()}
    for package in ("paceline", "torch", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "torch_device": device,
        "torch_threads": num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }


def commit() -> str:
    """The commit that ran; ``-modified`` when the measured code differs from it."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "csrc", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("-modified" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
