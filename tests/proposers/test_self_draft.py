"""Drafts by the target itself: what they share with it, and that they never change it.

How a target that drafts for itself is made cheaper: what is shared, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.api.llm import embedded_model
from paceline.backends.native.cpu import CpuOps, NativeKV
from paceline.backends.native.packing import Packer
from paceline.build.build import build_engine
from paceline.cache.block_pool import blocks_for
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.growth import acceptance_estimates, likeness
from paceline.proposers.draft_model.self_draft import SelfDraftProposer, build, cheaper_decoder
from paceline.request.request import Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from paceline.sampling.logit_edits import SamplingRow
from tests.arrays import arrays, same
from tests.contracts.test_identity import GREEDY, MIXES, WARM, answers, prompts, staggered
from tests.proposers.drive import Target, make_request, propose
from tests.proposers.self_drafts import ALL, PROMPT, begun, native, self_config, self_drafter
from tests.toy import (
    TOY,
    Job,
    assert_no_leak,
    draft_config,
    run_jobs,
    toy_engine,
    toy_runner,
    toy_tensors,
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


def target_of(checkpoint: Checkpoint, runner: ModelRunner) -> TargetInfo:
    return TargetInfo(TOY.vocab_size, None, "cpu", 256, 4, 0, "auto", runner, None, checkpoint)


def toy_target(dtype: str, **tensors: Any) -> TargetInfo:
    checkpoint = Checkpoint(TOY, arrays(toy_tensors(**tensors)), None, "toy")
    return target_of(checkpoint, toy_runner(dtype, **tensors))


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        ("float32", {"layers": 3}, "draft_layers is 3; the target has 2 layers"),
        ("float32", {"layers": 2}, "costs as much as the target"),
        ("float32", {"layers": 2, "dtype": "float32"}, "costs as much as the target"),
        (
            "float32",
            {"layers": 1, "dtype": "int4"},
            "can run in float32, bfloat16, float16, file, int8",
        ),
        pytest.param("native-int4", {"dtype": "int8"}, "in int4, int3, int2$", marks=native),
    ],
)
def test_what_cannot_be_cheaper_is_refused(
    dtype: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(self_config(**options), toy_target(dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'needs "draft_layers", fewer "bits", or both'),
        ({"draft_layers": 0}, "draft_layers is 0"),
        ({"draft_layers": 1, "model": "x"}, 'takes no "model"'),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig("self", **options)


def test_without_a_target_there_is_no_proposer() -> None:
    with pytest.raises(ConfigError, match="none is loaded here"):
        build(self_config(1), replace(toy_target("float32"), runner=None))


@native
def test_weights_are_shared() -> None:
    target = toy_target("native-int8")
    assert target.runner is not None
    assert target.checkpoint is not None
    whole = target.runner.decoder
    fewer = cheaper_decoder(self_config(1), whole, target.checkpoint)
    assert [id(layer) for layer in fewer.layers] == [id(whole.layers[0])]
    rounded = cheaper_decoder(self_config(None, dtype="int4"), whole, target.checkpoint)
    for name in ("embedding", "head", "norm", "rope"):
        for draft in (fewer, rounded):
            assert getattr(draft, name) is getattr(whole, name)
    assert len(rounded.layers) == 2


def outputs(decoder: Decoder) -> list[torch.Tensor]:
    """Every linear applied to some inputs."""
    found = []
    for layer in decoder.layers:
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            width = linear.k if hasattr(linear, "k") else linear.weight.shape[0]
            x = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
            found.append(decoder.ops.linear(x, linear))
    return found


@native
def test_fewer_bits_are_those_of_the_checkpoint() -> None:
    target = toy_target("native-int8")
    assert target.runner is not None
    assert target.checkpoint is not None
    config = self_config(None, dtype="int4")
    rounded = cheaper_decoder(config, target.runner.decoder, target.checkpoint)
    expected = Decoder(TOY, arrays(toy_tensors()), CpuOps("int4"), TOY.max_position)
    for one, two in zip(outputs(rounded), outputs(expected), strict=True):
        assert same(one, two)


@native
@pytest.mark.parametrize(("dtype", "most"), [("int4", 0.1), ("int3", 0.2), ("int2", 0.35)])
def test_a_model_that_is_packed_in_8_bits_gives_one_in_fewer(
    tmp_path: Path, dtype: str, most: float
) -> None:
    source = load_checkpoint(embedded_model("target"))
    write_packed(source, tmp_path / "packed", Packer("int8"))
    config = self_config(2, dtype=dtype)
    drafts = []
    for model in (source, load_checkpoint(tmp_path / "packed")):
        limits = EngineConfig(max_num_seqs=1, max_model_len=64, kv_cache_memory=1 << 22)
        runner = build_engine(model, limits).engine.runner
        drafts.append(cheaper_decoder(config, runner.decoder, model))
    for one, two in zip(*map(outputs, drafts), strict=True):
        error = np.linalg.norm(one - two) / np.linalg.norm(one)
        assert 0 < error < most  # rounded to 8 bits in between, its blocks find other scales


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_fewer_bits_without_native_kernels(dtype: str) -> None:
    target = toy_target("float32")
    assert target.runner is not None
    proposer, model = build(self_config(None, dtype=dtype), target), Target(target.runner)
    request = make_request(1, PROMPT)
    begun(model, request)
    results = [model.step(proposer, request)[1] for _ in range(8)]
    assert sum(result.num_accepted for result in results) > 24  # of 32


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_estimates_know_how_alike_draft_and_target_are(temperature: float) -> None:
    row = SamplingRow(make_request(1, PROMPT, temperature=temperature), (), None, None)
    scores = np.asarray([[2.0, 1.0, 0.5, *[-1.0] * 5]])
    found = [
        acceptance_estimates([row], scores, likeness(config))[0, 0]
        for config in (
            self_config(1, dtype="int4"),
            self_config(None, dtype="int2"),
            draft_config(),
            self_config(None, dtype="int3"),
            self_config(None, dtype="int4"),
            self_config(None, dtype="int8"),
        )
    ]
    assert found == sorted(found)
    assert len(set(found)) == len(found)
    assert found[-1] > 0.98


@native
def test_the_engine_builds_it_from_its_configuration() -> None:
    source = load_checkpoint(embedded_model("target"))
    wanted = SpeculativeConfig("self", draft_layers=6, dtype="int4")
    limits = EngineConfig(
        max_num_seqs=2,
        max_model_len=128,
        kv_cache_memory=1 << 24,
        strict=True,
        planner="fixed",  # the other one may find that it does not pay
    )
    prompt = Job(list(range(30, 50)), SamplingParams(temperature=0.0, max_tokens=24))
    found = []
    for speculative in ((), (wanted,)):
        engine = build_engine(source, replace(limits, speculative=speculative)).engine
        found.append(answers(run_jobs(engine, [prompt])))
        assert engine.stats().num_proposer_failures == 0
    assert found[0] == found[1]
    assert engine.stats().speculation.by_proposer.keys() == {"self"}
