"""Which drafts pay for being checked, by a cost table, against a look at every length.

The profile of a mixture: steps of text, what they read, and the price of an expert.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder
from paceline.models.layer_sizes import Experts
from paceline.planner.cost_table import CostPoint, CostTable, HostTime
from paceline.profiling.profile import (
    MOST_TOKENS,
    PayingDrafts,
    checking_cost,
    draft_sentences,
    ms_per_expert,
    paying_drafts,
)
from paceline.profiling.profile_steps import (
    ALIKE_WIDTHS,
    MeasuredStep,
    StepBench,
    Timing,
    plan_steps,
)
from tests.arrays import arrays
from tests.toy import TOY, toy_tensors


def table(ratios: list[float], host: HostTime | None = None) -> CostTable:
    points = [CostPoint(1, 0, width, width, ms) for width, ms in enumerate(ratios, start=1)]
    return CostTable("a", points, host=host or HostTime())


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([1.0, 1.1, 1.2, 1.9, 2.1], PayingDrafts(3, 1)),  # 1.9 is less than 2 tokens
        ([1.0, 1.1, 1.2, 2.0, 1.9], PayingDrafts(2, 1)),  # no gap, although 4 would pay
        ([1.0, 2.5, 2.6, 2.9, 3.0], PayingDrafts(3, 2)),  # one right token is never enough
        ([1.0, 2.0, 3.0, 4.0, 5.0], None),
        ([1.0], None),
        ([1.0] * 100, PayingDrafts(MOST_TOKENS, 1)),
    ],
)
def test_the_longest_that_pay_with_the_fewest_right(
    ratios: list[float], found: PayingDrafts | None
) -> None:
    assert paying_drafts(table(ratios)) == found


def test_all_that_are_said_to_pay_do() -> None:
    drawn = random.Random(0)
    for _ in range(100):
        ratios = [1.0]
        for _ in range(20):
            ratios.append(ratios[-1] + drawn.choice([0.0, 0.1, 0.6, 1.1, 2.0]))
        costs = table(ratios)
        found = paying_drafts(costs)
        pays = {
            (count, right)
            for count in range(1, 21)
            for right in range(1, count + 1)
            if checking_cost(costs, count) < 1 + right
        }
        if found is None:
            assert not pays
            continue
        longest, needed = found
        assert needed == min(right for _, right in pays)
        assert {(count, needed) for count in range(needed, longest + 1)} <= pays
        assert (longest + 1, needed) not in pays


def test_the_host_counts() -> None:
    host = HostTime(step=1.0, draft=0.5, node=0.25, ask=0.5)
    assert checking_cost(table([1.0, 1.0, 1.0], host), 2) == pytest.approx((2.0 + 1.5) / 2.0)


@pytest.mark.parametrize(
    ("ratios", "sentences"),
    [
        (
            [1.0, 1.1, 1.2, 1.2, 1.25, 1.3, 2.5],
            [
                "Checking 4 tokens costs 1.25 plain steps here.",
                "Drafts of up to 5 tokens pay when 1 of them is right.",
            ],
        ),
        (
            [1.0, 2.5, 2.6, 2.9],
            [
                "Checking 3 tokens costs 2.90 plain steps here.",
                "Drafts of up to 3 tokens pay when 2 of them are right.",
            ],
        ),
        (
            [1.0, 1.5],
            [
                "Checking 1 token costs 1.50 plain steps here.",
                "A draft of 1 token pays when it is right.",
            ],
        ),
        (
            [1.0, 3.0, 5.0],
            [
                "Checking 2 tokens costs 5.00 plain steps here.",
                "No draft pays here, even if all of it is right.",
            ],
        ),
        ([1.0], []),
    ],
)
def test_sentences(ratios: list[float], sentences: list[str]) -> None:
    assert draft_sentences(table(ratios)) == sentences


LIMITS = EngineConfig(max_num_seqs=4, max_num_batched_tokens=512)


def mixture_runner() -> ModelRunner:
    config, ops = TOY.with_traits({"mlp.experts": Experts(16, 2, 12)}), ReferenceOps("float32")
    decoder = Decoder(config, arrays(toy_tensors(config=config)), ops, 256)
    return ModelRunner(decoder, KVCache(ops.kv_memory(config, 64, "float32"), False))


def test_a_mixture_is_measured_with_equal_rows_too() -> None:
    plain, notes = plan_steps([1, 2, 8, 16], [64, 128], 100, LIMITS)
    steps, same_notes = plan_steps([1, 2, 8, 16], [64, 128], 100, LIMITS, mixture=True)
    alike = {step for step in steps if step.alike}
    assert alike == {MeasuredStep(1, 64, width, width, alike=True) for width in (8, 16)}
    assert {8, 16} <= {*ALIKE_WIDTHS}
    assert [step for step in steps if not step.alike] == plain
    assert notes == same_notes


def test_equal_rows_read_few_experts_and_a_text_goes_on() -> None:
    runner = mixture_runner()
    text = list(range(3, 43))
    steps = [
        MeasuredStep(1, 30, 8, 8),
        MeasuredStep(1, 30, 8, 8, alike=True),
        MeasuredStep(1, 30, 1, 1),
    ]
    bench = StepBench(runner, text=text)
    tokens: list[list[int]] = []
    pack = runner.pack
    runner.pack = lambda spans: (tokens.extend(list(s.token_ids) for s in spans), pack(spans))[1]  # type: ignore[method-assign]
    for task in bench.tasks(steps).values():
        task.run()
    context, long, equal, single = tokens
    begin = text.index(context[0])
    whole = [text[(begin + i) % len(text)] for i in range(38)]
    assert (context, long) == (whole[:30], whole[30:])
    assert equal == [whole[30]] * 8
    assert single == [whole[30]]
    many, few, least = (bench.experts[step] for step in steps)
    assert least == 2 * 2 <= few < many <= 2 * 16


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_price_is_what_further_experts_take(noise: float) -> None:
    read, timings = {}, {}
    for at, width in enumerate(ALIKE_WIDTHS):
        for alike in (False, True):
            step = MeasuredStep(1, 64, width, width, alike=alike)
            read[step] = 20 if alike else 20 + 10 * width
            ms = 3.0 + width + 0.02 * read[step] + noise * (-1) ** (at + alike)
            timings[step] = Timing(ms, 0.0, 9)
    assert ms_per_expert(timings, read) == pytest.approx(0.02, rel=0.02 if noise else 1e-9)


def test_experts_that_cost_nothing_cost_nothing() -> None:
    step = MeasuredStep(1, 64, 8, 8)
    alike = replace(step, alike=True)
    timings = {step: Timing(1.0, 0.0, 9), alike: Timing(1.1, 0.0, 9)}
    assert ms_per_expert(timings, {step: 30, alike: 4}) == 0.0
    assert ms_per_expert(timings, {step: 4, alike: 4}) == 0.0
    assert ms_per_expert({}, {}) == 0.0
