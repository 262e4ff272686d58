"""Cost tables as a picture. The only place that needs matplotlib; nothing here touches a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, ProfileError
from paceline.policy.cost_table import CostTable
from paceline.writing import whole_file

SUFFIXES = (".png", ".svg", ".pdf")
NARROW = 64
"""The widest step of the left panel, where verification lies."""


def check_plot(path: str | Path) -> None:
    """Raise :class:`ConfigError` unless :func:`plot_tables` could make such a file."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} cannot be plotted; allowed are files in {', '.join(SUFFIXES)}")
    _figure_class()


def save_plot(figure: Any, path: str | Path) -> None:
    """Write a figure in the format of its file's suffix; raises :class:`ProfileError`."""
    with whole_file(path, ProfileError) as partial:
        figure.savefig(partial, format=Path(path).suffix[1:] or "png")


def plot_tables(tables: Sequence[CostTable], path: str | Path) -> None:
    """Draw every table: the cost ratio of narrow steps, and the time of all of them.

    Raises:
        ConfigError: matplotlib is not installed, or the file's kind is unknown.
        ProfileError: the file cannot be written.
    """
    check_plot(path)
    figure = _figure_class()(figsize=(12, 5), layout="constrained")
    ratios, times = figure.subplots(1, 2)
    for table in tables:
        _draw(table, ratios, times)
    ratios.set(xlabel="width (rows)", ylabel="cost ratio to width 1", ylim=(0, None))
    unit = "plain steps" if all(table.is_relative for table in tables) else "ms"
    times.set(xlabel="width (rows)", ylabel=f"time of a step ({unit})", xscale="log", yscale="log")
    for panel in (ratios, times):
        panel.grid(alpha=0.3)
    ratios.legend(fontsize="small")
    save_plot(figure, path)


def _draw(table: CostTable, ratios: Any, times: Any) -> None:
    """A line per context in each panel; bars are as long as the range of the middle half."""
    for context in table.contexts:
        points = table.base_points(context)
        widths, ms = [point.width for point in points], [point.ms for point in points]
        narrow = sum(width <= NARROW for width in widths)
        label = f"{table.name}, context {context}"
        ratios.plot(widths[:narrow], [t / ms[0] for t in ms[:narrow]], marker=".", label=label)
        spreads = [point.spread / 2 for point in points]
        times.errorbar(widths, ms, spreads, marker=".", label=label)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a plot needs the extra that brings matplotlib: pip install 'paceline[plot]'"
        ) from error
    return Figure
