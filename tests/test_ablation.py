"""Every mechanism that the harness knows can be switched off, and is back afterwards."""

from __future__ import annotations

import pytest

from paceline.policy.fairness import Fairness
from tests.policy.machine import DRAFT, Machine, request
from tests.programs import module

SWITCHES = module("ablation_switches")
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
    with SWITCHES.switched_off(ALL["fairness"]):
        assert run().planner._fairness is None
    assert isinstance(run().planner._fairness, Fairness)


def test_a_row_says_what_a_mechanism_brings_and_where() -> None:
    ablation = module("ablation")
    kept = {
        "plain decoding": {"a": [1.0, 1.0], "b": [1.0, 1.0], "simulated: c": [1.0, 1.0]},
        "nothing": {"a": [2.0, 1.0], "b": [1.0, 1.0], "simulated: c": [1.0, 1.0]},
        "fairness": {"a": [1.0, 1.0], "b": [0.5, 1.0], "simulated: c": [2.0, 1.0]},
    }
    for each in kept.values():
        each["simulated: d"] = each["simulated: c"]
    row = ablation.row("fairness", kept)
    assert row["replayed"]["mean"] == pytest.approx(2.0)
    assert row["replayed"]["below"] == 1
    assert row["simulated"]["mean"] == pytest.approx(0.5)
