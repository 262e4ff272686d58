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
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import CONTROL, RESULTS, ROOT, markdown, number, pick, ratio_cell, target_grid, yes
from proposer_sets import DEFAULT

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def provenance(document: Document) -> str:
    """Where and when, in one line, above the tables."""
    machine, config = document["machine"], document["config"]
    facts = [
        f"**{document['device']}**",
        f"torch threads: {machine['torch_threads']}",
        f"torch {machine['versions']['torch']}",
        f"commit `{document['commit']}`",
        document["date"],
    ]
    if "prompts" in config:
        facts.append(f"{config['prompts']} prompts")
    if "head" in config:
        facts.append(f"`{config['model']}` with `{config['head']}`")
    if config.get("quick"):
        facts.append("reduced run")
    if document["num_failed"]:
        facts.append(f"{document['num_failed']} failed samples")
    return ", ".join(facts) + "\n"


def target_lines(document: Document) -> str:
    return markdown(*target_grid(document["targets"], yes))


# --- tables that a program makes of its own results ----------------------------------------------

MARKDOWN = {
    "step_overhead": ("step_overhead", "step_overhead"),
    "step_overhead_real": ("step_overhead-*", "step_overhead"),
    "speedup": ("speedup", "speedup"),
    "speedup_real": ("speedup-*", "speedup"),
    "speedup_chat": ("speedup_chat-*", "speedup"),
    "heads": ("heads-*", "heads"),
    "busy_machine": ("busy_machine*", "busy_machine"),
    "structured": ("structured", "structured"),
}
PRINTED = {
    "acceptance": ("acceptance", "research.acceptance"),
    "chat_drafts": ("chat_drafts", "research.chat_drafts"),
    "peers_real": ("peers_real", "peers"),
    "peers_shapes": ("peers-*", "peers"),
    "kv_dtypes": ("kv_dtypes*", "kv_dtypes"),
    "fidelity": ("fidelity_*", "fidelity"),
    "serving_overhead": ("serving_overhead", "serving_overhead"),
    "serve_peers": ("serve_peers", "serve_peers"),
    "load_server": ("load_server", "load_server"),
    "never_slower": ("never_slower", "never_slower"),
    "never_slower_inflated": ("never_slower_inflated", "never_slower"),
    "never_slower_smollm2": ("never_slower_smollm2", "never_slower"),
    "never_slower_replayed": ("never_slower_replayed", "never_slower_replayed"),
    "ablation": ("ablation", "ablation"),
}
"""By marker: which results it shows, a star standing for the model, and the program whose
``tables`` shows them. Tables of the first kind are of Markdown already, the others are shown as the
program prints them."""


def built(marker: str, document: Document) -> list[str]:
    """The tables of one document, then its targets."""
    program = importlib.import_module((MARKDOWN | PRINTED)[marker][1])
    tables: list[str] = program.tables(document["results"])
    if marker in PRINTED:
        tables = ["```\n" + "\n\n".join(tables) + "\n```\n"]
    return [*tables, target_lines(document)]


# --- tables of several documents ------------------------------------------------------------------

MODEL_NAMES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
GAIN_ROWS = {
    "code": ("code", 0.0),
    "prose": ("prose", 0.0),
    "edits of code": ("edit", 0.0),
    "code, sampled at 0.8": ("code", 0.8),
}
"""The rows of the short table: what they are called, kind of text and temperature."""


def gains(documents: Sequence[Document]) -> list[str]:
    """One request at a time, default configuration: the latest results of each real model."""
    latest = {d["benchmark"]: d for d in sorted(documents, key=lambda d: d["date"])}
    documents = [latest[name] for name in sorted(latest) if not name.endswith("-inflated")]
    rows = []
    for name, (kind, temperature) in GAIN_ROWS.items():
        wanted = {"kind": kind, "temperature": temperature, "requests": 1, "arm": DEFAULT}
        rows.append([name, *(_gain_cell(pick(d["results"], **wanted)) for d in documents)])
    control = {"kind": "code", "temperature": 0.0, "requests": 1, "arm": CONTROL}
    rows.append(["control (code)", *(_gain_cell(pick(d["results"], **control)) for d in documents)])
    names = [d["benchmark"].removeprefix("speedup-") for d in documents]
    models = [MODEL_NAMES.get(name, name) for name in names]
    above, columns = _with_devices(documents, models)
    return [above, markdown(["speed-up", *columns], rows)]


def _with_devices(documents: Sequence[Document], names: Sequence[str]) -> tuple[str, list[str]]:
    """A line for the device that all results are of and the names, or no line and longer names."""
    devices = [document["device"] for document in documents]
    if len(set(devices)) == 1:
        return f"**{devices[0]}**\n", list(names)
    return "", [f"{name}, {device}" for name, device in zip(names, devices, strict=True)]


def _gain_cell(found: Sequence[Row]) -> str:
    if not found or "speedup" not in found[0]:
        return "-"
    (row,) = found
    mark = "" if row["identical"] else ", **not identical**"
    return f"{ratio_cell(row)}{mark}"


FILE_NAMES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3-270m-q4_k_m": "Gemma 3 270M"}
EQUAL_COLUMNS = {
    "one request, tok/s": {"measure": "parallel", "sequences": 1},
    "16 requests, tok/s": {"measure": "parallel", "sequences": 16},
    "checking 8 tokens, ms": {"measure": "forward", "context": 64, "width": 8},
    "reading 512 tokens, ms": {"measure": "prefill", "width": 512},
}


def equal_files(documents: Sequence[Document]) -> list[str]:
    """Paceline and llama.cpp on the very same Q4_K_M files: a line per file."""
    (document,) = documents
    rows = []
    for model, name in FILE_NAMES.items():
        cells = [_pair(document["results"], model, w) for w in EQUAL_COLUMNS.values()]
        rows.append([name, *cells])
    headers = ["Q4_K_M: Paceline / llama.cpp", *EQUAL_COLUMNS]
    return [f"**{document['device']}**\n", markdown(headers, rows)]


def _pair(results: Sequence[Row], model: str, wanted: Row) -> str:
    found = [
        pick(results, model=model, engine=f"{engine} Q4_K_M", **wanted)
        for engine in ("paceline", "llama.cpp")
    ]
    values = [row.get("ms", row.get("tokens_per_second")) for rows in found for row in rows]
    return " / ".join(number(value, 0) for value in values)


SUMMARIES: dict[str, tuple[str, Callable[[Sequence[Document]], list[str]]]] = {
    "gains": ("speedup-*", gains),
    "equal_files": ("peers_real", equal_files),
}
"""By marker: tables that show the results of several machines and models side by side."""


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
    programs = MARKDOWN | PRINTED
    if marker not in programs:
        known = ", ".join((*SUMMARIES, *programs))
        raise ValueError(f"no table is called {marker!r}; there are {known}")
    parts = []
    for document in saved(programs[marker][0], results):
        parts += [provenance(document), *built(marker, document)]
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
