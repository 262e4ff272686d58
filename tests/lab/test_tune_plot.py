"""The picture of a tuning: lines that can be told apart, and a legend beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from paceline.config import SpeculativeConfig
from paceline_lab.simulate.replay import ReplayResult
from paceline_lab.tune.plots import plot_tuning
from paceline_lab.tune.search import Setting
from paceline_lab.tune.tuning import BEST_FIXED, BEST_STEPS, SpeedUp, Tuning, TuningRow

NOTHING = ReplayResult([])


def line(family: str, planner: str, height: float) -> list[TuningRow]:
    """A row for each of a few budgets."""
    return [
        TuningRow(
            f"{family} {nodes}",
            Setting((family,), nodes, (SpeculativeConfig(),), planner),
            NOTHING,
            SpeedUp(height + nodes / 8, height, height + 2.0),
        )
        for nodes in (1, 2, 4, 8)
    ]


def tuning() -> Tuning:
    """Of several drafts, so that there are as many lines of hindsight and a long legend."""
    drafts = ["suffix", *(f"a draft of a rather long name, number {n}" for n in range(4))]
    rows = [row for i, who in enumerate(drafts) for row in line(who, "auto", 1.0 + i / 4)]
    hindsight = [BEST_FIXED, *(f"{BEST_STEPS}: suffix + {who}" for who in drafts[1:4])]
    oracles = [TuningRow(name, None, NOTHING, SpeedUp(4.0, 3.0, 5.0)) for name in hindsight]
    plain = TuningRow("plain", None, NOTHING, SpeedUp(1.0, None, None))
    return Tuning(plain, rows, oracles, len(rows), 0, 1.0)


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "tuning.svg"
    plot_tuning(tuning(), path)
    text = path.read_text()
    assert text.startswith("<?xml")
    assert "node budget" in text


@pytest.mark.parametrize("has_intervals", [True, False])
def test_lines_differ_and_the_legend_covers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_intervals: bool
) -> None:
    seen: list[Figure] = []

    def keep(figure: Figure, path: Path, **_: object) -> None:
        seen.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    found = tuning()
    found = replace(found, default=replace(found.rows[1], name="default: " + found.rows[1].name))
    if not has_intervals:
        rows = [replace(r, speedup=SpeedUp(r.speedup.value, None, None)) for r in found.rows]
        found = replace(found, rows=rows)
    plot_tuning(found, tmp_path / "tuning.png", "A $title", "best: what is recommended. " * 4)
    (figure,) = seen
    figure.draw_without_rendering()
    (panel,), (legend,) = figure.axes, figure.legends
    assert not panel.get_tightbbox().overlaps(legend.get_window_extent())
    assert panel.get_window_extent().height > 0.5 * figure.bbox.height
    assert figure.get_suptitle() == "A $title"
    assert "(draft tokens that a step may check)\n\nbest: what is" in panel.get_xlabel()
    assert panel.get_ylabel().endswith("(times)")
    labels = [each.get_label() for each in legend.legend_handles]
    assert labels[:3] == ["plain", "default", "recommended"]
    best = found.best
    assert best is not None
    assert best.candidate is not None
    place = next(each for each in panel.collections if each.get_label() == "recommended")
    assert place.get_offsets().tolist() == [[best.candidate.nodes, best.speedup.value]]
    names = {row.name for row in found.oracles}
    handles = [each for each in legend.legend_handles if each.get_label() in names]
    styles = {(str(each.get_color()), str(each._dash_pattern)) for each in handles}
    assert len(styles) == len(handles) == len(names)
