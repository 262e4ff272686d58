"""Every mechanism that the harness knows can be switched off, and is back afterwards."""

from __future__ import annotations

import pytest

from paceline.planner import value
from paceline.planner.value import SITUATIONS
from tests.planner.machine import DRAFT, Machine, request
from tests.programs import module

SWITCHES = module("ablation")
ALL = {**SWITCHES.SWITCHES, **SWITCHES.PLACEBOS}
TIMES = [10.0 + 0.1 * width for width in range(600)]


def run(steps: int = 20) -> Machine:
    machine = Machine(TIMES, (DRAFT,), learns=True)
    machine.run([request(1), request(2)], lambda _: 0.8, steps)
    return machine


@pytest.mark.parametrize("name", ALL)
def test_a_planner_runs_without_any_one_mechanism(name: str) -> None:
    with SWITCHES.switched_off(ALL[name]):
        assert run().nodes


def test_a_mechanism_is_off_within_and_on_afterwards() -> None:
    with SWITCHES.switched_off(ALL["values by situation"]):
        assert not value.SITUATIONS
    assert value.SITUATIONS == SITUATIONS


def test_a_row_says_what_a_mechanism_brings_and_where() -> None:
    report = module("ablation")
    cells = ("x: code, 1, 0", "x: edit, 1, 0", "y: code, 1, 0", "simulated: z, seed 0")
    kept = {
        name: {cell: [speed, 1.0] for cell, speed in zip(cells, speeds, strict=True)}
        for name, speeds in (
            (report.PLAIN, (1.0, 1.0, 1.0, 1.0)),
            (report.WHOLE, (2.0, 1.0, 1.0, 1.0)),
            ("credits", (1.0, 0.5, 1.0, 2.0)),
        )
    }
    row = report.row("credits", SWITCHES.SWITCHES["credits"], kept)
    replayed, simulated = row["replayed"], row["simulated"]
    assert replayed["mean"] == pytest.approx(4 ** (1 / 3))
    assert (replayed["best"], replayed["best_group"]) == (pytest.approx(2.0), "x, 1 at 0")
    assert (replayed["worst"], replayed["worst_group"]) == (1.0, "y, 1 at 0")
    assert replayed["below"] == 1
    assert simulated["mean"] == pytest.approx(0.5)
    assert "credits" in report.tables([row])[0]
