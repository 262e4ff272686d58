"""How a tuning looks on a terminal: the ranking, the drafts, speed-up against node budget."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase

from paceline.commands.display import printable, table
from paceline.commands.simulate import figures
from paceline.workbench.draft_quality import TEMPERATURE, TOP, DraftQuality
from paceline.workbench.tune import Drafts, Row, SpeedUp, Tuning, is_worthwhile

SHOWN = 12
"""Rows of the ranking, beside the best of each family and planner."""
HEADERS = ("", "planner", "speed-up", "95 % interval", "tok/s", "accepted length", "nodes/step")
NUM_FIGURES = 7 + len(TOP)
"""Columns of a draft's quality."""
CHART_LINES = 12
COLUMN = 5
"""Characters between two node budgets of the chart."""


def ranking(tuning: Tuning, is_relative: bool) -> str:
    """The best candidates, the best of every family and planner, plain decoding and hindsight.

    Args:
        is_relative: times are no milliseconds, so that there are no tokens per second.
    """
    seen: set[tuple[str, str]] = set()
    rows = []
    for place, row in enumerate(tuning.rows):
        assert row.candidate is not None
        kind = row.candidate.family, row.candidate.planner
        if place < SHOWN or kind not in seen:
            rows.append(row)
        seen.add(kind)
    shown = sorted([*rows, tuning.plain], key=lambda row: -row.speedup.value)
    cells = [_cells(row, is_relative) for row in [*shown, *tuning.oracles]]
    return table(HEADERS, cells)


def _cells(row: Row, is_relative: bool) -> list[str]:
    counted = figures(row.result)
    return [
        printable(row.name),
        row.candidate.planner if row.candidate else "-",
        f"{row.speedup.value:.3f}",
        _interval(row.speedup),
        "-" if is_relative else f"{counted.tokens_per_second:.1f}",
        f"{counted.mean_acceptance_length:.2f}",
        f"{nodes_per_step(row):.2f}",
    ]


def nodes_per_step(row: Row) -> float:
    """Draft nodes that were verified in a step, those without any included."""
    return row.result.total("num_draft_tokens") / row.result.total("num_steps")


def _interval(found: SpeedUp) -> str:
    return f"{found.low:.3f} to {found.high:.3f}"


def verdict(tuning: Tuning, drafts: Drafts) -> list[str]:
    """What to do, in plain words; and which drafts bring nothing."""
    best, lines = tuning.best, []
    if best is None:
        said = f", not even {printable(tuning.rows[0].name)}: {_said(tuning.rows[0])}"
        lines.append("nothing beats plain decoding" + said)
    else:
        assert best.candidate is not None
        planner = best.candidate.planner
        lines.append(f"best: {printable(best.name)}, planner {planner}: {_said(best)}")
    for name in drafts:
        alone = tuning.best_of(name)
        if alone is not None and not is_worthwhile(alone):
            lines.append(
                f"no setting of {printable(name)} alone beats plain decoding; the best: "
                f"{_said(alone)}"
            )
    if tuning.num_left_out:
        lines.append(
            f"{tuning.num_left_out} replays were left out for lack of time: raise --budget"
        )
    return lines


def _said(row: Row) -> str:
    found = row.speedup
    return f"{found.value:.3f} times plain decoding ({_interval(found)})"


def quality_table(qualities: Mapping[str, DraftQuality | None], tuning: Tuning) -> str:
    """How close each draft is to the target, where that can be said, and what it brings alone."""
    headers = [
        "draft",
        "tokens",
        "KL (nats)",
        "total variation",
        *(f"top {k}" for k in TOP),
        "calibration error",
        "accepted greedily",
        f"at {TEMPERATURE:g}",
        "with shared noise",
        "speed-up alone",
    ]
    rows = [_quality_cells(name, each, tuning) for name, each in qualities.items()]
    return table(headers, rows)


def _quality_cells(name: str, found: DraftQuality | None, tuning: Tuning) -> list[str]:
    alone = tuning.best_of(name)
    figures = ["-"] * NUM_FIGURES if found is None else _figures(found)
    return [printable(name), *figures, "-" if alone is None else f"{alone.speedup.value:.3f}"]


def _figures(found: DraftQuality) -> list[str]:
    return [
        str(found.num_tokens),
        f"{found.kl:.3f}",
        f"{found.total_variation:.3f}",
        *(f"{found.agreement[k]:.1%}" for k in TOP),
        f"{found.calibration_error:.3f}",
        f"{found.greedy_acceptance:.1%}",
        f"{found.rejection_acceptance:.1%}",
        f"{found.coupled_acceptance:.1%}",
    ]


# --- the chart -----------------------------------------------------------------------------------


def chart(tuning: Tuning) -> str:
    """Speed-up (upwards) against node budget, a letter per family and planner; dashes are plain."""
    series = tuning.by_budget()
    budgets = sorted({_nodes(row) for rows in series.values() for row in rows})
    values = [row.speedup.value for rows in series.values() for row in rows]
    low, high = min(1.0, *values), max(1.0, *values)
    unit = (high - low or 1.0) / (CHART_LINES - 1)
    grid = [[" "] * (COLUMN * len(budgets)) for _ in range(CHART_LINES)]
    grid[round((1.0 - low) / unit)] = ["-"] * (COLUMN * len(budgets))
    legend = []
    for letter, ((family, planner), rows) in zip(ascii_lowercase, series.items(), strict=False):
        legend.append(f"  {letter}: {printable(family)}, planner {planner}")
        for row in rows:
            line = grid[round((row.speedup.value - low) / unit)]
            start = COLUMN * budgets.index(_nodes(row))
            # Those that fall together stand side by side.
            line[next(i for i in range(start, len(line)) if line[i] in " -")] = letter
    body = [f"{low + unit * i:6.2f} |{''.join(grid[i])}" for i in reversed(range(CHART_LINES))]
    axis = " " * 8 + "".join(str(budget).ljust(COLUMN) for budget in budgets)
    return "\n".join(["speed-up against node budget", *body, axis.rstrip(), *legend])


def _nodes(row: Row) -> int:
    assert row.candidate is not None
    return row.candidate.nodes
