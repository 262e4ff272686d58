"""Pictures of cost tables and explained runs: with a title, units, what is recommended or was
chosen, and a sentence below that says what to see.

The only place that imports matplotlib; nothing here touches a screen. What draws raises
:class:`ConfigError` where matplotlib is not installed or the kind of the file is unknown, and
:class:`ProfileError` where the file cannot be written.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from paceline.core.checks import check_output
from paceline.core.errors import ConfigError, ProfileError
from paceline.core.files import whole_file
from paceline.core.installation import install_command
from paceline.planner.cost_table import CostTable
from paceline.profiling.explain import StepRecord
from paceline.profiling.profile import draft_sentences, paying_drafts

SUFFIXES = (".png", ".svg", ".pdf")
NARROW = 64
"""The widest step of the left panel, where verification lies."""
MAX_LABELS = 60
"""Pieces of text that are legible under the timeline."""
CHARACTERS_PER_INCH = 12
"""Of the sentence below a picture."""
MARKED = {"marker": "*", "s": 250, "color": "gold", "edgecolor": "black", "zorder": 5}
"""How a recommended point looks."""


def check_plot(path: str | Path) -> None:
    """Raise :class:`ConfigError` unless a picture could be drawn there."""
    check_output(path)
    new_figure(path)


def new_figure(path: str | Path, width: float = 4.0, height: float = 4.0) -> Any:
    """An empty picture, sizes in inches; raises :class:`ConfigError` where there can be none."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} cannot be plotted; allowed: files in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a plot needs the extra that brings matplotlib: {install_command('plot')}"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, title: str, sentence: str, path: str | Path) -> None:
    """Write it with a title above and a sentence below, in the format of the file's suffix."""
    figure.suptitle(title, parse_math=False)
    figure.supxlabel(wrapped(sentence, figure), fontsize="medium", parse_math=False)
    with whole_file(path, ProfileError) as partial:
        figure.savefig(partial, format=Path(path).suffix[1:] or "png")


def wrapped(sentence: str, figure: Any) -> str:
    """A sentence in lines that fit below a picture."""
    return fill(sentence, int(CHARACTERS_PER_INCH * figure.get_figwidth()))


def plot_tables(tables: Sequence[CostTable], path: str | Path) -> None:
    """Draw every table: the cost ratio of narrow steps, and the time of all of them."""
    figure = new_figure(path, 12, 5)
    ratios, times = figure.subplots(1, 2)
    for table in tables:
        _draw(table, ratios, times)
    _mark_longest_draft(ratios, tables[0])
    width = "width of the step (rows)"
    ratios.set(xlabel=width, ylabel="time of a step (plain steps)", ylim=(0, None))
    unit = "plain steps" if all(table.is_relative for table in tables) else "ms"
    times.set(xlabel=width, ylabel=f"time of a step ({unit})", xscale="log", yscale="log")
    for panel in (ratios, times):
        panel.grid(alpha=0.3)
    ratios.legend(fontsize="small")
    names = " and ".join(dict.fromkeys(table.name for table in tables))
    sentence = " ".join(draft_sentences(tables[0])) or "Only plain steps are known."
    save_figure(figure, f"What a step costs by its width: {names}", sentence, path)


def _mark_longest_draft(ratios: Any, table: CostTable) -> None:
    """The widest step whose draft pays with as few right tokens as possible."""
    paying, context = paying_drafts(table), table.contexts[0]
    if paying is not None:
        width, label = 1 + paying.longest, f"longest draft that pays: {paying.longest}"
        ratios.scatter([width], [table.cost_ratio(width, context)], label=label, **MARKED)


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


def plot_steps(
    records: Sequence[StepRecord],
    texts: Sequence[str],
    path: str | Path,
    title: str = "",
    sentence: str = "",
) -> None:
    """Draw the steps that decode tokens; ``texts`` are what each of them added."""
    pairs = [each for each in zip(records, texts, strict=True) if each[0].num_decoding]
    decoding = [record for record, _ in pairs]
    figure = new_figure(path, 14, 9)
    costs, timeline = figure.subplots(2, 1)
    _draw_costs(costs, decoding)
    _draw_timeline(timeline, decoding, [text for _, text in pairs])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # text may have characters that the font lacks
        save_figure(figure, title, sentence, path)


def _draw_costs(panel: Any, records: Sequence[StepRecord]) -> None:
    """The predicted curves, and every forward that ran with how often its width was chosen."""
    for record in records:
        first = record.shape.rows - record.num_verified
        widths = range(first, first + len(record.growth))
        panel.plot(widths, record.growth, color="tab:blue", alpha=0.3, linewidth=1)
    panel.scatter(
        [record.shape.rows for record in records],
        [record.forward_ms for record in records],
        s=12,
        color="tab:orange",
        label="measured",
    )
    chosen = Counter(record.shape.rows for record in records)
    for rows, count in sorted(chosen.items()):
        panel.axvline(rows, color="grey", alpha=0.2)
        panel.annotate(
            f"{count}x", (rows, 0.98), xycoords=("data", "axes fraction"), ha="center", va="top"
        )
    if chosen:
        (rows, _), *_ = chosen.most_common(1)
        panel.axvline(rows, color="tab:green", alpha=0.5, label=f"most often chosen: {rows} rows")
    panel.margins(y=0.15)
    panel.plot([], [], color="tab:blue", label="predicted")
    panel.set(xlabel="width of the step (rows)", ylabel="forward (ms)", ylim=(0, None))
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_title("cost curve and chosen widths")
    panel.legend(fontsize="small")


def _draw_timeline(panel: Any, records: Sequence[StepRecord], texts: Sequence[str]) -> None:
    """Candidates, verified and accepted nodes of each step, at the text that it continued."""
    places, emitted = [], 0
    for record in records:
        places.append(emitted)
        emitted += record.num_emitted
    series = {
        "candidates": ([len(record.nodes) for record in records], "lightgrey"),
        "verified": ([record.num_verified for record in records], "tab:blue"),
        "accepted": ([record.num_accepted for record in records], "tab:green"),
    }
    for name, (heights, colour) in series.items():
        widths = [max(record.num_emitted, 1) for record in records]
        panel.bar(
            places, heights, widths, align="edge", color=colour, edgecolor="white", label=name
        )
    stride = max(1, -(-len(texts) // MAX_LABELS))
    panel.set_xticks(
        places[::stride], [repr(text)[1:-1][:12] for text in texts[::stride]], rotation=90
    )
    for label in panel.get_xticklabels():
        label.set(parse_math=False, fontsize="x-small", ha="left")
    panel.set(xlabel="text", ylabel="draft tokens (nodes)", ylim=(0, None))
    panel.set_title("nodes along the text: each step begins at what it added")
    panel.legend(fontsize="small")
