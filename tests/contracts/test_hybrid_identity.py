"""Plain equals speculative on models with recurrent layers, on the reference ops and on the native
kernels. Free slots and logs hold NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from paceline.backends.native.native import why_not_native
from paceline.cache import kv_cache
from paceline.cache.model_runner import ModelRunner
from paceline.config import PACKED_DTYPES
from paceline.engine.engine import Engine
from paceline.proposers.draft_model.proposer import DraftModelProposer
from tests.contracts.test_identity import (
    GREEDY,
    GROUPS,
    MIXES,
    PROPOSERS,
    SAMPLING,
    WARM,
    answers,
    checkers,
    prompts,
    staggered,
)
from tests.proposers.self_drafts import self_drafter
from tests.quick import in_step, in_turns, once, only
from tests.toy import (
    HYBRIDS,
    Job,
    assert_no_leak,
    draft_config,
    run_jobs,
    toy_engine,
    toy_runner,
)

BACKENDS = {"reference": "float32"}
if why_not_native() is None:
    BACKENDS["native"] = "native-int8"
OWN = {
    "hybrid_draft": lambda shape, dtype: DraftModelProposer(
        draft_config(max_branching=2, max_tree_nodes=8),
        toy_runner(dtype, prefix_caching=False, noise=0.3, shape=shape, max_num_seqs=3),
    ),
    "hybrid_self": lambda shape, dtype: (
        lambda runner: self_drafter(runner, 1, max_branching=2, max_tree_nodes=8)
    ),
}
"""Drafts with states: another model of the target's kind, for at most three requests at a time, and
the target's first layer."""
KINDS = [f"{kind} {backend}" for backend in BACKENDS for kind in HYBRIDS]
USUAL = KINDS[-len(HYBRIDS) :]
OTHERS = KINDS[: -len(HYBRIDS)]
"""On the reference, which takes ten times as long: where it is not the usual one, some suffice."""
kinds = pytest.mark.parametrize("kind", only(USUAL, KINDS))
DTYPES = in_step(HYBRIDS, ["int8", "bfloat16"], steps=2)
if why_not_native() is None:
    packed = [f"native-{dtype}" for dtype in PACKED_DTYPES if dtype != "file"]
    DTYPES += in_step(HYBRIDS, packed)
DRAFTS = ("lookup_tree", "draft_tree", "head_tree", "mtp_tree", "several", "random", *OWN)
NARROW = {"max_num_batched_tokens": 8, "max_step_ms": 1e6}
STATE_MIXES: dict[str, dict[str, Any]] = {
    **MIXES,
    "few_slots": {"num_slots": 10, **NARROW},  # 8 requests, of which one can read its prompt
    "fewer_slots_than_requests": {"num_slots": 4, **NARROW},
}


def engine_of(kind: str, proposer: str = "", **config: Any) -> Engine:
    shape, _, backend = kind.partition(" ")
    config.setdefault("dtype", BACKENDS[backend])
    if proposer in OWN:
        made = [OWN[proposer](HYBRIDS[shape], config["dtype"])]
    else:
        made = [factory() for factory in PROPOSERS[proposer]] if proposer else []
    return toy_engine(made, shape=HYBRIDS[shape], **config)


def others(*axes: Iterable[Any], steps: int) -> list[Any]:
    """The first steps along axes whose kinds are the others."""
    return in_step(*axes, steps=steps) if OTHERS else []


_plain: dict[str, list[Any]] = {}


def plain(kind: str, jobs: list[Job], **config: Any) -> list[list[Any]]:
    """Each job by itself, without speculation and without a prefix cache; computed once."""
    found = []
    for job in jobs:
        key = repr((kind, sorted(config.items()), list(job.prompt), job.params))
        if key not in _plain:
            engine = engine_of(kind, enable_prefix_caching=False, **config)
            alone = run_jobs(engine, [Job(job.prompt, job.params)], checkers=checkers)
            (_plain[key],) = answers(alone)
        found.append(_plain[key])
    return found


def check(engine: Engine, jobs: list[Job], truth: list[list[Any]], script: Any = None) -> None:
    assert answers(run_jobs(engine, jobs, script, checkers=checkers)) == truth
    assert_no_leak(engine)


@pytest.mark.parametrize(
    ("sampling", "proposer", "kind"),
    once(SAMPLING, DRAFTS, USUAL) + others(SAMPLING, DRAFTS, OTHERS, steps=4),
)
def test_one_request(sampling: str, proposer: str, kind: str) -> None:
    jobs = [Job(prompts()[0], SAMPLING[sampling])]
    check(engine_of(kind, proposer), jobs, plain(kind, jobs))


@pytest.mark.parametrize(
    ("proposer", "kind", "mix"),
    in_turns(DRAFTS, USUAL, STATE_MIXES) + others(DRAFTS, OTHERS, STATE_MIXES, steps=2),
)
def test_batch_mixes(mix: str, proposer: str, kind: str) -> None:
    """The second time, where there is a prefix cache, states may be in it."""
    jobs = staggered(DRAFTS.index(proposer) % len(GROUPS))
    engine, truth = engine_of(kind, proposer, **STATE_MIXES[mix]), plain(kind, jobs)
    for _ in range(1 + STATE_MIXES[mix].get("enable_prefix_caching", True)):
        check(engine, jobs, truth)


@pytest.mark.parametrize(("shape", "dtype"), DTYPES)
def test_every_dtype(shape: str, dtype: str) -> None:
    jobs, kind = staggered(), f"{shape} reference"
    check(engine_of(kind, "random", dtype=dtype), jobs, plain(kind, jobs, dtype=dtype))


@kinds
def test_every_start_and_context_limit(kind: str) -> None:
    base = prompts()[0] * 2
    jobs = [Job(base[:n], replace(GREEDY, max_tokens=6)) for n in range(1, 36)]
    check(engine_of(kind, "lookup_tree", max_num_seqs=5), jobs, plain(kind, jobs))


@kinds
def test_aborted_requests_leave_their_neighbours_alone(kind: str) -> None:
    jobs = staggered()

    def abort(engine: Engine, ids: list[list[int]]) -> None:
        engine.abort(ids[0][0])

    truth = plain(kind, jobs)
    results = answers(run_jobs(engine := engine_of(kind, "random"), jobs, {4: abort}))
    assert results[1:] == truth[1:]
    assert results[0][0][0] == truth[0][0][0][: len(results[0][0][0])]
    assert_no_leak(engine)


@kinds
@pytest.mark.parametrize("after", [False, True])
def test_forwards_that_fail_are_repeated(
    kind: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third forward fails, before it does anything or when it has done everything."""
    jobs, count = staggered(1), itertools.count(1)
    truth, forward = plain(kind, jobs), ModelRunner.forward

    def fails(self: ModelRunner, *args: Any, **options: Any) -> Any:
        fault = next(count) % 3 == 0
        if fault and not after:
            raise RuntimeError("no memory")
        result = forward(self, *args, **options)
        if fault:
            self.kv.poison_free()
            raise RuntimeError("no memory")
        return result

    engine = engine_of(kind, "lookup_tree")
    single = engine._alone

    def retried(step: Any, item: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", forward)
            return single(step, item)

    monkeypatch.setattr(engine, "_alone", retried)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", fails)
        check(engine, jobs, truth)
    assert next(count) > 10


@kinds
def test_the_next_turn_begins_where_the_last_one_ended(kind: str) -> None:
    """The end of an answer is no multiple of a block; only what is after it is computed."""
    engine, params = engine_of(kind, "lookup_tree"), replace(GREEDY, max_tokens=9, ignore_eos=True)
    text, computed = prompts()[0], 0
    for turn in range(3):
        job = Job(text, params)
        before = engine.stats()
        check(engine, [job], plain(kind, [job]))
        found = engine.stats().num_cached_tokens - before.num_cached_tokens
        assert found == (computed if turn else 0)
        (result,) = run_jobs(engine, [job])[0]  # the same again: but for its last token
        assert result.request is not None
        assert result.request.num_cached_tokens == len(text) - 1
        computed = len(result.request.token_ids) - 1  # the last one was emitted, not read
        text = [*result.request.token_ids, 5, 6, 7, 8 + turn]
    engine.kv.flush_prefixes()
    assert_no_leak(engine)
    assert engine.kv.pool.num_used == 0


@kinds
@pytest.mark.parametrize("budget", [64, 9])
def test_a_state_is_kept_where_a_prompt_says(kind: str, budget: int) -> None:
    """Its last tokens, and those of its answer, are others in the next turn."""
    params, narrow = (
        replace(WARM, max_tokens=9, ignore_eos=True),
        {"max_num_batched_tokens": budget},
    )
    engine, text = engine_of(kind, "lookup_tree", **narrow), prompts()[0]
    jobs = [
        Job([*text, 9, 8, 7], params, resume_at=len(text)),
        Job([*text, 9, 8, 7], replace(params, seed=8), resume_at=len(text)),
        Job([*text, 9, 6, 5, 5], params, resume_at=len(text) + 3),
        Job([*text, 9, 6, 5, 4, 3], params, resume_at=1),  # too far from the end
    ]
    for job, cached in zip(jobs, [0, len(text), len(text), len(text) + 3], strict=True):
        before = engine.stats()
        check(engine, [job], plain(kind, [job]))
        assert engine.stats().num_cached_tokens - before.num_cached_tokens == cached
    check(engine, jobs, plain(kind, jobs))


@pytest.mark.parametrize(("kind", "resume_at"), [(KINDS[0], 22), (KINDS[1], 16)])
def test_a_long_prompt_leaves_the_ends_of_other_texts(
    kind: str, resume_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps states on its way as far as there is room, and no further."""
    monkeypatch.setattr(kv_cache, "CHECKPOINT_DISTANCE", 8)
    engine = engine_of(kind, num_slots=12, max_num_batched_tokens=8, max_num_seqs=1)
    params, chat = replace(GREEDY, max_tokens=2, ignore_eos=True), prompts()[0]
    long = [1 + 3 * i % 40 for i in range(90)]
    for job in (Job(chat, params, resume_at=resume_at), Job(long, params)):
        check(engine, [job], plain(kind, [job]))
    for text, cached in ((chat, resume_at), ([*long[:89], 5, 6], 89)):
        before, job = engine.stats(), Job([*text, 7, 8, 9], params)
        check(engine, [job], plain(kind, [job]))
        assert engine.stats().num_cached_tokens - before.num_cached_tokens == cached


@kinds
@pytest.mark.parametrize("slots", [40, 4])
def test_states_of_long_prompts_are_kept_on_the_way(
    kind: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts that part in the middle: the second begins at a state before they do, if there was
    room to keep it."""
    monkeypatch.setattr(kv_cache, "CHECKPOINT_DISTANCE", 30)
    engine = engine_of(kind, num_slots=slots, max_num_batched_tokens=16, max_num_seqs=2)
    common = [1 + i % 40 for i in range(75)]
    jobs = [Job([*common, *tail], replace(GREEDY, max_tokens=2)) for tail in ([3, 5] * 9, [7] * 9)]
    truth = plain(kind, jobs)
    for job, wanted in zip(jobs, truth, strict=True):
        check(engine, [job], [wanted])
    if slots == 40:
        assert engine.stats().num_cached_tokens == 64


@kinds
def test_ends_of_texts_that_are_kept_make_way_for_requests(kind: str) -> None:
    """Their blocks count as free: the second request does not wait until the first one is done."""
    engine, params = engine_of(kind, num_blocks=12), replace(GREEDY, max_tokens=4, ignore_eos=True)
    for first in range(6):
        check(engine, [job := Job([1 + first, 2, 3], params)], plain(kind, [job]))
    kept = len(engine.kv.checkpoints.blocks())
    assert kept >= 3
    assert engine.stats().kv_blocks_used == 0
    half = (engine.kv.pool.num_blocks - 1) // 2
    assert 2 * half > engine.kv.pool.num_available
    jobs = [Job([7 + i] * (half * 16 - 8), params) for i in range(2)]
    running = []

    def look(engine: Engine, ids: list[list[int]]) -> None:
        running.append(len(engine.scheduler.running))

    check(engine, jobs, plain(kind, jobs), dict.fromkeys(range(60), look))
    assert max(running) == 2
