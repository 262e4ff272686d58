"""The planner on machines and texts whose best draft length can be computed by hand."""

from __future__ import annotations

import math

import pytest

from paceline.config import Objective
from paceline.planner.pace import StepReport
from paceline.planner.planner import CostAwarePlanner
from paceline.planner.value import SHARE, DraftTime, Source
from paceline.request.request import Request
from tests.planner.machine import DEPTH, DRAFT, LOOKUP, Machine, cost_table, request
from tests.quick import once

FLAT = [10.0 + 0.2 * w for w in range(600)]
STEEP = [10.0 * w for w in range(1, 600)]
CLIFFS = [10.0, 18.8, 27.1, 21.1, 24.7, 28.8, 35.3, 36.5] + [54.0 + 0.01 * w for w in range(592)]
"""The first widths of an M1 Ultra, where four rows are cheaper than three."""
MATCHED = Source("prompt_lookup", matched=lambda request: 20)
RIGHT = (0.0, 0.3, 0.6, 0.9)


def best_fixed(times: list[float], right: float, draft: DraftTime) -> float:
    """Speed over plain of the best fixed draft length, plain decoding included."""
    speeds = [1.0]
    for k in range(1, DEPTH + 1):
        tokens = sum(right**i for i in range(k + 1))
        drafting = draft.call + draft.level * (k - 1)
        speeds.append(tokens * times[0] / (times[k] + drafting))
    return max(speeds)


@pytest.mark.parametrize(
    ("right", "times", "draft"),
    once(RIGHT, [FLAT, STEEP, CLIFFS], [DraftTime(0.05), DraftTime(0.4, 0.4)], times=2),
)
def test_close_to_the_best_fixed_length(times: list[float], right: float, draft: DraftTime) -> None:
    machine = Machine(times, draft_time=draft)
    machine.run([request(1)], lambda _: right, 1500)
    best = best_fixed(times, right, draft)
    assert machine.speed_up > 0.95 * best
    assert machine.speed_up > 0.975  # the first steps, in which all of this is learnt, included


def test_where_nothing_is_predictable_hardly_anything_is_spent() -> None:
    machine = Machine(FLAT, draft_time=DraftTime(0.5, 0.5))
    machine.run([request(1)], lambda _: 0.0, 500)
    machine.milliseconds = machine.plain_milliseconds = 0.0
    machine.run([request(2)], lambda _: 0.0, 4000)
    assert machine.speed_up > 0.992


def test_a_switch_from_prose_to_code_is_followed() -> None:
    machine = Machine(FLAT, sources=(LOOKUP,), draft_time=DraftTime(0.02))
    one = request(1)
    machine.run([one], lambda _: 0.0, 400)
    assert sum(map(sum, machine.nodes[-100:])) < 100
    tokens, steps = 0, 0
    while sum(machine.nodes[-1]) < 3 and steps < 100:
        tokens += machine.run([one], lambda _: 0.95, 1)[1]
        steps += 1
    assert tokens <= 32
    machine.run([one], lambda _: 0.95, 50)
    assert sum(map(sum, machine.nodes[-20:])) > 20 * 5


@pytest.mark.parametrize("source", [DRAFT, MATCHED], ids=["draft", "matched"])
def test_an_adapter_without_good_drafts_takes_none_from_the_model(source: Source) -> None:
    """Nor the other way round; both begin alike."""
    machine = Machine(FLAT, sources=(source,), draft_time=DraftTime(0.1))

    def drafted(one: Request, right: float, steps: int) -> int:
        """Nodes of the last 20 steps."""
        machine.run([one], lambda _: right, steps)
        machine.planner.finish(one)
        return sum(map(sum, machine.nodes[-20:]))

    usual = drafted(request(1), 0.9, 300)
    assert drafted(request(2, adapter="other"), 0.9, 20) > 0.5 * usual > 40
    assert drafted(request(3, adapter="other"), 0.0, 600) < 0.1 * usual
    assert drafted(request(4), 0.9, 20) > 0.9 * usual
    assert drafted(request(5, adapter="other"), 0.0, 100) < 0.2 * usual


def test_a_repetitive_request_takes_nothing_from_its_neighbours() -> None:
    """Rates of the unpredictable ones against the same batch decoded plainly."""
    times = [10.0 + 0.1 * w for w in range(600)]
    machine = Machine(times, sources=(LOOKUP,), draft_time=DraftTime(0.02))
    requests = [request(i) for i in range(8)]
    steps = 800
    emitted = machine.run(requests, lambda r: 0.95 if r.request_id < 2 else 0.0, steps)
    plain_rate = 1 / times[len(requests) - 1]
    for each in requests[2:]:
        assert emitted[each.request_id] / machine.milliseconds > 0.95 * plain_rate
    assert emitted[0] > 1.3 * steps


def test_drafting_for_some_does_not_hold_up_the_others() -> None:
    """A draft model that one of two requests gains from, and that takes a sixth of a step."""
    times = [10.0 + 0.1 * w for w in range(600)]
    machine = Machine(times, draft_time=DraftTime(1.7, 0.5))
    one, other = requests = [request(1), request(2)]
    emitted = machine.run(requests, lambda r: 0.95 if r is one else 0.0, 800)
    assert emitted[other.request_id] / machine.milliseconds > 0.96 / times[1]
    assert emitted[one.request_id] > 860
    assert len({sum(nodes) > 0 for nodes in machine.nodes[-200:]}) == 2  # it takes turns


def test_what_a_request_asks_for_it_gets() -> None:
    machine = Machine(STEEP)  # where no draft ever pays
    asks, declines = request(1, k=3), request(2, k=None)
    machine.run([asks, declines], lambda _: 0.0, 300)
    assert {nodes[0] for nodes in machine.nodes} == {3}
    assert sum(nodes[1] for nodes in machine.nodes[100:]) < 60


def test_a_text_is_asked_where_it_has_come_to_a_match_that_pays() -> None:
    matched = 0
    source = Source("suffix", matched=lambda _: matched)
    machine = Machine(FLAT, sources=(source,), draft_time=DraftTime(0.5))
    one, asked = request(1), {True: 0, False: 0}
    for step in range(2000):
        matched = max(0, step % 20 - 14)  # up to five tokens
        right, machine.claimed = (0.95, 0.9) if matched == 5 else (0.0, 0.1)
        before = machine.asked
        machine.run([one], lambda _, right=right: right, 1)
        if step >= 1000:
            asked[matched == 5] += machine.asked - before
    assert asked[True] == 1000 / 20
    assert asked[False] <= 1000 * SHARE * FLAT[0] / 0.5


def test_a_match_is_looked_at_only_when_it_may_be_long_enough() -> None:
    looks = 0

    def matched(_: object) -> int:
        nonlocal looks
        looks += 1
        return 0

    source = Source("suffix", matched=matched)
    machine = Machine(FLAT, sources=(source,), draft_time=DraftTime(0.5), claimed=0.1)
    machine.run([request(1)], lambda _: 0.0, 500)
    before = looks
    machine.run([request(1)], lambda _: 0.0, 1000)
    assert looks - before < 700  # drafts were never seen after a match, so two tokens may pay


def test_a_match_that_has_become_good_is_found_out() -> None:
    source = Source("suffix", matched=lambda each: each.request_id)
    machine = Machine(FLAT, sources=(source,), draft_time=DraftTime(0.1))
    machine.run([request(4)], lambda _: 0.0, 600)
    before = machine.asked
    machine.run([request(4)], lambda _: 0.95, 600)
    assert machine.asked - before > 400


def test_while_no_draft_pays_asking_takes_its_share_of_the_time() -> None:
    machine = Machine(STEEP, draft_time=DraftTime(1.0, 1.0))
    machine.run([request(1)], lambda _: 0.0, 500)
    before = machine.asked
    machine.run([request(1)], lambda _: 0.0, 1000)
    assert (machine.asked - before) * 1.0 <= 1.05 * SHARE * 1000 * STEEP[0]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_machine_than_the_profile_says(factor: float) -> None:
    """A core taken by another process, or a profile of something else: all steps differ alike."""
    machine = Machine(FLAT, learns=True, table=cost_table([factor * ms for ms in FLAT]))
    machine.run([request(1)], lambda _: 0.8, 400)
    assert machine.speed_up > 0.93 * best_fixed(FLAT, 0.8, DraftTime())


def wide_times(factor: float) -> list[float]:
    """What steps take when somebody else takes a core: only wide ones feel it."""
    return [FLAT[0], *[factor * ms for ms in FLAT[1:]]]


CHANGES = [
    ([3.0 * ms for ms in FLAT], 0.8),
    (wide_times(1.5), 0.6),
    (wide_times(2.0), 0.4),
    (wide_times(3.0), 0.4),
    (STEEP, 0.3),
    (STEEP, 0.8),
]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))]
)
@pytest.mark.parametrize(("times", "right"), CHANGES)
def test_a_machine_that_changes_is_followed_within_100_steps_there_and_back(
    times: list[float], right: float, seed: int
) -> None:
    machine = Machine(FLAT, learns=True, table=cost_table(FLAT), seed=seed)
    one = request(1)

    def run(steps: int) -> float:
        machine.milliseconds = machine.plain_milliseconds = 0.0
        machine.run([one], lambda _: right, steps)
        return machine.speed_up

    run(400)
    machine.times = times
    best = best_fixed(times, right, DraftTime())
    assert run(100) > 0.8 * best, "plain decoding is never starved"
    assert run(400) > 0.93 * best
    machine.times = FLAT
    run(100)
    assert run(400) > 0.75 * best_fixed(FLAT, right, DraftTime())


@pytest.mark.parametrize("jump", [math.nan, math.inf, -5.0, 0.0, 1e12])
def test_clocks_that_jump_are_not_believed(jump: float) -> None:
    """One step in ten takes what no step takes; the planner goes on as if it had not."""
    machine = Machine(FLAT, learns=True, table=cost_table(FLAT))
    observe, end, planner = machine.planner.cost.observe, machine.planner.end, machine.planner
    steps = iter(range(1 << 30))

    def broken(report: StepReport) -> None:
        end(report._replace(forward_ms=jump, total_ms=jump) if next(steps) % 10 == 9 else report)

    planner.end = broken  # type: ignore[method-assign]
    planner.cost.observe = lambda shape, ms: observe(  # type: ignore[method-assign]
        shape, jump if len(machine.nodes) % 10 == 0 else ms
    )
    machine.run([request(1)], lambda _: 0.8, 400)
    assert machine.speed_up > 0.9 * best_fixed(FLAT, 0.8, DraftTime())


@pytest.mark.parametrize("times", [FLAT, STEEP, CLIFFS], ids=["flat", "steep", "cliffs"])
@pytest.mark.parametrize("right", [0.3, 0.8])
def test_without_a_profile_it_is_good_after_200_steps(times: list[float], right: float) -> None:
    machine = Machine(times, learns=True, has_profile=False)
    machine.run([request(1)], lambda _: right, 200)
    machine.milliseconds = machine.plain_milliseconds = 0.0
    machine.run([request(1)], lambda _: right, 1000)
    assert machine.speed_up > 0.97
    if times is not CLIFFS:  # a cliff that was never visited cannot be known
        assert machine.speed_up > 0.9 * best_fixed(times, right, DraftTime())


@pytest.mark.parametrize(("tpot_ms", "is_held_up"), [(15.0, True), (10.5, False)])
def test_requests_are_held_up_as_far_as_their_target_allows(
    tpot_ms: float, is_held_up: bool
) -> None:
    """One of two requests gains from drafts, which make the steps of both longer."""
    machine = Machine([10.0 + 0.5 * w for w in range(600)], (LOOKUP,), DraftTime(0.02))
    machine.planner = CostAwarePlanner(machine.planner.cost, Objective("tpot", tpot_ms))
    machine.planner.set_sources(machine.sources)
    gains, waits = requests = [request(1), request(2)]
    steps = 600
    emitted = machine.run(requests, lambda r: 0.9 if r is gains else 0.0, steps)
    assert machine.milliseconds / emitted[waits.request_id] < tpot_ms + 0.3
    assert (emitted[gains.request_id] > 1.5 * steps) == is_held_up


def test_requests_may_be_held_up_a_little_from_their_first_step_on() -> None:
    machine = Machine(FLAT, (LOOKUP,), DraftTime(0.02), claimed=0.95)
    machine.run([request(1), request(2)], lambda _: 1.0, 1)
    planned = machine.planner.planned
    assert planned.ahead is not None
    assert min(planned.ahead) > 0.0
