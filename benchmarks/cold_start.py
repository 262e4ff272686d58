"""How long a first answer takes from the command on, with and without torch, and how much disk the
packages take that an installation needs.

Each round begins two processes in turn: the command line answers the same short prompt with the
embedded model, and in one of them torch is imported first, as every start was before it became
optional.

    python benchmarks/cold_start.py [--rounds 7] [--save]
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from statistics import median

from harness import Report, Row, Target, arguments, chosen, grid, note, table
from packaging.requirements import Requirement

ANSWER = "from paceline.cli.main import main; main(['run', '-p', 'hi', '--max-tokens', '8'])"
ARMS = {"as installed": ANSWER, "with torch": f"import torch; {ANSWER}"}
WANTED_SECONDS, WANTED_MB = 1.5, 250


def seconds(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - began


def installed_bytes(package: str, seen: set[str]) -> int:
    """Of a package and all that it requires, each once; extras are left out."""
    if package in seen:
        return 0
    seen.add(package)
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return 0
    paths = (file.locate() for file in found.files or ())
    size = sum(path.stat().st_size for path in paths if path.is_file())
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            size += installed_bytes(requirement.name, seen)
    return size


def tables(rows: Sequence[Row]) -> list[str]:
    columns = (("start", "arm"), ("seconds", "seconds", 2), ("packages, MB", "megabytes", 0))
    return [table(*grid(rows, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.sized("--rounds", 7, 1, "of both processes")
    options = parser.parse_args(argv)
    report = Report("cold_start", chosen(options, "rounds", "quick"))
    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm, code in ARMS.items():
            taken[arm].append(seconds(code))
    note("packages")
    seen: set[str] = set()
    own = installed_bytes("paceline", seen)
    sizes = {"as installed": own, "with torch": own + installed_bytes("torch", seen)}
    for arm in ARMS:
        row = {"arm": arm, "seconds": median(taken[arm]), "megabytes": sizes[arm] / 1e6}
        report.results.append({**row, "samples": taken[arm]})
    first = report.results[0]
    report.targets = [
        Target("seconds from the command to an answer", first["seconds"], WANTED_SECONDS),
        Target("MB of packages without torch", first["megabytes"], WANTED_MB),
    ]
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
