"""What the cost model learns: the machine, single widths; and what it does not believe."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.planner.corrections import CostFilter
from paceline.planner.cost import HOPE, CostModel
from paceline.planner.cost_table import CostTable, StepShape
from tests.planner.test_cost_table import additive_table, cliffs

Curve = Callable[[int], float]


def step(width: int) -> StepShape:
    return StepShape(width, 300 * width, 300, width)


def off(model: CostModel, width: int, milliseconds: float) -> float:
    """How far a prediction is off, as a logarithm."""
    return abs(math.log(model.predict(step(width)) / milliseconds))


def noisy(rng: random.Random, milliseconds: float) -> float:
    return milliseconds * math.exp(rng.gauss(0, 0.05))


# --- the scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [additive_table(), None])
def test_a_slow_machine_is_followed_and_its_recovery(table: CostTable | None) -> None:
    rng, truth = random.Random(1), additive_table()
    model = CostModel(table)
    widths = (1, 2, 3, 5, 5, 9, 1, 4)

    def run(steps: int, factor: float) -> list[float]:
        for at in range(steps):
            shape = step(widths[at % len(widths)])
            model.observe(shape, noisy(rng, factor * truth.step(shape)))
        return [off(model, width, factor * truth.step(step(width))) for width in set(widths)]

    run(200, 1.0)
    for factor in (2.0, 1.0, 0.4):
        assert max(run(20, factor)) < 0.1
    if table is not None:  # widths that were never visited share the scale
        assert off(model, 16, 0.4 * truth.step(step(16))) < 0.12


def test_a_slow_drift_is_followed() -> None:
    rng, table = random.Random(5), additive_table()
    model = CostModel(table)
    errors = []
    for at in range(600):
        width, scale = 1 + at % 8, math.exp(0.3 * math.sin(at / 100))
        errors.append(off(model, width, scale * table.step(step(width))))
        model.observe(step(width), noisy(rng, scale * table.step(step(width))))
    assert np.mean(errors) < 0.04


def test_what_was_seen_of_a_width_long_ago_is_forgotten() -> None:
    """Once a surprise, then nothing for longer than anything is remembered, then another one."""
    table = additive_table()
    model, mean = CostModel(table), table.step(step(1))
    model.observe(step(8), 3.0 * table.step(step(8)))
    for _ in range(3000):
        model.observe(step(1), mean)
    assert off(model, 8, table.step(step(8))) < 0.01
    for _ in range(40):
        model.observe(step(8), 3.0 * table.step(step(8)))
        model.observe(step(1), mean)
    assert off(model, 8, 3.0 * table.step(step(8))) < 0.1


def test_wide_steps_alone_becoming_slow_and_fast_again() -> None:
    """As when another process takes a core: memory bounds the narrow steps, arithmetic the wide."""
    rng, table = random.Random(2), additive_table()
    model = CostModel(table)
    for factor in (1.0, 1.6, 1.0):
        for at in range(40):
            width = (1, 6, 2, 8)[at % 4]
            slowed = (factor if width > 4 else 1.0) * table.step(step(width))
            model.observe(step(width), noisy(rng, slowed))
        ratio = model.predict(step(8)) / model.predict(step(1))
        expected = factor * table.step(step(8)) / table.step(step(1))
        assert ratio == pytest.approx(expected, rel=0.12)


# --- the residuals -------------------------------------------------------------------------------


def test_residuals_stay_with_their_width_and_fade() -> None:
    rng, table = random.Random(3), additive_table()
    model = CostModel(table)

    def visit(width: int, factor: float) -> None:
        model.observe(step(width), noisy(rng, factor * table.step(step(width))))

    def factor(width: int) -> float:
        return model.predict(step(width)) / table.step(step(width))

    for _ in range(100):
        visit(1, 1.0)
        visit(2, 1.0)
        visit(12, 1.3)
        visit(200, 1.0)
    learnt = factor(12)
    assert learnt == pytest.approx(1.3, abs=0.08)
    assert factor(1) == pytest.approx(1.0, abs=0.06)
    assert factor(200) == pytest.approx(1.0, abs=0.06)
    for _ in range(400):
        visit(1, 1.0)
        visit(2, 1.0)
        visit(200, 1.0)
    assert factor(12) == pytest.approx(1.0, abs=0.1), "not visited lately"


def test_what_wide_steps_have_in_common_holds_for_those_that_were_not_seen() -> None:
    """Another process takes a core: narrow steps stay as they are, wide ones take twice as long."""
    rng, table = random.Random(4), additive_table()
    model = CostModel(table)
    for width, factor in [(1, 1.0), (9, 1.0)] * 50 + [(1, 1.0), (9, 2.0)] * 10:
        model.observe(step(width), noisy(rng, factor * table.step(step(width))))

    def factor_of(width: int) -> float:
        return model.predict(step(width)) / table.step(step(width))

    assert factor_of(1) == pytest.approx(1.0, abs=0.1)
    assert factor_of(9) == pytest.approx(2.0, abs=0.2)
    assert factor_of(16) > 1.6
    assert 1.2 < factor_of(4) < 2.0


def test_a_change_that_only_wide_steps_show_leaves_narrow_ones_in_doubt_until_one_is_seen() -> None:
    rng, table = random.Random(5), additive_table()
    model = CostModel(table)

    def visit(width: int, factor: float) -> None:
        model.observe(step(width), noisy(rng, factor * table.step(step(width))))

    for _ in range(100):
        visit(9, 1.0)
        visit(1, 1.0)
    known = model.deviation(step(1))
    for _ in range(3):
        visit(9, 4.0)
    assert model.deviation(step(1)) > 3 * known
    assert model.deviation(step(9)) < model.deviation(step(1)), "that is what was seen"
    visit(1, 1.0)
    assert model.deviation(step(1)) < 2 * known
    assert model.predict(step(1)) == pytest.approx(table.step(step(1)), rel=0.15)
    assert model.predict(step(9)) == pytest.approx(4.0 * table.step(step(9)), rel=0.2)


def test_width_may_be_hoped_to_be_cheap_as_far_as_it_was_not_seen() -> None:
    table = additive_table()
    model = CostModel(table)
    times = model.growth(step(1), 16)
    hoped = model.hoped(step(1), times)
    assert hoped[0] == times[0]
    assert hoped[16] - hoped[0] == pytest.approx(HOPE * (times[16] - times[0]))
    for _ in range(20):
        model.observe(step(1), table.step(step(1)))
        model.observe(step(5), table.step(step(5)))
    times = model.growth(step(1), 16)
    hoped = model.hoped(step(1), times)

    def part(nodes: int) -> float:
        return (hoped[nodes] - hoped[0]) / (times[nodes] - times[0])

    assert part(4) > 2 * part(16) > 2 * HOPE


# --- bad observations ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300])
def test_what_is_no_time_is_ignored(bad: float) -> None:
    for model in (CostModel(), CostModel(cliffs())):
        before = model.growth(step(1), 20)
        model.observe(step(2), bad)
        assert model.growth(step(1), 20) == before


@pytest.mark.parametrize("factor", [1e-4, 1e6])
def test_one_outlier_moves_little(factor: float) -> None:
    rng = random.Random(4)
    for model in (CostModel(), CostModel(cliffs())):
        for at in range(100):
            width = 1 + at % 9
            model.observe(step(width), noisy(rng, cliffs().step(step(width))))
        before = np.array(model.growth(step(1), 8))
        model.observe(step(5), factor * 21.0)
        assert np.abs(np.log(np.array(model.growth(step(1), 8)) / before)).max() < 0.15


def test_a_first_observation_that_is_an_outlier_is_overcome() -> None:
    model = CostModel(cliffs(is_relative=True))
    model.observe(step(1), 1e6)
    for _ in range(5):
        model.observe(step(1), 10.0)
    assert model.predict(step(1)) == pytest.approx(10.0, rel=0.02)
    assert model.predict(step(9)) == pytest.approx(12.0, rel=0.15)


def test_a_width_whose_first_visit_was_an_outlier_is_learnt_all_the_same() -> None:
    rng, truth, model = random.Random(6), additive_table(), CostModel()
    for at in range(60):
        width = (1, 2, 5, 9)[at % 4] if at >= 40 else (1, 2, 5)[at % 3]
        if at == 40:
            model.observe(step(9), 30 * truth.step(step(9)))
        model.observe(step(width), noisy(rng, truth.step(step(width))))
    assert off(model, 9, truth.step(step(9))) < 0.12


# --- without a profile ---------------------------------------------------------------------------


def plausible_widths(rng: random.Random, steps: int) -> list[int]:
    """Stretches of one most draft length each, mostly up to 8 nodes."""
    widths: list[int] = []
    while len(widths) < steps:
        most = rng.choice((0, 2, 4, 8, 8, 15)) if rng.random() < 0.9 else 31
        widths += [1 + rng.randint(0, most) for _ in range(rng.randint(5, 30))]
    return widths[:steps]


def errors_after(steps: int, truth: Curve, seed: int) -> list[float]:
    """How far each width that was visited three times is off after so many steps."""
    rng, model = random.Random(seed), CostModel()
    model.observe(StepShape(256, 0, 0, 1), 8 * truth(32))  # a prompt
    widths = plausible_widths(rng, steps)
    for width in widths:
        model.observe(step(width), noisy(rng, truth(width)))
    return [off(model, w, truth(w)) for w in sorted(set(widths)) if widths.count(w) >= 3]


def interpolated(points: dict[int, float]) -> Curve:
    return lambda width: float(np.interp(width, list(points), list(points.values())))


MACHINES = {
    "memory bound": {1: 40.0, 32: 44.0},
    "compute bound": {1: 10.0, 32: 320.0},
    "expensive second row": {1: 30.0, 2: 93.0, 9: 127.0, 32: 197.0},
    "cliffs": {1: 70.0, 2: 132.0, 3: 190.0, 4: 148.0, 7: 247.0, 8: 256.0, 9: 380.0, 32: 388.0},
    "a cliff downwards": {1: 55.0, 4: 57.0, 8: 94.0, 9: 66.0, 32: 73.0},
}


def check_learnt(truth: Curve) -> None:
    errors = [error for seed in range(6) for error in errors_after(200, truth, seed)]
    assert np.mean(errors) < 0.042
    assert np.quantile(errors, 0.9) < 0.105


@pytest.mark.parametrize("name", MACHINES)
def test_any_machine_is_known_after_200_steps(name: str) -> None:
    check_learnt(interpolated(MACHINES[name]))


def test_published_machines_are_known_after_200_steps(shared_data: Path) -> None:
    document = json.loads((shared_data / "cost_curves.json").read_text())
    for curve in document["curves"]:
        check_learnt(interpolated({i + 1: 20 * x for i, x in enumerate(curve["cost_ratio"])}))


# --- the native filter ----------------------------------------------------------------------------

WIDTHS = (0, 1, 1, 2, 3, 8, 16, 17, 20, 33, 200, 1023, 1024, 1500)


@pytest.mark.parametrize("seed", range(8))
def test_the_native_filter_learns_and_answers_the_same(seed: int) -> None:
    native = pytest.importorskip("paceline._native", reason="the native kernels are not built")
    rng, is_relative, spread = random.Random(seed), seed % 2 == 0, (0.1, 0.5)[seed // 4]
    ours, theirs = CostFilter(spread, is_relative), native.CostFilter(spread, is_relative)
    for number in range(200):
        width, jump = rng.choice(WIDTHS), rng.choice((0.0,) * 9 + (2.0,))
        level = rng.gauss(0.2 * (number > 100), 0.05) + rng.gauss(0.0, jump)
        assert theirs.observe(width, level) == ours.observe(width, level)
        width, times = rng.randrange(1100), [rng.random() for _ in range(40)]
        assert theirs.factor(width) == ours.factor(width)
        assert theirs.corrected(width, times) == ours.corrected(width, times)
        assert theirs.doubts(width, 40) == ours.doubts(width, 40)
        assert theirs.deviation(width) == ours.deviation(width)
        assert theirs.knows_unit == ours.knows_unit
