"""Order of service, chunking, preemption and aborts, pinned step by step."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import ContextLengthError, RequestError
from paceline.engine.engine import Engine
from paceline.models.config import ModelConfig
from paceline.models.layer_sizes import DELTA
from paceline.planner.cost_table import StepShape
from paceline.request.request import RequestStatus
from paceline.request.sampling_params import SamplingParams
from tests.toy import HYBRIDS, TOY, Job, assert_no_leak, run_jobs, toy_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def rows_of(engine: Engine, steps: int) -> list[int]:
    """Rows of each of the next forwards."""
    counts = []
    for _ in range(steps):
        before = engine.stats().num_rows
        engine.step()
        counts.append(engine.stats().num_rows - before)
    return counts


def test_prompt_is_chunked_and_decoding_goes_on_beside_it() -> None:
    engine = toy_engine(max_num_batched_tokens=16, max_step_ms=1e6)
    engine.add_request(list(range(1, 9)), GREEDY)
    assert rows_of(engine, 2) == [8, 1]
    engine.add_request([5] * 40, GREEDY)
    # one decoding row, and the rest of the 16 for the prompt: 15 + 15 + 10, then two rows
    assert rows_of(engine, 4) == [16, 16, 11, 2]


def test_prefill_is_bounded_while_others_decode() -> None:
    engine = toy_engine(max_num_batched_tokens=256, max_step_ms=0.001)
    engine.add_request([1, 2, 3], GREEDY)
    rows_of(engine, 3)
    for rows in (1, 64, 200):  # teach the cost model that a row costs a millisecond
        engine.cost.observe(StepShape(rows, 0, 0, 1), float(rows))
    engine.add_request([4] * 100, GREEDY)
    assert rows_of(engine, 1) == [17]  # the least chunk, not the whole prompt


def test_one_forward_per_step_for_mixed_load() -> None:
    engine = toy_engine()
    run_jobs(engine, [Job([1 + i] * (3 + 5 * i), GREEDY, at=i) for i in range(5)])
    stats = engine.stats()
    assert stats.num_target_forwards < 5 + 12 + 5
    assert stats.num_output_tokens == 60


def test_max_num_seqs_is_first_come_first_served() -> None:
    engine = toy_engine(max_num_seqs=2)
    ids = [engine.add_request([i + 1] * 4, GREEDY)[0] for i in range(4)]
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ids[:2]
    assert [r.request_id for r in engine.scheduler.waiting] == ids[2:]


def test_latest_arrival_is_preempted_and_comes_back() -> None:
    engine = toy_engine(num_blocks=4, enable_prefix_caching=False)
    results = run_jobs(engine, [Job([1] * 15, GREEDY), Job([2] * 15, GREEDY)])
    first, second = (group[0].request for group in results)
    assert first is not None
    assert second is not None
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0
    assert_no_leak(engine)


@pytest.mark.parametrize("shape", [TOY, HYBRIDS[DELTA]], ids=["dense", "hybrid"])
def test_requests_that_share_a_long_document_run_together(shape: ModelConfig) -> None:
    """The cache holds its blocks once, so that it has room for what follows it."""
    document = [3 + i % 40 for i in range(160)]
    engine = toy_engine(num_blocks=18, shape=shape)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request([*document, 1], params)
    while engine.stats().num_output_tokens < 2:
        engine.step()
    for token in (2, 3, 4):
        engine.add_request([*document, token], params)
    engine.step()
    assert len(engine.scheduler.running) == 4
    while engine.has_work:
        engine.step()
    assert_no_leak(engine)


def test_cached_blocks_that_a_request_would_take_itself_are_no_room() -> None:
    """Nobody holds them any more, so that they are among those that are free."""
    document, params = [3 + i % 40 for i in range(160)], SamplingParams(max_tokens=1)
    engine = toy_engine(num_blocks=18)
    run_jobs(engine, [Job([*document, 1], params)])
    engine.add_request([5] * 100, SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    engine.add_request([*document, 2], params)
    engine.step()
    assert len(engine.scheduler.running) == 1
    assert engine.stats().num_cached_tokens == 0


def test_all_preemptions_of_a_step_are_told() -> None:
    """Prefills hold all blocks, so that one request after another has to give back its own."""
    engine = toy_engine(num_blocks=8, enable_prefix_caching=False, max_model_len=128)
    scheduler = engine.scheduler
    for token in (1, 2, 3):
        engine.add_request([token] * 100, GREEDY)
    for request, num_computed in zip(list(scheduler.waiting), (32, 48, 32), strict=True):
        scheduler.waiting.remove(request)
        engine.kv.open(request.request_id)
        assert engine.kv.reserve(request.request_id, num_computed)
        engine.kv.commit(request.request_id, range(num_computed))
        request.num_computed, request.status = num_computed, RequestStatus.RUNNING
        scheduler.running.append(request)
    first, second, third = scheduler.running
    assert [item.request for item in scheduler.schedule()] == [first]
    assert scheduler.preempted == [third, second]


@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_abort_frees_everything(step: int) -> None:
    engine = toy_engine(max_num_batched_tokens=16, max_num_seqs=4, max_step_ms=1e6)

    def abort(engine: Engine, ids: list[list[int]]) -> None:
        engine.abort(ids[1][0])

    jobs = [Job([3] * 20, GREEDY), Job([4] * 40, GREEDY), Job([5] * 6, GREEDY)]
    results = run_jobs(engine, jobs, {step: abort})
    assert results[1][0].finish_reason == "abort"
    alone = run_jobs(toy_engine(), [jobs[0]])
    assert results[0][0].token_ids == alone[0][0].token_ids
    assert_no_leak(engine)


def test_abort_in_the_middle_of_a_step() -> None:
    engine = toy_engine()
    ids = [engine.add_request([7] * 5, GREEDY)[0], engine.add_request([8] * 5, GREEDY)[0]]
    engine.step()
    forward = engine.runner.forward

    def aborting(batch: Any, greedy: bool = False) -> Any:
        engine.abort(ids[0])
        return forward(batch, greedy)

    engine.runner.forward = aborting  # type: ignore[method-assign]
    outputs = engine.step()
    engine.runner.forward = forward  # type: ignore[method-assign]
    assert [o.request_id for o in outputs] == [ids[1]]
    assert [o.finish_reason for o in engine.step() if o.request_id == ids[0]] == ["abort"]


def test_aborting_a_finished_or_unknown_request_does_nothing() -> None:
    engine = toy_engine()
    engine.abort(12345)
    assert engine.step() == []


def test_forks_share_the_prompt() -> None:
    engine = toy_engine(enable_prefix_caching=False)
    ids = engine.add_request([9] * 33, SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True))
    engine.step()
    engine.step()
    tables = [engine.kv[i].block_table for i in ids]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    while engine.has_work:
        engine.step()
    assert_no_leak(engine)


def test_refusals_name_the_limit() -> None:
    engine = toy_engine(max_model_len=32, num_blocks=200)
    with pytest.raises(RequestError, match="empty"):
        engine.add_request([], GREEDY)
    with pytest.raises(ContextLengthError, match="context holds 32"):
        engine.add_request([1] * 32, GREEDY)
    with pytest.raises(RequestError, match="vocabulary"):
        engine.add_request([1, 999], GREEDY)
    with pytest.raises(RequestError, match="kv-cache-memory"):
        toy_engine(num_blocks=3).add_request([1] * 20, SamplingParams(max_tokens=200))
    assert not engine.has_work


def test_context_limit_ends_a_request() -> None:
    engine = toy_engine(max_model_len=32)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    ((result,),) = run_jobs(engine, [Job([1] * 20, params)])
    assert len(result.token_ids) == 12
    assert result.finish_reason == "length"
    assert result.request is not None
    assert result.request.status is RequestStatus.FINISHED
