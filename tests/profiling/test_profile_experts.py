"""The profile of a mixture: steps of text, what they read, and the price of an expert."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder
from paceline.models.shapes import Experts
from paceline.profiling.profile import ms_per_expert
from paceline.profiling.profile_steps import (
    ALIKE_WIDTHS,
    MeasuredStep,
    StepBench,
    Timing,
    plan_steps,
)
from tests.arrays import arrays
from tests.toy import TOY, toy_tensors

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
