"""The warm-up before an explanation: it does what is slow at first, and nobody remembers it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.engine.engine import Engine
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.planner import CostAwarePlanner
from paceline.planner.value import DraftingCost, DraftTime
from paceline.profiling import explain_run
from paceline.profiling.explain_run import Explanation, explain, warm_up
from paceline.proposers.base import DraftBudget
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.proposers.suffix import SuffixProposer
from paceline.request.request import FinishReason, Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from tests.benchmarks.predicted import predict_times
from tests.engine.test_faults import Scripted
from tests.planner.machine import cost_table
from tests.profiling.test_explain import guess
from tests.toy import lookup_config, suffix_config, toy_engine

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the warm-up are as long on a slow machine as on others."""
    monkeypatch.setattr(explain_run, "MOST_SECONDS", 60.0)


class Remembering(Scripted):
    """Notes for whom it drafts and how each of them ends."""

    def __init__(self) -> None:
        super().__init__(guess)
        self.num_drafted = 0
        self.ends: list[FinishReason | None] = []
        self.seen: set[int] = set()

    def propose(self, requests: Sequence[Request], budget: Any) -> Any:
        self.num_drafted += len(requests)
        self.seen |= {request.request_id for request in requests}
        return super().propose(requests, budget)

    def finish(self, request: Request) -> None:
        self.ends.append(request.finish_reason)
        self.seen.discard(request.request_id)


def engine_with(remembering: Remembering) -> Engine:
    """An engine whose planner reads no clock, with proposers that learn from what ended."""
    lookup = PromptLookupProposer(lookup_config(num_speculative_tokens=6))
    suffix = SuffixProposer(suffix_config(num_speculative_tokens=6))
    table = cost_table([1.0 + 0.01 * rows for rows in range(64)])
    times = dict.fromkeys(("prompt_lookup", "suffix", "scripted"), DraftTime(0.001))
    cost = CostModel(table, learns=False)
    engine = toy_engine([lookup, suffix, remembering])
    return predict_times(engine, CostAwarePlanner(cost), cost, DraftingCost(times))


def test_nobody_remembers_it() -> None:
    remembering = Remembering()
    engine = engine_with(remembering)
    before = engine.drafting.proposers, engine.drafting.planner, engine.cost
    shape = StepShape(5, 40.0, 8.0, 5, 1)
    predicted = engine.cost.predict(shape)

    warm_up(engine, PARAMS)

    assert remembering.num_drafted > 10, "the warm-up must draft"
    assert (remembering.ends, remembering.seen) == ([None] * 2, set()), "it must see no end"
    lookup, suffix, _ = [each.inner for each in engine.drafting.proposers]  # type: ignore[attr-defined]
    assert isinstance(lookup, PromptLookupProposer)
    assert isinstance(suffix, SuffixProposer)
    for token in range(engine.vocab_size):  # what followed it in a text that is remembered
        request = Request(99, [token], 1, PARAMS, seed=0, max_len=100)
        assert suffix.propose([request], DraftBudget([8], [4])) == [DraftTree()]
    assert (engine.drafting.proposers, engine.drafting.planner, engine.cost) == before
    assert engine.cost.predict(shape) == predicted
    stats = engine.stats()
    assert (stats.num_rows, stats.num_requests, stats.num_target_forwards) == (0, 0, 0)
    assert (stats.speculation.num_draft_tokens, stats.num_running) == (0, 0)
    assert not engine.has_work


def planned(run: Explanation) -> list[Any]:
    """All of the steps that no clock has measured."""
    return [
        (
            (record.index, record.shape, round(record.rate, 9)),
            [(part.position, part.token_ids, part.nodes) for part in record.requests],
        )
        for record in run.records
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_explanation_is_the_same_without_it(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    prompts: list[list[int]] = []
    add_request = Engine.add_request

    def noted(self: Engine, tokens: Sequence[int], *more: Any, **options: Any) -> list[int]:
        prompts.append(list(tokens))
        return add_request(self, tokens, *more, **options)

    monkeypatch.setattr(Engine, "add_request", noted)
    warm_up(engine_with(Remembering()), PARAMS)
    # The very text of the warm-up: whoever remembered it would draft from it.
    prompt = prompts[0]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    warm = explain(engine_with(Remembering()), prompt, params)
    monkeypatch.setattr(explain_run, "warm_up", lambda engine, params: None)
    cold = explain(engine_with(Remembering()), prompt, params)
    assert warm.token_ids == cold.token_ids
    assert warm.is_identical
    assert planned(warm) == planned(cold)
    assert sum(record.num_verified for record in warm.records) > 0


def test_it_runs_drafted_and_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: Counter[bool] = Counter()
    step = Engine.step

    def counted(self: Engine) -> Any:
        drafted = self.stats().speculation.num_draft_tokens
        outputs = step(self)
        widths[self.stats().speculation.num_draft_tokens > drafted] += 1
        return outputs

    monkeypatch.setattr(Engine, "step", counted)
    warm_up(engine_with(Remembering()), PARAMS)
    assert widths[True] > 10
    assert widths[False] > 60


def test_a_short_context_is_left_alone() -> None:
    engine = toy_engine([Remembering()], max_model_len=64)
    warm_up(engine, PARAMS)
    assert engine.runner.num_forwards == 0
    assert explain(engine, [3, 4, 5], PARAMS).is_identical


def test_proposers_come_back_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(Remembering())
    before = engine.drafting.proposers, engine.drafting.planner, engine.cost

    def fails(self: Engine) -> Any:
        raise RuntimeError("no step")

    monkeypatch.setattr(Engine, "step", fails)
    with pytest.raises(RuntimeError, match="no step"):
        warm_up(engine, PARAMS)
    assert (engine.drafting.proposers, engine.drafting.planner, engine.cost) == before
