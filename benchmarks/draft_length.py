"""Tokens per second against the number of drafted tokens, for draft models of three sizes.

The target is the embedded one, inflated to a real model's size; its drafts are the embedded draft,
inflated to 1/28, 1/9 and 1/5 of the target's bytes. Inflation changes what a forward costs and not
what it says, so the drafts differ in cost alone. What steps cost is measured here. The answers are
then replayed with every length at these costs: those rows are simulated. A few lengths are measured
end to end beside them. The planner is given the longest draft and is told nothing.

Speeds are of decoding, one request at a time, without the reading of the prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from draft_length_models import DRAFTS, draft_folder, target_folder
from draft_length_replays import LONGEST, on, opened, simulate
from draft_length_report import PLANNER, tables, targets
from draft_length_runs import measure
from harness import arguments, note
from machine_curves import describe, measured
from prompt_sets import SOURCES, PromptSets, load_prompts, spread
from report import Report
from trace_sets import FOLDER

from paceline.engine.compute_thread import COMPUTE

QUICK_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WIDTHS = (*range(1, 18), 20, 24, 28, 33, 64, 256)
SAID = ("size", "quick", "num_prompts", "max_tokens", "temperature", "measured_tokens", "repeat")
"""Options that the document names."""
PROBLEMS = ("gold coins", "rules of chess")
"""The first of the prompts that users compare speculation on."""


def texts_of(options: argparse.Namespace, source: PromptSets) -> dict[str, list[str]]:
    """Code, and the problems, which are asked once, or as often where they are sampled."""
    found = {"code": spread(source.kind("code"), options.num_prompts)}
    copies = options.num_prompts if options.temperature else 1
    known = source.sets.get("discussion", [])
    if not known:
        note("the embedded prompts have no problems, only code")
    return found | {name: [text] * copies for name, text in zip(PROBLEMS, known, strict=False)}


def lengths_of(options: argparse.Namespace) -> Sequence[int]:
    return QUICK_LENGTHS if options.quick else range(LONGEST + 1)


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--size", choices=list(DRAFTS), default="0.5b", help="of the target")
    parser.add_argument("--num-prompts", type=int, help="of code (default: 8, quick: 2)")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: 256, quick: 64)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="above 0 every problem is asked repeatedly"
    )
    parser.add_argument("--traces", type=Path, default=FOLDER, help="where answers are kept")
    parser.add_argument(
        "--profile-seconds", type=float, help="for each draft (default: 15, quick: 3)"
    )
    parser.add_argument(
        "--measured-tokens", type=int, help="of each measured run (default: 64, quick: 0: none)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="of each measured run")
    options = parser.parse_args(argv)
    usual = {"num_prompts": (8, 2), "max_tokens": (256, 64), "measured_tokens": (64, 0)}
    for name, values in (usual | {"profile_seconds": (15.0, 3.0)}).items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = load_prompts(options.prompts)
    texts = texts_of(options, source)
    target = str(target_folder(options.size))
    simulators = {name: opened(options, name, each) for name, each in texts.items()}
    report = Report("draft_length", {"prompts": source.source, "curves": {}})
    report.config |= {name: getattr(options, name) for name in SAID}
    for share in DRAFTS[options.size]:
        draft = str(draft_folder(options.size, share))
        name = f"{options.size} target, draft of {share}"
        curve = measured(name, target, draft, options.device, options.profile_seconds, WIDTHS)
        report.config["curves"][share] = describe(curve)
        for text, simulator in simulators.items():
            note(f"replaying {text} with a draft of {share}")
            lengths = [*lengths_of(options), PLANNER]
            label = {"draft": share, "text": text}
            rows, samples = simulate(on(simulator, curve), lengths, label)
            report.results += rows
            report.samples += samples
        if options.measured_tokens:
            note(f"measuring a draft of {share}")
            COMPUTE.call(partial(measure, options, share, curve, simulators, report))
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
