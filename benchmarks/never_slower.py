"""Speculation against plain decoding and against other rules, on easy, hard and hostile text.

The arms take turns on the same prompts in one process, the order reversed in every other turn:
plain decoding, the same again as a control, simple rules (``rivals.py``, ``goodput.py``), and the
planner. Every arm warms up on prompts of its own before a cell is measured. Times are end to end,
the reading of the prompts included; prefix caches are off.

Without an option the pre-registered cells run, with ``--quick`` a part of them. The whole grid is
for ``never_slower_replayed.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from harness import Sample, arguments, chosen, names, note, numbers, take_turns
from never_slower_arms import Arms, Served, count, open_arms, serve
from never_slower_report import cell_row, raw, tables, targets
from prompt_sets import PromptSets, load_prompts
from proposer_sets import described
from report import Report
from workloads import DESCRIPTIONS, SERVED_TOKENS, MissingWorkloadError, Workload, load_workload

from paceline.config import EngineConfig
from paceline.engine.compute_thread import COMPUTE
from paceline.request.sampling_params import SamplingParams

Cell = tuple[str, int, float]
"""Workload, requests in a batch, temperature."""
HOSTILE = 1.3

# These three were chosen before anything was run, and are not to be changed after: every workload,
# several numbers of requests, greedy and sampled. The sonnet and random cells are those of public
# reports.
PRE_REGISTERED: tuple[Cell, ...] = (
    ("code", 1, 0.0),
    ("mt_bench", 4, 0.8),
    ("spec_bench", 8, 0.0),
    ("gsm8k", 1, 0.8),
    ("sonnet", 1, 0.0),
    ("sonnet", 4, 0.0),
    ("random", 1, 0.0),
    ("random", 4, 0.0),
    ("edit", 1, 0.0),
    ("prose", 16, 0.8),
    ("hostile", 1, HOSTILE),
    ("hostile", 8, HOSTILE),
    ("json", 4, 0.8),
    ("mixture", 8, 0.0),
)
QUICK: tuple[Cell, ...] = (
    ("code", 1, 0.0),
    ("sonnet", 4, 0.0),
    ("hostile", 1, HOSTILE),
    ("mixture", 8, 0.0),
)
INFLATED: tuple[Cell, ...] = (
    ("code", 1, 0.0),
    ("prose", 1, 0.0),
    ("edit", 1, 0.0),
    ("mixture", 4, 0.0),
    ("hostile", 1, HOSTILE),
)
RUNS = {"embedded": "never_slower", "inflated": "never_slower_inflated"}
"""Names of the results, by pair of models."""
CONCURRENCY = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a cell is.

    Attributes:
        max_tokens: of each request; the sonnet and random workloads have their own.
        longest: tokens of a prompt; of a longer one the end is taken.
        requests: that a cell runs in each repeat, in as many groups as that makes.
        groups: at least, and at most.
        repeats: of each group.
        minutes: for all cells together; what does not fit is cut from the repeats.
    """

    max_tokens: int
    longest: int
    requests: int
    groups: tuple[int, int]
    repeats: int
    minutes: float


SIZES = {
    "embedded": Size(96, 550, 24, (2, 8), 3, 20.0),
    "inflated": Size(48, 160, 4, (1, 2), 3, 15.0),
}
QUICK_SIZE = Size(64, 550, 4, (2, 3), 2, 2.0)


def full_grid() -> list[Cell]:
    return [
        (workload, requests, temperature)
        for workload in DESCRIPTIONS
        for requests in CONCURRENCY
        for temperature in ((HOSTILE,) if workload == "hostile" else TEMPERATURES)
        if workload != "mixture" or requests > 1
    ]


MAX_MODEL_LEN = 1024


# --- what is run ----------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The cells that the options ask for."""
    quick = QUICK if options.quick else PRE_REGISTERED
    return [
        cell
        for cell in (INFLATED if options.pair == "inflated" else quick)
        if cell[0] in (options.workloads or DESCRIPTIONS)
        and cell[1] in (options.concurrency or CONCURRENCY)
    ]


def size_of(options: argparse.Namespace) -> Size:
    """Sizes for the pair, with what the options say instead."""
    size = QUICK_SIZE if options.quick and options.pair == "embedded" else SIZES[options.pair]
    if options.groups:
        size = replace(size, groups=(options.groups, options.groups))
    wishes = chosen(options, "repeats", "minutes", "max_tokens")
    return replace(size, **{name: wish for name, wish in wishes.items() if wish is not None})


def cell_workload(arms: Arms, source: PromptSets, cell: Cell, size: Size) -> Workload:
    """Prompts for a cell: its groups, and one more to warm up on."""
    name, requests, _ = cell
    least, most = size.groups
    groups = max(least, min(most, size.requests // requests))
    vocab = arms.built.target.vocab_size
    found = load_workload(name, source, arms.encode, vocab, requests, groups + 1)
    return replace(found, groups=[[ids[-size.longest :] for ids in g] for g in found.groups])


def run_cell(
    arms: Arms, workload: Workload, cell: Cell, max_tokens: int, repeats: int, until: float
) -> list[Sample]:
    """All arms on all groups, in turns, for as many repeats as there is time for.

    Args:
        until: by :func:`time.monotonic`; two repeats are always made, for a ratio needs its
            interval.
    """
    *_, temperature = cell

    def generate(run: Callable[..., Served], item: int) -> Served:
        wish = partial(SamplingParams, temperature=temperature, ignore_eos=True)
        prompts = workload.groups[item]
        params = [wish(max_tokens=max_tokens, seed=item * 1000 + i) for i in range(len(prompts))]
        return run(prompts, params)

    runs = {arm: partial(generate, partial(serve, e)) for arm, e in arms.engines.items()}
    *items, spare = range(len(workload.groups))
    counted = partial(count, prose=workload.prose)
    take_turns(runs, [spare], 1, counted)
    samples: list[Sample] = []
    for repeat in range(repeats):
        began = time.monotonic()
        # Every group meets the arms in both orders.
        order = runs if repeat % 2 == 0 else dict(reversed(runs.items()))
        samples += [replace(s, repeat=repeat) for s in take_turns(order, items, 1, counted)]
        now = time.monotonic()
        if repeat and now + (now - began) > until:
            break
    return samples


def run_all(
    arms: Arms, source: PromptSets, options: argparse.Namespace, report: Report
) -> dict[str, str]:
    """Fill the report cell by cell; returns which workloads were left out, and why."""
    cells, size, left_out = cells_of(options), size_of(options), {}
    end = time.monotonic() + 60 * size.minutes
    for index, cell in enumerate(cells):
        label = dict(zip(("workload", "requests", "temperature"), cell, strict=True))
        note(", ".join(f"{name} {value}" for name, value in label.items()))
        try:
            workload = cell_workload(arms, source, cell, size)
        except MissingWorkloadError as error:
            left_out[cell[0]] = str(error)
            note(f"left out: {error}")
            continue
        served = cell[0] in ("sonnet", "random")
        max_tokens = options.max_tokens or (SERVED_TOKENS[1] if served else size.max_tokens)
        # Cells differ in size: one may take twice its share of the time that is left.
        left = end - time.monotonic()
        until = time.monotonic() + min(left, 2 * left / (len(cells) - index))
        samples = run_cell(arms, workload, cell, max_tokens, size.repeats, until)
        report.samples += raw(samples, label)
        report.results.append(cell_row(samples, label))
    return left_out


# --- the program ----------------------------------------------------------------------------------


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--pair", choices=list(SIZES), default="embedded")
    parser.add_argument("--workloads", type=names, help="only these of the cells")
    parser.add_argument("--concurrency", type=numbers, help="only these of the cells")
    parser.add_argument("--profile", action="store_true", help="measure the costs of steps before")
    parser.add_argument("--groups", type=int, help="batches of prompts per cell")
    parser.add_argument("--max-tokens", type=int, help="of each request")
    parser.add_argument("--repeat", dest="repeats", type=int, help="most repeats of each run")
    text = "repeats that do not fit are cut"
    parser.add_argument("--budget-minutes", dest="minutes", type=float, help=text)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    return parser.parse_args(argv)


def configuration(arms: Arms, source: PromptSets, options: argparse.Namespace) -> dict[str, Any]:
    used = dict.fromkeys(cell[0] for cell in cells_of(options))
    return {
        **chosen(options, "pair", "quick"),
        "dtype": arms.built.config.dtype,
        "backend": arms.built.backend,
        "prompts": source.source,
        "prefix_caching": False,
        "cost": arms.cost,
        "ours": described(arms.ours),
        "size": asdict(size_of(options)),
        "workloads": {name: DESCRIPTIONS[name] for name in used},
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    source = load_prompts(options.prompts)
    most = max((requests for _, requests, _ in cells_of(options)), default=1)
    config = EngineConfig(
        device=options.device,
        num_threads=options.threads,
        max_num_seqs=most,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        strict=True,
    )

    def measured() -> Report:  # torch keeps its workers per thread, and this is the engines' own
        arms = open_arms(options.pair, config, options.profile)
        report = Report(RUNS[options.pair], configuration(arms, source, options))
        report.config["left_out"] = run_all(arms, source, options, report)
        return report

    report = COMPUTE.call(measured)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
