"""Speculation against plain decoding and against other rules, on easy, hard and hostile text.

The arms take turns on the same prompts in one process, the order reversed in every other turn:
plain decoding, the same again as a control, simple rules (``rivals.py``), and the
planner. Every arm warms up on prompts of its own before a cell is measured. Times are end to end,
the reading of the prompts included; prefix caches are off.

Without an option the pre-registered cells run, with ``--quick`` a part of them. The whole grid is
for ``never_slower_replayed.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from harness import (
    CONTROL,
    PLAIN,
    Report,
    Row,
    Sample,
    Target,
    against_plain,
    among,
    arguments,
    chosen,
    first_error,
    geometric_mean,
    grid,
    interval,
    note,
    number,
    paired_ratio,
    table,
    take_turns,
)
from never_slower_arms import OURS, REAL, Arms, Served, count, open_arms, serve
from prompt_sets import (
    DESCRIPTIONS,
    SERVED_TOKENS,
    MissingWorkloadError,
    PromptSets,
    Workload,
    load_prompts,
    load_workload,
)
from proposer_sets import described

from paceline.config import EngineConfig
from paceline.engine.threads import COMPUTE
from paceline.request.sampling_params import SamplingParams

OVERHEAD_CELL = ("hostile", 1)
"""Workload and requests of the cell in which nothing is predictable."""
HOST_PHASES = ("propose", "plan")
PROSE_TARGET = "rate of prose beside edits / decoded plainly, worst cell"
OVERHEAD_TARGET = "probes + host time where nothing is predictable, share of the time, worst cell"
NOT_SLOWER = 0.99
"""A cell is slower where even the upper end of its interval lies below this."""
KEPT = (
    "output_tokens",
    "num_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "seconds_per_prose_token",
)
COLUMNS = 7
"""Cells side by side in the tables of all arms."""
Times = dict[str, dict[Any, dict[int, float]]]
"""Seconds by arm, group and repeat."""


# --- one cell -------------------------------------------------------------------------------------


def cell_row(samples: Sequence[Sample], label: Row) -> dict[str, Any]:
    """Everything that is said about a cell; an ``error`` where plain or ours failed."""
    arms = {arm: against_plain(samples, arm) for arm in dict.fromkeys(s.arm for s in samples)}
    row: dict[str, Any] = {**label, "arms": arms}
    for arm in (PLAIN, OURS):
        if "error" in arms[arm]:
            return {**row, "error": arms[arm]["error"]}
    row |= against_others(_times([s for s in samples if "error" not in arms[s.arm]]))
    if beside := _ratio(samples, "seconds_per_prose_token"):
        row["prose_beside"] = beside
    if (label["workload"], label["requests"]) == OVERHEAD_CELL:
        row["overhead"] = overhead(samples)
    return row


def _times(samples: Iterable[Sample]) -> Times:
    times: Times = {}
    for s in samples:
        times.setdefault(s.arm, {}).setdefault(s.item, {})[s.repeat] = s.seconds or 0.0
    return times


def against_others(times: Times) -> dict[str, Any]:
    """Ours against the best other arm of the cell, and of each group of prompts (the oracle).

    Whoever is chosen for the shortest of several noisy times was also lucky. Held out, the choice
    for each repeat is made from the other repeats, which takes luck out of it.
    """
    others = [arm for arm in times if arm not in (OURS, CONTROL)]
    items, repeats = list(times[OURS]), list(next(iter(times[OURS].values())))

    def seconds(arm: str, groups: Iterable[Any], turns: Sequence[int]) -> float:
        return sum(statistics.median(times[arm][i][r] for r in turns) for i in groups)

    def fastest(groups: Sequence[Any], turns: Sequence[int]) -> str:
        return min(others, key=lambda arm: seconds(arm, groups, turns))

    def held_out(choices: Sequence[Sequence[Any]]) -> float | None:
        if len(repeats) < 2:
            return None
        chosen = ours = 0.0
        for turn in repeats:
            rest = [r for r in repeats if r != turn]
            for groups in choices:
                chosen += seconds(fastest(groups, rest), groups, [turn])
                ours += seconds(OURS, groups, [turn])
        return chosen / ours

    ours, best = seconds(OURS, items, repeats), fastest(items, repeats)
    singly = [[item] for item in items]
    oracle = sum(seconds(fastest(one, repeats), one, repeats) for one in singly)
    return {
        "best_other": best,
        "ours_to_best": seconds(best, items, repeats) / ours,
        "ours_to_best_held_out": held_out([items]),
        "ours_to_oracle": oracle / ours,
        "ours_to_oracle_held_out": held_out(singly),
    }


def _paired(samples: Iterable[Sample]) -> list[tuple[Sample, Sample]]:
    """Plain and ours of the same group and repeat."""
    found: dict[tuple[Any, int], dict[str, Sample]] = {}
    for sample in samples:
        found.setdefault((sample.item, sample.repeat), {})[sample.arm] = sample
    return [(pair[PLAIN], pair[OURS]) for pair in found.values() if {PLAIN, OURS} <= pair.keys()]


def _ratio(samples: Iterable[Sample], fact: str) -> dict[str, Any] | None:
    """A duration among the facts, plain over ours."""
    items: dict[Any, list[tuple[float, float]]] = {}
    for plain, ours in _paired(samples):
        if plain.facts[fact] is not None and ours.facts[fact] is not None:
            items.setdefault(plain.item, []).append((plain.facts[fact], ours.facts[fact]))
    return asdict(paired_ratio(list(items.values()))) if items else None


def overhead(samples: Iterable[Sample]) -> dict[str, float]:
    """Shares of our time that are spent beyond what plain decoding spends per step.

    Proposing holds the draft model's forwards, and ``rest`` is everything outside the target's
    forwards but the two phases that are named; ``verification`` is what draft nodes added to those
    forwards. Medians over the runs; the total is that of the runs' totals.
    """
    runs = []
    for plain, ours in _paired(samples):
        per_step = ours.facts["num_forwards"] / plain.facts["num_forwards"]
        beyond = {part: time - per_step * _host(plain)[part] for part, time in _host(ours).items()}
        beyond["verification"] = ours.facts["verification"]
        assert ours.seconds is not None
        shares = {part: time / ours.seconds for part, time in beyond.items()}
        runs.append({**shares, "total": sum(shares.values())})
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


def _host(sample: Sample) -> dict[str, float]:
    """Seconds of a run outside the target's forwards, by part."""
    phases = sample.facts["phases"]
    parts = {phase: phases.get(phase, 0.0) for phase in HOST_PHASES}
    assert sample.seconds is not None
    return {**parts, "rest": sample.seconds - phases.get("forward", 0.0) - sum(parts.values())}


def raw(samples: Sequence[Sample], label: Row) -> list[dict[str, Any]]:
    """The samples of a cell as they are kept: per arm a list per measure, in order of the runs."""
    kept = []
    for arm in dict.fromkeys(sample.arm for sample in samples):
        own = [sample for sample in samples if sample.arm == arm]
        lists: dict[str, Any] = {
            "group": [s.item for s in own],
            "repeat": [s.repeat for s in own],
            "seconds": [s.seconds and round(s.seconds, 6) for s in own],
            **{name: [s.facts.get(name) for s in own] for name in KEPT},
        }
        if (label["workload"], label["requests"]) == OVERHEAD_CELL and arm in (PLAIN, OURS):
            lists["phases"] = [s.facts.get("phases") for s in own]
            lists["verification"] = [s.facts.get("verification") for s in own]
        used = {name: own for name, own in lists.items() if any(v is not None for v in own)}
        kept.append({**label, "arm": arm, **used, "error": first_error(own)})
    return kept


# --- all cells ------------------------------------------------------------------------------------


def targets(rows: Sequence[Row]) -> list[Target]:
    """What is aimed at over all cells; without a value where a cell failed."""
    rows = rows if all("error" not in row for row in rows) else []
    slower = [row for row in rows if row["arms"][OURS]["speedup"]["high"] < NOT_SLOWER]
    best = [row["ours_to_best"] for row in rows]
    oracle = [row["ours_to_oracle"] for row in rows]
    prose = [row["prose_beside"]["value"] for row in rows if "prose_beside" in row]
    spent = [row["overhead"]["total"] for row in rows if "overhead" in row]
    count = len(slower) if rows else None
    least = "at least"
    return [
        Target(f"cells whose upper 95 % bound of ours/plain is below {NOT_SLOWER}", count, 0),
        Target("ours / the best other arm, geometric mean", geometric_mean(best), 1.0, least),
        Target("ours / the best other arm, worst cell", min(best, default=None), 0.93, least),
        Target("ours / the hindsight oracle, geometric mean", geometric_mean(oracle), 0.95, least),
        Target(PROSE_TARGET, min(prose, default=None), 0.95, least),
        Target(OVERHEAD_TARGET, max(spent, default=None), 0.008),
    ]


# --- tables ---------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> list[str]:
    """Ours cell by cell, every arm cell by cell, and where its time goes that nothing comes of."""
    arms = [_all_arms(rows[at : at + COLUMNS]) for at in range(0, len(rows), COLUMNS)]
    return [_cells(rows), *arms, *_overheads(rows)]


def _cells(rows: Sequence[Row]) -> str:
    """Ratios are rates over rates; ``held out``: the other arm was chosen by the other repeats."""
    ours = f"arms/{OURS}/speedup"
    return table(
        *grid(
            rows,
            ("workload", "workload"),
            ("requests", "requests"),
            ("temp.", "temperature"),
            ("plain tok/s", f"arms/{PLAIN}/tokens_per_second", 0),
            ("control", f"arms/{CONTROL}/speedup/value", 3),
            ("ours/plain", f"{ours}/value", 3),
            ("95 % interval", lambda row: interval(row["arms"][OURS].get("speedup", {}), 3)),
            ("ours/best", "ours_to_best", 3),
            ("held out", "ours_to_best_held_out", 3),
            ("best other", "best_other"),
            ("ours/oracle", "ours_to_oracle", 3),
            ("held out", "ours_to_oracle_held_out", 3),
            ("prose beside", "prose_beside/value", 3),
            ("identical", lambda row: row.get("error") or _identical(row["arms"])),
        )
    )


def _identical(arms: Row) -> str:
    return "yes" if all(arm.get("identical") for arm in arms.values()) else "NO"


def _name(row: Row) -> str:
    return f"{row['workload']} x{row['requests']} @{row['temperature']:g}"


def _all_arms(rows: Sequence[Row]) -> str:
    """Each arm over plain, a column per cell."""
    lines = []
    for arm in dict.fromkeys(arm for row in rows for arm in row["arms"]):
        found = [row["arms"].get(arm, {}).get("speedup", {}).get("value") for row in rows]
        lines.append([arm, *(number(value, 3) for value in found)])
    return table(["arm / plain", *map(_name, rows)], lines)


def _overheads(rows: Sequence[Row]) -> list[str]:
    found = {_name(row): row["overhead"] for row in rows if "overhead" in row}
    lines = [[name, *(f"{share:.2%}" for share in own.values())] for name, own in found.items()]
    parts = next(iter(found.values()), {})
    return [table(["share of our time beyond plain", *parts], lines)] if found else []


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
SMOLLM2: tuple[Cell, ...] = tuple(
    (workload, requests, temperature)
    for workload in ("code", "mt_bench", "prose", "hostile")
    for requests in (1, 4, 8)
    for temperature in ((HOSTILE,) if workload == "hostile" else (0.0, 0.8))
)
CELLS = {"embedded": PRE_REGISTERED, "inflated": INFLATED, REAL: SMOLLM2}
RUNS = {
    "embedded": "never_slower",
    "inflated": "never_slower_inflated",
    REAL: "never_slower_smollm2",
}
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
    REAL: Size(64, 550, 8, (2, 4), 3, 15.0),
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
    cells = CELLS[options.pair]
    if options.quick and options.pair != "inflated":
        cells = QUICK
    return [
        cell
        for cell in cells
        if cell[0] in (options.workloads or DESCRIPTIONS)
        and cell[1] in (options.concurrency or CONCURRENCY)
    ]


def size_of(options: argparse.Namespace) -> Size:
    """Sizes for the pair, with what the options say instead."""
    size = QUICK_SIZE if options.quick and options.pair != "inflated" else SIZES[options.pair]
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
    parser.add_argument("--workloads", type=among(DESCRIPTIONS), help="only these of the cells")
    parser.add_argument("--concurrency", type=among(CONCURRENCY), help="only these of the cells")
    parser.add_argument("--profile", action="store_true", help="measure the costs of steps before")
    parser.add_argument("--groups", type=int, help="batches of prompts per cell")
    parser.add_argument("--max-tokens", type=int, help="of each request")
    parser.add_argument("--repeat", dest="repeats", type=int, help="most repeats of each run")
    text = "repeats that do not fit are cut"
    parser.add_argument("--budget-minutes", dest="minutes", type=float, help=text)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    options = parser.parse_args(argv)
    if not cells_of(options):
        parser.error("no cell has these workloads and as many requests: leave one of them out")
    return options


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
