"""Drafts by the target itself: what they share with it, and that they never change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.native.cpu import NativeKV
from paceline.cache.blocks import blocks_for
from paceline.cache.model_runner import ModelRunner
from paceline.proposers.draft_model.self_draft import SelfDraftProposer
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree
from tests.contracts.test_identity import GREEDY, MIXES, WARM, answers, prompts, staggered
from tests.proposers.drive import Target, make_request, propose
from tests.proposers.self_drafts import ALL, PROMPT, begun, native, self_drafter
from tests.toy import (
    TOY,
    Job,
    assert_no_leak,
    run_jobs,
    toy_engine,
    toy_runner,
)

TREE = {"max_tree_nodes": 12, "max_branching": 3, "num_speculative_tokens": 4}
SAMPLING = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3}]
DTYPES = ["float32", pytest.param("native-int8", marks=native)]


def committed(runner: ModelRunner) -> bytes:
    """Every bit of the committed KV of all requests."""
    kv, memory = runner.kv, runner.kv.memory
    held = [kv[request_id] for request_id in range(100) if request_id in kv]
    slots = np.concatenate([sequence.slots[: sequence.length] for sequence in held])
    if isinstance(memory, NativeKV):
        blocks, lanes = slots // 16, slots % 16
        return (
            np.stack(memory.keys)[:, blocks, :, :, lanes].tobytes()
            + np.stack(memory.values)[:, blocks, :, lanes].tobytes()
        )
    found: bytes = torch.stack(memory.layers)[:, :, torch.from_numpy(slots)].numpy().tobytes()
    return found


# --- the oracle: all layers at the same precision -------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("options", [{}, TREE])
def test_all_layers_are_always_right(
    options: dict[str, int], sampling: dict[str, Any], dtype: str
) -> None:
    model = Target(toy_runner(dtype))
    proposer, request = (
        self_drafter(model.runner, ALL, **options),
        make_request(1, PROMPT, **sampling),
    )
    begun(model, request)
    for _ in range(8):
        model.runner.kv.poison_free()
        draft, result = model.step(proposer, request)
        assert len(draft) == (12 if options else 4)
        assert result.num_accepted == 4 or options
        assert result.path[-1] - 1 not in draft.parents


# --- what it leaves behind ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_targets_kv_does_not_change_by_a_bit(dtype: str) -> None:
    model = Target(toy_runner(dtype))
    proposer = self_drafter(model.runner, 1, **TREE)
    requests = [make_request(i, PROMPT * i, temperature=0.3 * i) for i in range(1, 4)]
    begun(model, *requests)
    plain = Target(toy_runner(dtype))
    for _ in range(6):
        before = committed(model.runner)
        trees = propose(proposer, *requests)
        assert committed(model.runner) == before
        model.runner.kv.poison_free()
        for request, draft in zip(requests, trees, strict=True):
            model.verify(request, draft)
    for request in requests:  # and what is committed is what plain decoding computes
        alone = make_request(request.request_id, request.token_ids[:-1])
        plain.verify(alone, DraftTree())
        plain.runner.kv.truncate(alone.request_id, len(request.token_ids) - 1)
    assert committed(plain.runner) == committed(model.runner)


def test_slots_are_given_back_but_the_scheduled_one() -> None:
    model = Target(toy_runner(prefix_caching=False))
    proposer = self_drafter(model.runner, 1, num_speculative_tokens=8)
    for length in range(9, 27):
        request = make_request(1, [1 + i % 40 for i in range(length)])
        begun(model, request)
        kv, tokens = model.runner.kv, len(request.token_ids)
        assert kv.reserve(1, 1)  # as the scheduler
        assert len(propose(proposer, request)[0]) == 8
        assert kv.pool.num_used == blocks_for(tokens)
        kv.free(1)


def test_a_draft_ends_where_the_blocks_do() -> None:
    model = Target(toy_runner(num_blocks=3, prefix_caching=False))
    proposer = self_drafter(model.runner, 1, num_speculative_tokens=8)
    request = make_request(1, list(range(1, 29)))  # 28 of 32 slots, and one more token
    begun(model, request)
    (draft,) = propose(proposer, request)
    assert len(draft) == 4  # below the last token and below three drafted ones
    assert model.runner.kv.pool.num_used == 2


def test_a_failed_forward_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, request = Target(toy_runner("float32")), make_request(1, PROMPT)
    proposer = self_drafter(model.runner)
    begun(model, request)
    expected, before = propose(proposer, request), committed(model.runner)
    forward: Callable[..., Any] = ModelRunner.forward
    calls = []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return forward(*arguments)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        propose(proposer, request)
    assert (committed(model.runner), model.runner.kv.pool.num_used) == (before, 1)
    assert propose(proposer, request) == expected


def test_without_the_targets_kv_there_is_no_draft() -> None:
    model = Target(toy_runner())
    proposer, request = self_drafter(model.runner), make_request(1, PROMPT)
    assert propose(proposer, request) == [DraftTree()]
    begun(model, request)
    request.token_ids.append(3)  # one that the target has not read
    assert propose(proposer, request) == [DraftTree()]
    assert proposer.num_forwards == 0


@pytest.mark.parametrize(("missing", "depth"), [(4, 4), (3, 4), (2, 3), (1, 2), (0, 1)])
def test_a_draft_ends_at_the_context_limit(missing: int, depth: int) -> None:
    model = Target(toy_runner())
    length = TOY.max_position - missing
    request = make_request(1, [1 + i % 40 for i in range(length - 1)], max_len=999)
    begun(model, request)
    assert len(propose(self_drafter(model.runner), request)[0]) == depth


# --- in an engine ---------------------------------------------------------------------------------


def engine_of(layers: int, options: dict[str, int], **config: Any) -> Any:
    engine = toy_engine(**config)
    engine.set_speculation([self_drafter(engine.runner, layers, Watched, **options)])
    return engine


class Watched(SelfDraftProposer):
    """Poisons, between its drafts and the target's forward, all that nobody may read."""

    def propose(self, *arguments: Any) -> list[DraftTree]:
        trees = super().propose(*arguments)
        self._kv.poison_free()
        return trees

    def observe(self, request: Request, result: VerifyResult) -> None:
        is_oracle = self.config.draft_layers == ALL
        if is_oracle and request.finish_reason is None:
            assert result.num_accepted == len(result.draft)


@pytest.mark.parametrize(
    ("mix", "dtype"),
    [
        ("preempted_cached", "float32"),
        *(pytest.param(m, "native-int8", marks=native) for m in MIXES),
    ],
)
def test_outputs_are_those_of_plain_decoding(mix: str, dtype: str) -> None:
    jobs, preemptions = staggered(2), 0
    truth = answers([run_jobs(toy_engine(dtype=dtype), [Job(j.prompt, j.params)])[0] for j in jobs])
    for layers, options in ((1, TREE), (ALL, {})):
        engine = engine_of(layers, options, dtype=dtype, **MIXES[mix])
        for _ in range(2):  # the second time out of the prefix cache
            assert answers(run_jobs(engine, jobs)) == truth
        assert engine.stats().num_proposer_failures == 0
        assert engine.stats().speculation.num_accepted_tokens > 0
        preemptions += engine.stats().num_preemptions
        assert_no_leak(engine)
    assert (preemptions > 0) == mix.startswith("preempted")


def test_every_start_of_a_block() -> None:
    base = prompts()[0] * 2
    jobs = [Job(base[:n], replace(GREEDY if n % 2 else WARM, max_tokens=6)) for n in range(1, 36)]
    truth = answers(run_jobs(toy_engine(), jobs))
    assert answers(run_jobs(engine_of(1, TREE, max_num_seqs=5), jobs)) == truth
