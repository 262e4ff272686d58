"""Reliability diagrams as a picture: the share of accepted nodes over what was estimated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.workbench.estimators_report import Scores
from paceline.workbench.profile_plot import check_plot, save_plot


def plot_reliability(panels: Mapping[str, Mapping[str, Scores]], path: str | Path) -> None:
    """Draw one panel per log with a line per estimator.

    Args:
        panels: title to, by estimator, its scores.

    Raises:
        ConfigError: matplotlib is not installed, or the file's kind is unknown.
        ProfileError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(panels), 4.0), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (title, lines) in zip(axes, panels.items(), strict=True):
        panel.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for name, scores in lines.items():
            label = f"{name}, ECE {scores.calibration_error:.3f}"
            estimates = [each.estimate for each in scores.bins]
            panel.plot(estimates, [each.accepted for each in scores.bins], marker=".", label=label)
        panel.set(title=title, xlabel="estimate", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
        panel.legend(fontsize="small")
    save_plot(figure, path)
