"""Mixtures: how the union of experts grows with rows, and what an expert costs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import inf

import pytest

from paceline.core.errors import ProfileError
from paceline.planner.corrections import ExpertPrices, ExpertUnion
from paceline.planner.cost import CostModel, prior_table
from paceline.planner.cost_table import CostPoint, CostTable, ExpertCost, StepShape
from paceline.planner.value import DraftTime
from tests.planner.machine import LOOKUP, Machine, request

MIXTURE = ExpertCost(layers=4, number=32, per_token=4, ms=0.05)
DENSE_MS, PRICE = 8.0, 0.05


def drawn(rng: random.Random, rows: int, pool: int = 32) -> int:
    """Experts that rows read which choose by themselves among some of all, in four layers."""
    return sum(
        len({expert for _ in range(rows) for expert in rng.sample(range(pool), 4)})
        for _ in range(MIXTURE.layers)
    )


def step(rows: int, requests: int = 1, experts: int = 0) -> StepShape:
    return StepShape(rows, 100 * rows, 100 * requests, rows, requests, experts)


def true_ms(rows: int, experts: float) -> float:
    return DENSE_MS + 0.1 * rows + PRICE * experts


def measured(price: float = PRICE, seed: int = 0) -> CostTable:
    """A profile of that machine which has the price of an expert so."""
    rng = random.Random(seed)
    points = []
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 32):
        experts = drawn(rng, rows)
        points.append(CostPoint(1, 100, rows, rows, true_ms(rows, experts), 0.0, experts))
    return CostTable("mixture", points, experts=MIXTURE._replace(ms=price))


def test_rows_that_choose_by_themselves_are_what_is_expected_at_first() -> None:
    rng, union = random.Random(1), ExpertUnion(MIXTURE)
    for rows in (1, 2, 5, 16, 40):
        mean = sum(drawn(rng, rows) for _ in range(400)) / 400
        assert union.read([(rows, inf)]) == pytest.approx([mean], rel=0.02)


def test_the_union_of_rows_that_choose_alike_is_learnt() -> None:
    """On average: it follows the latest steps, which differ."""
    rng, union = random.Random(2), ExpertUnion(MIXTURE)
    expected = dict.fromkeys((1, 2, 3, 4), 0.0)
    for _ in range(200):
        rows = rng.choice((1, 2, 4))
        union.learn(rows, inf, drawn(rng, rows, 8))
        reads = union.read((each, inf) for each in expected)
        for each, read in zip(expected, reads, strict=True):
            expected[each] += read / 200
    for rows, mean in expected.items():
        truth = sum(drawn(rng, rows, 8) for _ in range(300)) / 300
        assert mean == pytest.approx(truth, rel=0.15)
        assert ExpertUnion(MIXTURE).read([(rows, inf)])[0] > (1.2 if rows > 2 else 0.99) * truth


def test_a_union_grows_ever_slower_and_follows_the_text() -> None:
    rng, union = random.Random(3), ExpertUnion(MIXTURE)
    seen = []
    for pool in (4, 16, 4):
        for _ in range(60):
            rows = rng.randint(1, 9)
            union.learn(rows, inf, drawn(rng, rows, pool))
        growth = union.read((rows, inf) for rows in range(1, 32))
        added = [after - before for before, after in itertools.pairwise(growth)]
        assert all(more >= 0.0 for more in added)
        assert added == sorted(added, reverse=True)
        assert growth[0] == pytest.approx(MIXTURE.least)
        assert growth[-1] <= MIXTURE.layers * MIXTURE.number
        seen.append(growth[8] - growth[0])
    assert seen[0] < 5.0 > seen[2]
    assert seen[1] > 30.0


@pytest.mark.parametrize("experts", [0, 1, 16, 127, 128])
@pytest.mark.parametrize("per_token", [1, 32])
def test_any_count_is_taken(experts: int, per_token: int) -> None:
    union = ExpertUnion(MIXTURE._replace(per_token=per_token))
    for rows, of_table in itertools.product((1, 2, 7, 4096), (0.0, 4.0, 64.0, 128.0, inf)):
        union.learn(rows, of_table, experts)
        assert 0.0 <= union.read([(rows, of_table)])[0] <= 128.0


@pytest.mark.parametrize("pool", [4, 6, 24, 32])
def test_a_table_of_another_text_tells_the_shape(pool: int) -> None:
    """Few steps of two rows say what wide ones of this text read."""
    rng, union = random.Random(5), ExpertUnion(MIXTURE)

    def of_table(rows: int) -> float:
        return MIXTURE.layers * 12 * (1 - (1 - 4 / 12) ** rows)

    told = []
    for _ in range(300):
        union.learn(2, of_table(2), drawn(rng, 2, pool))
        told.append(union.read([(10, of_table(10))])[0])
    truth = MIXTURE.layers * pool * (1 - (1 - 4 / pool) ** 10)
    assert sum(told) / len(told) == pytest.approx(truth, rel=0.12)


def test_a_table_is_read_as_it_is_until_a_text_reads_otherwise() -> None:
    table = measured()
    frozen, model = CostModel(table, learns=False), CostModel(table)
    for p in table.points:
        assert model.predict(step(p.width)) == pytest.approx(p.ms)
    assert model.growth(step(1), 31) == pytest.approx(frozen.growth(step(1), 31))
    alike = step(8, experts=MIXTURE.least)
    for _ in range(8):
        model.observe(alike, true_ms(8, MIXTURE.least))
    assert model.predict(step(6)) == pytest.approx(true_ms(6, MIXTURE.least), rel=0.05)
    assert model.predict(step(1)) == pytest.approx(true_ms(1, MIXTURE.least), rel=0.02)


def test_a_frozen_model_reads_the_table_as_it_is() -> None:
    table = measured()
    frozen = CostModel(table, learns=False)
    for p in table.points:
        assert frozen.predict(step(p.width)) == pytest.approx(p.ms)


def test_what_a_step_read_is_part_of_its_time() -> None:
    model = CostModel(measured())
    for rows in (2, 4, 8):
        for experts in (16, 40, 100):
            predicted = model.predict(step(rows, experts=experts))
            assert predicted == pytest.approx(true_ms(rows, experts))
    growth = model.growth(step(1), 16)
    assert growth == pytest.approx([model.predict(step(1 + n)) for n in range(17)])


@pytest.mark.parametrize("assumed", [0.02, 0.05, 0.1])
def test_the_price_of_an_expert_is_recovered(assumed: float) -> None:
    rng, model = random.Random(4), CostModel(measured(assumed))
    for _ in range(1500):
        rows = rng.choice((1, 2, 4, 8))
        experts = drawn(rng, rows, rng.choice((8, 32)))
        ms = true_ms(rows, experts) * rng.gauss(1.0, 0.02)
        model.observe(step(rows, experts=experts), ms)
    for rows in (2, 4, 8):
        few, many = (model.predict(step(rows, experts=n)) for n in (4 * 8, 4 * 16))
        assert (many - few) / 32 == pytest.approx(PRICE, rel=0.25)


def test_without_a_profile_a_mixture_is_dense_where_rows_choose_alike() -> None:
    cost = MIXTURE._replace(ms=0.02)  # of a plain step
    model, dense = CostModel(experts=cost), CostModel()
    for each in (model, dense):
        each.observe(step(1, experts=16 if each is model else 0), 10.0)
    assert model.predict(step(1)) == pytest.approx(dense.predict(step(1)))
    assert model.predict(step(8, experts=16)) == pytest.approx(dense.predict(step(8)))
    unit = 10.0 / prior_table().milliseconds(1)
    further = model.predict(step(8, experts=66)) - dense.predict(step(8))
    assert further == pytest.approx(50 * 0.02 * unit)


def test_tables_of_mixtures_are_kept_and_others_do_not_know_of_them() -> None:
    table = measured()
    again = CostTable.from_dict(table.to_dict())
    assert again.to_dict() == table.to_dict()
    assert (again.points, again.experts) == (table.points, table.experts)
    assert "experts" not in str(CostTable("dense", [CostPoint(1, 0, 1, 1, 2.0)]).to_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 0}, "number of experts"),
        ({"per_token": 33}, "33 of 32"),
        ({"ms": -1.0}, "ms of an expert"),
        ({"ms": float("nan")}, "ms of an expert"),
        ({"layers": 1.5}, "layers of experts"),
        ({"further": 1}, "must have layers, number, per_token, ms"),
    ],
)
def test_experts_that_are_none_are_refused(changes: dict[str, object], message: str) -> None:
    document = measured().to_dict()
    document["experts"] |= changes
    with pytest.raises(ProfileError, match=message):
        CostTable.from_dict(document)


# --- what a planner makes of it ------------------------------------------------------------------


def mixture_machine(
    prices_experts: bool,
    pools: list[int],
    seed: int = 0,
    from_disk: float = 0.0,
    disk_ms: float = 0.0,
) -> Machine:
    """Half of its plain step is experts; rows choose among as many of them as ``pools`` ends in.

    Args:
        from_disk, disk_ms: share of the experts that come from disk, and what one of these costs
            more, which the profile has measured.
    """
    rng, times = random.Random(seed), [4.0 + 0.1 * rows for rows in range(1, 200)]
    points = []
    for rows in range(1, 130):
        experts = drawn(rng, rows, 16)
        ms = times[rows - 1] + 5 * PRICE * experts + disk_ms * round(from_disk * experts)
        points.append(CostPoint(1, 0, rows, rows, ms, 0.0, experts))
    price = 5 * PRICE + from_disk * disk_ms
    experts_cost = MIXTURE._replace(ms=price) if prices_experts else None
    return Machine(
        times,
        (LOOKUP,),
        DraftTime(0.02),
        seed=seed,
        learns=True,
        table=CostTable("mixture", points, experts=experts_cost),
        read=lambda rows, requests: drawn(rng, rows, pools[-1]),
        expert_ms=5 * PRICE,
        from_disk=from_disk,
        disk_ms=disk_ms,
    )


def nodes_per_step(machine: Machine, steps: int, right: float = 0.7) -> float:
    before = len(machine.nodes)
    machine.run([request(1)], lambda _: right, steps)
    later = machine.nodes[before + steps // 3 :]  # after it has seen the text
    return sum(map(sum, later)) / len(later)


def test_drafts_are_small_where_each_row_adds_experts_and_large_where_none_does() -> None:
    pools = [4]
    machine = mixture_machine(True, pools)
    for _ in range(3):
        pools.append(4)
        local = nodes_per_step(machine, 60)
        pools.append(32)
        apart = nodes_per_step(machine, 60)
        assert local > 5.0
        assert apart < local / 2


@pytest.mark.parametrize("has_profile", [True, False])
def test_drafts_that_would_read_more_from_disk_than_they_bring_are_left_out(
    has_profile: bool,
) -> None:
    """The same drafts pay in memory."""
    nodes = []
    for from_disk in (0.0, 0.75):
        machine = mixture_machine(True, [24], from_disk=from_disk, disk_ms=4.0)
        machine = replace(machine, has_profile=has_profile)
        nodes.append(nodes_per_step(machine, 150, right=0.65))
    in_memory, with_disk = nodes
    assert in_memory > 1.0
    assert with_disk < 0.25


def test_the_price_of_an_expert_follows_how_many_come_from_disk() -> None:
    """By counts alone: nothing is said of a time."""
    prices = ExpertPrices(MIXTURE, 4.0, is_measured=False, plain_ms=8.9, from_disk=0.5)
    in_memory = ExpertPrices(MIXTURE, 4.0, plain_ms=8.9)
    many = prices.ms
    assert many > 3.0 * in_memory.ms
    for _ in range(200):
        prices.count(16, 16)
    assert prices.ms > many
    for _ in range(500):
        prices.count(16, 0)
    assert prices.ms == pytest.approx(in_memory.ms, rel=0.15)
    assert in_memory.beyond(20, 0, 16.0) == 4.0
    assert prices.beyond(16, 8, 16.0) > prices.beyond(16, 0, 16.0) + 8.0


def test_a_table_that_was_measured_from_disk_has_its_experts_price() -> None:
    """As many come from disk as when it was measured, and then none do."""
    prices = ExpertPrices(MIXTURE, 4.0, is_measured=True, plain_ms=8.9, from_disk=0.5)
    assert prices.ms == MIXTURE.ms
    for _ in range(500):
        prices.count(16, 0)
    assert prices.ms < MIXTURE.ms / 2


def test_expert_prices_pay_where_routing_changes_and_cost_nothing_where_it_does_not() -> None:
    def speed(prices_experts: bool, phases: list[int], steps: int) -> float:
        total = 0.0
        for seed in range(3):
            pools = [4]
            machine = mixture_machine(prices_experts, pools, seed)
            for pool in phases:
                pools.append(pool)
                machine.run([request(1)], lambda _: 0.7, steps)
            total += machine.speed_up / 3
        return total

    changing, constant = [4, 32] * 12, [16]
    assert speed(True, changing, 30) > 1.01 * speed(False, changing, 30)
    assert speed(True, constant, 500) > 0.97 * speed(False, constant, 500)
