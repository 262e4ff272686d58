"""Speed-up against node budget as a picture.

Needs matplotlib, as :mod:`paceline.workbench.profile_plot` does; touches no screen.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from paceline.workbench.profile_plot import check_plot, save_plot
from paceline.workbench.tune import SpeedUp, Tuning

STYLES = {"auto": "-", "fixed": "--"}
HINDSIGHT = (("0.35", ":"), ("0.6", "-."), ("0.35", (0, (6, 3))), ("0.6", (0, (1, 4))))
"""Grey and dashes of each line of hindsight, in turn."""
LEGEND_COLUMNS = 2


def plot_tuning(tuning: Tuning, path: str | Path) -> None:
    """Draw the best candidate of every node budget with its interval, a line per family.

    Raises:
        ConfigError: matplotlib is not installed, or the file's kind is unknown.
        ProfileError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    panel = figure.subplots()
    _draw_families(panel, tuning)
    panel.axhline(1.0, color="black", linewidth=1, label=tuning.plain.name)
    for row, (grey, dashes) in zip(tuning.oracles, cycle(HINDSIGHT), strict=False):
        panel.axhline(row.speedup.value, color=grey, linestyle=dashes, label=row.name)
    panel.set(xlabel="node budget", ylabel="predicted speed-up over plain decoding", xscale="log")
    budgets = sorted({row.candidate.nodes for row in tuning.rows if row.candidate})
    panel.set_xticks(budgets, map(str, budgets))
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize="small")
    save_plot(figure, path)


def _bars(found: list[SpeedUp]) -> list[list[float]] | None:
    """How far down and up the intervals reach; None where there are none."""
    intervals = [
        (each.value - each.low, each.high - each.value)
        for each in found
        if each.low is not None and each.high is not None
    ]
    return [list(side) for side in zip(*intervals, strict=True)] or None


def _draw_families(panel: Any, tuning: Tuning) -> None:
    colours: dict[str, str] = {}
    for (family, planner), rows in tuning.by_budget().items():
        found = [row.speedup for row in rows]
        panel.errorbar(
            [row.candidate.nodes for row in rows if row.candidate],
            [each.value for each in found],
            _bars(found),
            fmt=STYLES[planner],
            color=colours.setdefault(family, f"C{len(colours)}"),
            marker=".",
            capsize=2,
            label=f"{family}, planner {planner}",
        )
