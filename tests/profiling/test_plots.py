"""What pictures say: a title, units, what is recommended or was chosen, and a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from paceline.planner.cost_table import CostPoint, CostTable, StepShape
from paceline.profiling.explain import RequestPart, StepRecord
from paceline.profiling.plots import plot_steps, plot_tables


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What was drawn, and not written."""
    seen: list[Figure] = []

    def keep(figure: Figure, path: Path, **_: object) -> None:
        seen.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    return seen


def table(name: str, ratios: list[float], *, is_relative: bool = False) -> CostTable:
    points = [CostPoint(1, 64, width, width, ms) for width, ms in enumerate(ratios, start=1)]
    return CostTable(name, points, is_relative)


def test_tables(figures: list[Figure], tmp_path: Path) -> None:
    target, draft = table("big", [2.0, 2.2, 3.0, 4.2]), table("small", [0.5, 0.6])
    plot_tables([target, draft], tmp_path / "x.png")
    plot_tables([table("curve", [1.0, 3.0], is_relative=True)], tmp_path / "x.png")
    measured, relative = figures
    assert measured.get_suptitle() == "What a step costs by its width: big and small"
    assert measured.get_supxlabel() == (
        "Checking 3 tokens costs 2.10 plain steps here. Drafts of up to 2 tokens pay when 1 of "
        "them is right."
    )
    ratios, times = measured.axes
    assert ratios.get_ylabel() == "time of a step (plain steps)"
    assert times.get_ylabel() == "time of a step (ms)"
    (mark,) = [each for each in ratios.collections if "longest draft" in str(each.get_label())]
    assert mark.get_offsets().tolist() == [[3, 1.5]]
    ratios, times = relative.axes
    assert times.get_ylabel() == "time of a step (plain steps)"
    assert not [each for each in ratios.collections if "longest draft" in str(each.get_label())]
    assert relative.get_supxlabel().endswith("No draft pays here, even if all of it is right.")


def test_steps(figures: list[Figure], tmp_path: Path) -> None:
    records = [
        StepRecord(
            index,
            StepShape(rows, 0, 0, rows),
            [],
            [RequestPart(0, 2 + index, [1], [])],
            forward_ms=2.0,
            total_ms=3.0,
            num_decoding=1,
            num_emitted=1,
            growth=[1.0, 1.5],
            rate=1.0,
            predicted_ms=None,
        )
        for index, rows in enumerate((1, 3, 3))
    ]
    plot_steps(records, ["a", "b", "c"], tmp_path / "x.png", "How x answered", "It was fast.")
    (figure,) = figures
    assert figure.get_suptitle() == "How x answered"
    assert figure.get_supxlabel() == "It was fast."
    costs, timeline = figure.axes
    assert (costs.get_xlabel(), costs.get_ylabel()) == ("width of the step (rows)", "forward (ms)")
    assert (timeline.get_xlabel(), timeline.get_ylabel()) == ("text", "draft tokens (nodes)")
    labels = [str(line.get_label()) for line in costs.get_lines()]
    assert "most often chosen: 3 rows" in labels
