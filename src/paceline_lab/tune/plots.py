"""The picture of a tuning: every node budget's best candidate, and the recommendation."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from paceline.profiling.plots import MARKED, new_figure, save_figure, wrapped
from paceline_lab.tune.tuning import DEFAULT, SpeedUp, Tuning

STYLES = {"auto": "-", "fixed": "--"}
HINDSIGHT = (("0.35", ":"), ("0.6", "-."), ("0.35", (0, (6, 3))), ("0.6", (0, (1, 4))))
"""Grey and dashes of each line of hindsight, in turn."""
LEGEND_COLUMNS = 2


def plot_tuning(tuning: Tuning, path: str | Path, title: str = "", sentence: str = "") -> None:
    """Draw the best candidate of every node budget with its interval, a line per family.

    A star marks the recommendation.
    """
    figure = new_figure(path, 9, 7)
    panel = figure.subplots()
    _draw_families(panel, tuning)
    panel.axhline(1.0, color="black", linewidth=1, label=tuning.plain.name)
    if tuning.default is not None:
        value = tuning.default.speedup.value
        panel.axhline(value, color="tab:green", linewidth=1, label=DEFAULT)
    if (best := tuning.best) is not None and best.candidate is not None:
        place = [best.candidate.nodes], [best.speedup.value]
        panel.scatter(*place, label="recommended", **MARKED)
    for row, (grey, dashes) in zip(tuning.oracles, cycle(HINDSIGHT), strict=False):
        panel.axhline(row.speedup.value, color=grey, linestyle=dashes, label=row.name)
    # The legend is at the edge of the picture, where the sentence would be otherwise.
    below = "node budget (draft tokens that a step may check)", wrapped(sentence, figure)
    panel.set_xlabel("\n\n".join(below), parse_math=False)
    panel.set(
        ylabel="predicted speed-up over plain decoding (times)",
        xscale="log",
    )
    shown = [*tuning.rows, *([best] if best else [])]
    budgets = sorted({row.candidate.nodes for row in shown if row.candidate})
    panel.set_xticks(budgets, map(str, budgets))
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize="small")
    save_figure(figure, title, "", path)


def _bars(speedups: list[SpeedUp]) -> list[list[float]] | None:
    """How far down and up the intervals reach; None where there are none."""
    intervals = [
        (each.value - each.low, each.high - each.value)
        for each in speedups
        if each.low is not None and each.high is not None
    ]
    return [list(side) for side in zip(*intervals, strict=True)] or None


def _draw_families(panel: Any, tuning: Tuning) -> None:
    colours: dict[str, str] = {}
    for (family, planner), rows in tuning.by_budget().items():
        speedups = [row.speedup for row in rows]
        panel.errorbar(
            [row.candidate.nodes for row in rows if row.candidate],
            [each.value for each in speedups],
            _bars(speedups),
            fmt=STYLES[planner],
            color=colours.setdefault(family, f"C{len(colours)}"),
            marker=".",
            capsize=2,
            label=f"{family}, planner {planner}",
        )
