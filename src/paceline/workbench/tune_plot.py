"""Speed-up against node budget as a picture.

Needs matplotlib, as :mod:`paceline.workbench.profile_plot` does; touches no screen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ProfileError
from paceline.workbench.profile_plot import check_plot
from paceline.workbench.tune import Tuning

STYLES = {"auto": "-", "fixed": "--"}


def plot_tuning(tuning: Tuning, path: str | Path) -> None:
    """Draw the best candidate of every node budget with its interval, a line per family.

    Raises:
        ConfigError: matplotlib is not installed, or the file's kind is unknown.
        ProfileError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panel = figure.subplots()
    _draw_families(panel, tuning)
    panel.axhline(1.0, color="black", linewidth=1, label=tuning.plain.name)
    for row, style in zip(tuning.oracles, (":", "-.") * len(tuning.oracles), strict=False):
        panel.axhline(row.speedup.value, color="grey", linestyle=style, linewidth=1, label=row.name)
    panel.set(xlabel="node budget", ylabel="predicted speed-up over plain decoding", xscale="log")
    budgets = sorted({row.candidate.nodes for row in tuning.rows if row.candidate})
    panel.set_xticks(budgets, map(str, budgets))
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ProfileError(f"cannot write {path}: {error.strerror or error}") from error


def _draw_families(panel: Any, tuning: Tuning) -> None:
    colours: dict[str, str] = {}
    for (family, planner), rows in tuning.by_budget().items():
        found = [row.speedup for row in rows]
        panel.errorbar(
            [row.candidate.nodes for row in rows if row.candidate],
            [each.value for each in found],
            [[e.value - e.low for e in found], [e.high - e.value for e in found]],
            fmt=STYLES[planner],
            color=colours.setdefault(family, f"C{len(colours)}"),
            marker=".",
            capsize=2,
            label=f"{family}, planner {planner}",
        )
