"""An explained run as a picture: costs and widths, reliability, and widths along the text.

Needs matplotlib, as :mod:`paceline.workbench.profile_plot` does; touches no screen.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.workbench.explain_steps import StepRecord
from paceline.workbench.explain_summary import summarise
from paceline.workbench.profile_plot import check_plot, save_plot

MAX_LABELS = 60
"""Pieces of text that are legible under the timeline."""


def plot_steps(records: Sequence[StepRecord], texts: Sequence[str], path: str | Path) -> None:
    """Draw the steps in which somebody decoded.

    Args:
        texts: what each of ``records`` added.

    Raises:
        ConfigError: matplotlib is not installed, or the file's kind is unknown.
        ProfileError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    pairs = [each for each in zip(records, texts, strict=True) if each[0].num_decoding]
    decoding = [record for record, _ in pairs]
    figure = Figure(figsize=(14, 9), layout="constrained")
    panels = figure.subplot_mosaic([["costs", "reliability"], ["timeline", "timeline"]])
    _draw_costs(panels["costs"], decoding)
    _draw_reliability(panels["reliability"], decoding)
    _draw_timeline(panels["timeline"], decoding, [text for _, text in pairs])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # text may have characters that the font lacks
        save_plot(figure, path)


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
    for rows, count in sorted(Counter(record.shape.rows for record in records).items()):
        panel.axvline(rows, color="grey", alpha=0.2)
        panel.annotate(
            f"{count}x", (rows, 0.98), xycoords=("data", "axes fraction"), ha="center", va="top"
        )
    panel.margins(y=0.15)
    panel.plot([], [], color="tab:blue", label="predicted")
    panel.set(xlabel="width (rows)", ylabel="forward (ms)", ylim=(0, None))
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_title("cost curve and chosen widths")
    panel.legend(fontsize="small")


def _draw_reliability(panel: Any, records: Sequence[StepRecord]) -> None:
    """Share of right nodes against their estimates; areas grow with the number of nodes."""
    panel.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for summary in summarise(records):
        filled = [each for each in summary.bins if each.count]
        panel.scatter(
            [each.expected / each.count for each in filled],
            [each.num_right / each.count for each in filled],
            s=[10 + 5 * each.count for each in filled],
            alpha=0.6,
            label=f"{summary.origin}, {summary.num_labelled} nodes, "
            f"error {summary.calibration_error:.2f}",
        )
    panel.set(xlabel="estimated", ylabel="right", xlim=(0, 1), ylim=(0, 1))
    panel.set_title("reliability of the estimates")
    if panel.collections:
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
    panel.set(ylabel="nodes", ylim=(0, None))
    panel.set_title("nodes along the text: each step begins at what it added")
    panel.legend(fontsize="small")
