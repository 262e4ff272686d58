"""Writes the tables of the documentation from the results, between the markers that name them.

    <!-- begin: step_overhead -->
    <!-- end -->

What stands between two markers is replaced, in the README and on every page of ``docs``; all
tables but the README's are in ``docs/results``. ``--check`` writes nothing and exits 1 when a page
differs from what the results say. Every figure comes from a JSON file of ``benchmarks/results``;
nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT
from render_tables import BUILDERS, SUMMARIES, provenance
from report import RESULTS

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- begin: (\w+) -->\n)(.*?)(<!-- end(?:: \2)? -->)", re.DOTALL)
NOTHING = "*Not measured yet.*\n"


def block(marker: str, results: Path) -> str:
    """What belongs between the markers: each device's tables, devices in order of their folders.

    Raises:
        ValueError: nothing can be shown under this name.
    """
    if marker in SUMMARIES:
        benchmark, summarise = SUMMARIES[marker]
        documents = saved(benchmark, results)
        return "\n".join(summarise(documents) if documents else [NOTHING])
    if marker not in BUILDERS:
        known = ", ".join((*SUMMARIES, *BUILDERS))
        raise ValueError(f"no table is called {marker!r}; there are {known}")
    benchmark, build = BUILDERS[marker]
    parts = []
    for document in saved(benchmark, results):
        parts += [provenance(document), *build(document)]
    return "\n".join(parts or [NOTHING])


def saved(benchmark: str, results: Path) -> list[dict[str, Any]]:
    """A benchmark's documents of all devices, in order of their folders."""
    files = sorted(results.glob(f"*/{benchmark}.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def rendered(text: str, results: Path) -> str:
    """A page brought up to date; an empty block stays empty until there are results."""

    def fill(found: re.Match[str]) -> str:
        tables = block(found[2], results)
        if tables == NOTHING and not found[3].strip():
            return found[0]
        return f"{found[1]}\n{tables}\n{found[4]}"

    return BLOCK.sub(fill, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the documentation's tables from results.")
    parser.add_argument("--check", action="store_true", help="exit 1 when a page is out of date")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("pages", nargs="*", type=Path)
    options = parser.parse_args(argv)
    stale = []
    for page in options.pages or [page for page in PAGES if page.exists()]:
        text = page.read_text(encoding="utf-8")
        current = rendered(text, options.results)
        if current == text:
            continue
        stale.append(page)
        if not options.check:
            page.write_text(current, encoding="utf-8")
        print(f"{page}: {'out of date' if options.check else 'written'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
