"""How a target that drafts for itself is made cheaper: what is shared, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.api.llm import embedded_model
from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.packing import Packer
from paceline.build.build import build_engine
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.proposers.base import TargetInfo
from paceline.proposers.base.growth import acceptance_estimates, likeness
from paceline.proposers.draft_model.self_draft import build, cheaper_decoder
from paceline.request.sampling_params import SamplingParams
from paceline.sampling.logit_edits import SamplingRow
from tests.arrays import arrays, same
from tests.contracts.test_identity import answers
from tests.proposers.drive import Target, make_request
from tests.proposers.self_drafts import PROMPT, begun, native, self_config
from tests.toy import TOY, Job, draft_config, run_jobs, toy_runner, toy_tensors


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
