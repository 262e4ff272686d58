"""Wide steps that a table has too dear are explored, at a bounded price."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from paceline.config import Objective
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import CostTable, StepShape
from paceline.planner.drafts import Drafts
from paceline.planner.pace import StepReport
from paceline.planner.planner import THOUGHT_MS, WideSteps
from paceline.planner.value import SHARE, DraftTime, Exploration, PlannedStep, Source
from tests.planner.machine import DEPTH, DRAFT, LOOKUP, Machine, cost_table, request
from tests.quick import in_step

FLAT = [10.0 + 0.2 * w for w in range(600)]
STEEP = [10.0 * w for w in range(1, 600)]


def too_dear(factor: float, widest_right: int = 1) -> CostTable:
    """What is measured of FLAT while steps beyond a width are slow."""
    return cost_table([ms * (factor if w > widest_right else 1) for w, ms in enumerate(FLAT, 1)])


def machine(
    table: CostTable, source: Source = LOOKUP, objective: Objective | None = None, seed: int = 0
) -> Machine:
    draft_time = DraftTime(0.4, 0.4) if source.costs_forwards else DraftTime(0.02)
    return Machine(FLAT, (source,), draft_time, 0.5, seed, True, table, objective=objective)


def speed(machine: Machine, right: float, steps: int) -> float:
    """Over plain decoding, of these steps alone."""
    machine.milliseconds = machine.plain_milliseconds = 0.0
    machine.run([request(1)], lambda _: right, steps)
    return machine.speed_up


@pytest.mark.parametrize(
    ("wrong", "source"),
    in_step([(3.0, 1, 0.4), (8.0, 1, 0.8), (3.0, 4, 0.9)], [LOOKUP, DRAFT], steps=2),
)
def test_a_table_that_has_wide_steps_too_dear_is_found_out_within_2500_steps(
    wrong: tuple[float, int, float], source: Source
) -> None:
    factor, widest_right, right = wrong
    misled, informed = (
        machine(table, source) for table in (too_dear(factor, widest_right), cost_table(FLAT))
    )
    misled.run([request(1)], lambda _: right, 2500)
    informed.run([request(1)], lambda _: right, 2500)
    fastest = max(speed(misled, right, 500) for _ in range(4))
    assert fastest > 0.9 * speed(informed, right, 2000)


@pytest.mark.parametrize(
    ("times", "right"),
    [
        (FLAT, 0.9),
        (STEEP, 0.4),
        pytest.param(FLAT, 0.0, marks=pytest.mark.slow),
        pytest.param(FLAT, 0.4, marks=pytest.mark.slow),
        pytest.param(STEEP, 0.9, marks=pytest.mark.slow),
        pytest.param(STEEP, 0.0, marks=pytest.mark.slow),
    ],
    ids=lambda value: None if isinstance(value, float) else "flat" if value is FLAT else "steep",
)
def test_with_a_right_table_looks_cost_next_to_nothing(times: list[float], right: float) -> None:
    speeds = []
    for looks in (True, False):
        each = Machine(times, (LOOKUP,), DraftTime(0.02), learns=True)
        if not looks:
            each.planner._wide._may_be_wider = lambda step: False  # type: ignore[method-assign]
        each.run([request(1)], lambda _: right, 5000)
        speeds.append(each.speed_up)
    assert speeds[0] > 0.995 * speeds[1]


def test_nothing_is_spent_on_drafts_that_would_not_pay_if_width_were_cheap() -> None:
    each = machine(too_dear(8.0))
    each.run([request(1)], lambda _: 0.0, 6000)
    assert not sum(map(sum, each.nodes))
    each.run([request(1)], lambda _: 0.8, 200)
    assert sum(map(sum, each.nodes)), "what was saved meanwhile is there when the text changes"


def test_what_does_not_learn_does_not_look() -> None:
    each = machine(too_dear(8.0))
    frozen = Machine(FLAT, (LOOKUP,), each.draft_time, 0.5, table=too_dear(8.0))
    for run in (each, frozen):
        run.run([request(1)], lambda _: 0.8, 2500)
    assert sum(map(sum, each.nodes))
    assert not sum(map(sum, frozen.nodes))


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_a_request_alone_is_looked_at_whatever_the_objective(kind: str) -> None:
    each = machine(too_dear(8.0), objective=Objective(kind))
    each.run([request(1)], lambda _: 0.8, 2800)
    assert sum(map(sum, each.nodes))


def test_batches_are_looked_at_where_a_request_may_be_held_up() -> None:
    each = machine(too_dear(8.0, widest_right=2))
    each.run([request(1), request(2)], lambda _: 0.9, 2800)
    assert sum(map(sum, each.nodes))


def test_what_a_request_asks_for_it_gets_and_no_more() -> None:
    each = machine(too_dear(8.0))
    each.run([request(1, k=3)], lambda _: 0.9, 2500)
    assert {nodes[0] for nodes in each.nodes} == {3}
    assert DEPTH > 3


# --- their price -------------------------------------------------------------------------------

ONE = StepShape(1, 0, 0, 1, 1)
PLAIN_MS = FLAT[0]
LOOK_MS = 72.0
GROWTH = [PLAIN_MS, PLAIN_MS + LOOK_MS]
LOOK_STEPS = LOOK_MS / PLAIN_MS / SHARE
"""Plain steps that have to pass for a wide one."""


def new_wide_steps() -> tuple[WideSteps, Exploration]:
    exploration = Exploration()
    table = cost_table([PLAIN_MS] + [PLAIN_MS + LOOK_MS] * 8)
    return WideSteps(CostModel(table), exploration, is_strict=False), exploration


def is_widened(wide: WideSteps, step: PlannedStep) -> bool:
    """Whether a node is verified that is only chosen where width is hoped to be cheap."""
    seen: list[Sequence[float]] = [GROWTH]

    def pick(growth: Sequence[float]) -> int:
        seen.append(growth)
        return int(growth is not GROWTH)

    wide.widen(step, Drafts(), 0, 1, pick)
    return seen[-1] is not GROWTH


def steps_to_look(wide: WideSteps, exploration: Exploration, measured_ms: float) -> int:
    """Plain steps until a node is verified to see what that takes, which is then so long."""
    for count in itertools.count():
        step = PlannedStep(ONE, [request(1)], GROWTH, GROWTH, plain_ms=PLAIN_MS)
        if is_widened(wide, step):
            shape = StepShape(2, 0, 0, 2, 1)
            wide.end(step, StepReport(shape, measured_ms, measured_ms, 1, 1))
            return count
        exploration.passed(PLAIN_MS)
    raise AssertionError


def test_wide_steps_take_their_share_of_the_time() -> None:
    wide, exploration = new_wide_steps()
    for _ in range(4):
        steps = steps_to_look(wide, exploration, PLAIN_MS + LOOK_MS)
        assert steps == pytest.approx(LOOK_STEPS, abs=2 * THOUGHT_MS / SHARE / PLAIN_MS + 1)


def test_one_that_took_less_is_soon_followed_by_another() -> None:
    wide, exploration = new_wide_steps()
    steps_to_look(wide, exploration, PLAIN_MS + 1.0)
    assert steps_to_look(wide, exploration, PLAIN_MS) < LOOK_STEPS / 10


@pytest.mark.parametrize("measured_ms", [0.0, -5.0, float("nan"), float("inf"), 1e9])
def test_what_is_no_time_costs_what_was_predicted(measured_ms: float) -> None:
    wide, exploration = new_wide_steps()
    steps_to_look(wide, exploration, measured_ms)
    assert steps_to_look(wide, exploration, PLAIN_MS) == pytest.approx(LOOK_STEPS, abs=4)


def test_a_step_whose_width_is_a_prompts_is_not_made_wider() -> None:
    wide, exploration = new_wide_steps()
    exploration.passed(1e9)
    step = PlannedStep(StepShape(64, 0, 0, 1, 2), [request(1)], GROWTH, GROWTH, plain_ms=FLAT[63])
    assert not is_widened(wide, step)
