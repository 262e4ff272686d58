"""What goes wrong stays with the request it concerns: neighbours finish, no block leaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.config import Objective, SpeculativeConfig
from paceline.core.errors import EngineClosedError, RequestFailedError, UnservableRequestError
from paceline.engine.engine import Engine
from paceline.engine.threads import EngineThread
from paceline.planner.drafts import TextDrafter
from paceline.planner.planner import CostAwarePlanner, FixedPlanner
from paceline.planner.value import Source
from paceline.proposers.base import DraftBudget, Proposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.proposers.suffix import SuffixProposer
from paceline.request.request import Request, StepOutput
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.request.span import DraftTree
from tests.toy import VOCAB, Job, assert_no_leak, lookup_config, run_jobs, toy_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 5, [9, 8, 7, 6] * 4, [1, 2, 3]]
JOBS = [Job(prompt, GREEDY, at=i) for i, prompt in enumerate(PROMPTS)]


def plain() -> list[list[int]]:
    return [group[0].token_ids for group in run_jobs(toy_engine(), JOBS)]


class Scripted(Proposer):
    """A proposer whose draft is whatever a function makes of the request."""

    name = "scripted"

    def __init__(self, make: Callable[[Request], Any], **config: Any) -> None:
        self.config = SpeculativeConfig(**{"min_accept_prob": 0.0} | config)
        self._make = make
        self.finished: list[int] = []

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        return [self._make(request) for request in requests]

    def finish(self, request: Request) -> None:
        self.finished.append(request.request_id)


def raising(_: Request) -> DraftTree:
    raise RuntimeError("no draft today")


def tree(tokens: list[Any], parents: list[Any], probs: list[Any] | None = None) -> DraftTree:
    return DraftTree(tokens, parents, probs or [0.5] * len(tokens), ["scripted"] * len(tokens))


MALFORMED: dict[str, Callable[[Request], Any]] = {
    "raises": raising,
    "not_a_tree": lambda r: None,
    "token_out_of_range": lambda r: tree([VOCAB], [-1]),
    "negative_token": lambda r: tree([-3], [-1]),
    "token_not_an_int": lambda r: tree([1.5], [-1]),
    "parent_after_child": lambda r: tree([1, 2], [1, -1]),
    "parent_is_itself": lambda r: tree([1], [0]),
    "parent_too_low": lambda r: tree([1], [-2]),
    "uneven_arrays": lambda r: DraftTree([1, 2], [-1], [0.5], ["scripted"]),
    "probability_is_text": lambda r: tree([1], [-1], ["likely"]),
    "twin_siblings": lambda r: tree([4, 4], [-1, -1]),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_broken_proposer_changes_nothing_and_is_switched_off(kind: str) -> None:
    engine = toy_engine([Scripted(MALFORMED[kind]), PromptLookupProposer(lookup_config())])
    results = run_jobs(engine, JOBS)
    assert [group[0].token_ids for group in results] == plain()
    stats = engine.stats()
    assert stats.num_proposer_failures == 3
    assert [p.name for p in engine.drafting.proposers] == ["prompt_lookup"]
    assert stats.speculation.num_accepted_tokens > 0, "the other proposer goes on"
    assert_no_leak(engine)


class Torn(SuffixProposer):
    """Drafts from texts, and fails whenever it is asked."""

    def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
        raise RuntimeError("no text today")


def test_of_those_that_draft_from_texts_only_the_broken_one_is_switched_off() -> None:
    torn = Torn(SpeculativeConfig(method="suffix"))
    engine = toy_engine([torn, PromptLookupProposer(lookup_config())])
    told: list[list[str]] = []

    class Told(FixedPlanner):
        def set_sources(self, sources: Sequence[Source]) -> None:
            told.append([source.name for source in sources])

    engine.drafting.planner = Told()
    results = run_jobs(engine, JOBS)
    assert [group[0].token_ids for group in results] == plain()
    stats = engine.stats()
    assert [p.name for p in engine.drafting.proposers] == ["prompt_lookup"]
    assert stats.num_proposer_failures == 1 + 3, "once together, then until it is switched off"
    assert told == [["suffix", "prompt_lookup"], ["prompt_lookup"]]
    assert stats.speculation.num_accepted_tokens > 0
    assert_no_leak(engine)


@pytest.mark.parametrize("prob", [float("nan"), 1.5, -0.1, float("inf")])
@pytest.mark.parametrize("is_cost_aware", [False, True])
def test_an_estimate_out_of_range_is_clamped_counted_and_logged_once(
    prob: float, is_cost_aware: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toy_engine([Scripted(lambda r: tree([1, 2], [-1, 0], [prob, 0.5]))])
    if is_cost_aware:
        engine.drafting.planner = CostAwarePlanner(engine.cost)
    results = run_jobs(engine, JOBS)
    assert [group[0].token_ids for group in results] == plain()
    stats = engine.stats()
    assert stats.num_proposer_failures == 0
    assert stats.num_clamped_estimates >= 1
    assert sum("clamped" in record.message for record in caplog.records) == 1
    assert_no_leak(engine)


def test_an_occasional_failure_does_not_switch_a_proposer_off() -> None:
    calls = []

    def every_tenth(request: Request) -> DraftTree:
        calls.append(request)
        return raising(request) if len(calls) % 10 == 0 else tree([1], [-1])

    engine = toy_engine([Scripted(every_tenth)])
    run_jobs(engine, JOBS)
    assert engine.stats().num_proposer_failures >= 3
    assert engine.drafting.is_on


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_ten_thousand_nodes_are_cut_to_the_cap(shape: str) -> None:
    count = 10_000 if shape == "chain" else VOCAB
    parents = list(range(-1, count - 1)) if shape == "chain" else [-1] * count
    tokens = [i % VOCAB for i in range(count)]
    engine = toy_engine([Scripted(lambda r: tree(tokens, parents), max_tree_nodes=8)])
    results = run_jobs(engine, JOBS)
    assert [group[0].token_ids for group in results] == plain()
    stats = engine.stats()
    assert stats.speculation.num_draft_tokens <= 8 * stats.speculation.num_steps
    assert stats.num_proposer_failures == 0


def test_drafts_never_exceed_the_rows_of_a_step() -> None:
    wide = Scripted(lambda r: tree(list(range(40)), [-1] * 40), max_tree_nodes=40)
    engine = toy_engine([wide], max_num_batched_tokens=12, max_num_seqs=3)
    forward, widths = engine.runner.forward, []

    def watched(batch: Any, greedy: bool = False) -> Any:
        widths.append(batch.num_rows)
        return forward(batch, greedy)

    engine.runner.forward = watched  # type: ignore[method-assign]
    results = run_jobs(engine, JOBS)
    assert max(widths) == 12
    assert [group[0].token_ids for group in results] == plain()


def test_a_hopeless_first_token_is_not_verified() -> None:
    hopeless = Scripted(lambda r: tree([1, 2], [-1, 0], [0.01, 0.9]), min_accept_prob=0.05)
    engine = toy_engine([hopeless])
    results = run_jobs(engine, JOBS[:1])
    assert results[0][0].request is not None
    counters = results[0][0].request.counters
    assert counters.num_draft_tokens == 0
    assert counters.num_pruned_tokens > 0
    assert engine.stats().num_rows == len(PROMPTS[0]) + 19, "every decode step is one row"


def test_draft_depth_stops_at_what_may_still_be_emitted() -> None:
    depths = []
    deep = Scripted(lambda r: tree([1] * 6, list(range(-1, 5))), num_speculative_tokens=6)
    engine = toy_engine([deep], max_model_len=24)
    choose = engine.drafting.planner.choose

    def watched(limits: Any, budget: int) -> Any:
        chosen = choose(limits, budget)
        depths.append((limits[0].max_depth, max(chosen[0].depths(), default=0)))
        return chosen

    engine.drafting.planner.choose = watched  # type: ignore[method-assign]
    ((result,),) = run_jobs(engine, [Job([3] * 15, GREEDY)])
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 9
    assert all(taken <= limit for limit, taken in depths)
    assert depths[-1][0] == 1, "with two tokens left one draft token is the most that can help"


def test_request_can_choose_its_speculation() -> None:
    wishes = [
        SpeculativeParams(enabled=False),
        SpeculativeParams(methods=("draft_model",)),
        SpeculativeParams(num_speculative_tokens=0),
        SpeculativeParams(num_speculative_tokens=1),
    ]
    engine = toy_engine([Scripted(lambda r: tree([1, 2], [-1, 0]))])
    jobs = [
        Job(PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, speculative=w)) for w in wishes
    ]
    results = run_jobs(engine, jobs)
    drafted = [group[0].request.counters.num_draft_tokens for group in results if group[0].request]
    assert drafted[:3] == [0, 0, 0]
    assert drafted[3] > 0


def break_forward(engine: Engine, guilty: int | None, times: int = 10**6) -> None:
    """Make the forward raise when the guilty request (or anyone) is in the batch."""
    pack, forward, state = engine.runner.pack, engine.runner.forward, {"ids": set(), "left": times}

    def watched(spans: Any, adapters: Any) -> Any:
        state["ids"] = {span.request_id for span in spans}
        return pack(spans, adapters)

    def breaking(batch: Any, greedy: bool = False) -> Any:
        ids = state["ids"]
        assert isinstance(ids, set)
        if state["left"] > 0 and (guilty is None or guilty in ids):  # type: ignore[operator]
            state["left"] -= 1  # type: ignore[operator]
            raise RuntimeError("the device fell over")
        return forward(batch, greedy)

    engine.runner.pack = watched  # type: ignore[method-assign]
    engine.runner.forward = breaking  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("step", [0, 1, 4])
def test_forward_that_fails_for_one_request_spares_the_others(step: int) -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config())])
    jobs = [Job(prompt, GREEDY) for prompt in PROMPTS]
    script = {step: lambda engine, ids: break_forward(engine, ids[1][0])}
    results = run_jobs(engine, jobs, script)
    error = results[1][0].error
    assert results[1][0].finish_reason == "error"
    assert isinstance(error, RequestFailedError)
    assert "fell over" in str(error)
    truth = plain()
    assert results[0][0].token_ids == truth[0]
    assert results[2][0].token_ids == truth[2]
    assert_no_leak(engine)


@pytest.mark.parametrize("step", [0, 3])
def test_a_failure_that_passes_harms_nobody(step: int) -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config())])
    script = {step: lambda engine, ids: break_forward(engine, None, times=1)}
    results = run_jobs(engine, JOBS, script)
    assert [group[0].token_ids for group in results] == plain()
    assert_no_leak(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_end_that_request_alone(temperature: float) -> None:
    engine = toy_engine()
    forward = engine.runner.forward

    def poisoned(batch: Any, greedy: bool = False) -> Any:
        result = forward(batch)
        if len(result.offsets) == 4:  # all three requests are in the step
            result.logits[result.offsets[1]] = float("nan")
        return result

    engine.runner.forward = poisoned  # type: ignore[method-assign]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=9, ignore_eos=True)
    results = run_jobs(engine, [Job(prompt, params) for prompt in PROMPTS])
    assert [group[0].finish_reason for group in results] == ["length", "error", "length"]
    assert type(results[1][0].error) is RequestFailedError, "the request is not to blame"
    assert "not finite" in str(results[1][0].error)
    assert_no_leak(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_excludes_every_token_is_to_blame_itself(temperature: float) -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config())])
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=9, ignore_eos=True)
    nothing = replace(params, allowed_token_ids=(5,), banned_token_ids=(5,))
    results = run_jobs(engine, [Job(PROMPTS[0], params), Job(PROMPTS[1], nothing)])
    assert [group[0].finish_reason for group in results] == ["length", "error"]
    assert isinstance(results[1][0].error, UnservableRequestError)
    assert "no token is left at position 16" in str(results[1][0].error)
    assert_no_leak(engine)


@pytest.mark.parametrize("method", ["push", "take_text"])
def test_a_failing_stop_checker_ends_its_request_alone(method: str) -> None:
    engine = toy_engine()
    ids = engine.add_request(PROMPTS[0], GREEDY, [BrokenChecker(method)])
    other = engine.add_request(PROMPTS[1], GREEDY)
    reasons: dict[int, Any] = {}
    while engine.has_work:
        reasons |= {o.request_id: o.finish_reason for o in engine.step()}
    assert reasons == {ids[0]: "error", other[0]: "length"}
    assert_no_leak(engine)


@pytest.mark.parametrize(
    "method", ["begin", "ask", "prices", "drafted", "choose", "observe", "end", "finish"]
)
@pytest.mark.parametrize("is_cost_aware", [False, True])
def test_a_planner_that_raises_costs_only_drafts(method: str, is_cost_aware: bool) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no plan")

    proposer = PromptLookupProposer(lookup_config())
    proposer.costs_forwards = method == "prices"  # others are not asked for theirs
    engine = toy_engine([proposer])
    if is_cost_aware:
        engine.drafting.planner = CostAwarePlanner(engine.cost)
    setattr(engine.drafting.planner, method, broken)
    results = run_jobs(engine, JOBS)
    assert [group[0].token_ids for group in results] == plain()
    if method in ("begin", "ask", "prices", "drafted", "choose"):
        assert engine.stats().speculation.num_draft_tokens == 0
    assert_no_leak(engine)


def test_a_cost_model_that_cannot_learn_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config())])

    def raising(*_: Any) -> None:
        raise KeyError(47)

    monkeypatch.setattr(engine.cost, "observe", raising)
    monkeypatch.setattr(engine, "_isolate", raising)
    assert [group[0].token_ids for group in run_jobs(engine, JOBS)] == plain()


def test_a_finished_request_leaves_nothing_with_the_planner() -> None:
    engine = toy_engine([PromptLookupProposer(lookup_config())])
    planner = CostAwarePlanner(engine.cost, Objective("tpot", 5.0))
    engine.drafting.planner = planner
    run_jobs(engine, JOBS)
    assert planner.num_requests == planner.drafts.num_requests == 0


class BrokenChecker:
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self._method = method

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        if self._method == "push":
            raise ValueError("cannot decode")
        return None

    def take_text(self, *, final: bool) -> str:
        raise ValueError("cannot decode")


def test_everything_masked_is_an_error_that_says_so() -> None:
    params = SamplingParams(allowed_token_ids=(3,), banned_token_ids=(), max_tokens=4, seed=0)
    masked = SamplingParams(allowed_token_ids=(0,), min_tokens=2, max_tokens=4, seed=0)
    results = run_jobs(toy_engine(), [Job([1, 2], masked), Job([1, 2], params)])
    assert "no token is left" in str(results[0][0].error)
    assert results[1][0].token_ids == [3, 3, 3, 3]


def test_an_engine_that_dies_tells_everyone() -> None:
    engine = toy_engine()

    def dies() -> Any:
        raise MemoryError("no memory")

    engine.scheduler.schedule = dies  # type: ignore[method-assign]
    thread = EngineThread(lambda: engine)
    heard: list[StepOutput] = []

    def add(engine: Engine) -> None:
        thread.attach(engine.add_request([1], GREEDY)[0], heard.extend)

    neighbour = EngineThread(toy_engine)
    thread.call(add)
    deadline = time.monotonic() + 30
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert neighbour.call(lambda engine: engine.has_work) is False
    neighbour.close()
    thread.close()
    assert isinstance(heard[0].error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        thread.call(lambda engine: None)


def test_odd_batches_of_random_aborts_leak_nothing() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    engine = toy_engine([PromptLookupProposer(lookup_config())], num_blocks=14, max_num_seqs=4)
    jobs = [Job([1 + draw(6) for _ in range(1 + draw(40))], GREEDY, at=draw(25)) for _ in range(14)]

    def abort(engine: Engine, ids: list[list[int]]) -> None:
        for group in ids:
            if group and draw(3) == 0:
                engine.abort(group[0])

    run_jobs(engine, jobs, {9: abort, 15: abort, 30: abort})
    assert_no_leak(engine)
