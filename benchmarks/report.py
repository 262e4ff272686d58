"""A benchmark's outcome: its targets, its tables, and the JSON document that says where it ran.

Knows nothing of what is measured. A target without a value (nothing was measured, or a sample
behind it failed) is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness import ROOT, Sample, note

from paceline.models.threads import num_threads

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
