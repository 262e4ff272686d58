"""GGUF tensors that multiply others, as converters write them beside NVFP4's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.core.errors import ModelLoadError
from paceline.loading.checkpoint import load_checkpoint
from paceline.tensors.arrays import floats
from tests.loading.gguf_writing import convert
from tests.loading.test_gguf import rewrite_tensor
from tests.models.reference import VOCAB, Driver

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(3)).tolist()
PARTS = {"attn_q": "self_attn.q_proj", "ffn_down": "mlp.down_proj"}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


def test_a_scale_multiplies_its_weight(tmp_path: Path) -> None:
    """llama.cpp (b11549) multiplies the product, whatever the weight's type."""
    path, scales = tmp_path / "m.gguf", {"output.scale": np.array([0.5])}
    for part in PARTS:
        scales[f"blk.1.{part}.scale"] = np.array([3.0])
        scales[f"blk.1.{part}.input_scale"] = np.array([7.0])  # makes no difference on the CPU
    model = convert("llama", path, extra_tensors=scales)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        for part in PARTS.values():
            model.get_parameter(f"model.layers.1.{part}.weight").mul_(3.0)
    got, want = Driver.of(path, max_len=32).chunk(TOKENS), logits_of(model)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("qtype", ["BF16", "Q8_0"])
def test_codes_alone_are_not_the_weight(tmp_path: Path, qtype: str) -> None:
    name, path = "model.layers.0.mlp.down_proj.weight", tmp_path / "m.gguf"
    widths = {"intermediate_size": 128}
    convert("qwen3", tmp_path / "plain.gguf", qtype=qtype, changes=widths)
    scale = {"blk.0.ffn_down.scale": np.array([3.0])}
    convert("qwen3", path, qtype=qtype, changes=widths, extra_tensors=scale)
    plain, scaled = (load_checkpoint(each).tensors for each in (tmp_path / "plain.gguf", path))
    assert np.array_equal(scaled[name], floats(plain[name]) * np.float32(3.0))
    assert plain.as_stored(name) is not None
    assert scaled.as_stored(name) is None


def test_each_expert_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = convert("qwen3-moe", tmp_path / "plain.gguf")
    number = model.config.num_experts
    factors = np.linspace(0.5, 2.0, number)
    names = [f"blk.1.ffn_{part}_exps.scale" for part in ("gate", "up", "down")]
    convert("qwen3-moe", path, extra_tensors=dict.fromkeys(names, factors))
    plain, scaled = (load_checkpoint(each).tensors for each in (tmp_path / "plain.gguf", path))
    assert set(plain) == set(scaled)
    for part in ("gate", "up", "down"):
        for expert, factor in enumerate(factors.astype(np.float32)):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            assert np.array_equal(scaled[name], plain[name] * factor)


def test_codes_of_nvfp4(tmp_path: Path) -> None:
    path, kind = tmp_path / "m.gguf", gguf.GGMLQuantizationType.NVFP4
    widths = {"hidden_size": 64, "intermediate_size": 128}
    convert("qwen3", path, extra_tensors={"blk.0.ffn_down.scale": np.array([0.25])}, changes=widths)
    random = np.random.default_rng(0)
    sizes = random.integers(40, 60, (64, 2, 4)), random.integers(0, 256, (64, 2, 32))
    bits = np.concatenate(sizes, axis=-1).astype(np.uint8).reshape(64, -1)
    rewrite_tensor(path, "blk.0.ffn_down.weight", kind.value, bits)
    found = load_checkpoint(path).tensors["model.layers.0.mlp.down_proj.weight"]
    assert np.array_equal(found, gguf.quants.dequantize(bits, kind) * np.float32(0.25))


def test_as_many_numbers_as_matrices(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    convert("qwen3", path, extra_tensors={"blk.0.ffn_down.scale": np.ones(2)})
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.ffn_down\.scale' has 2 numbers; it must"):
        load_checkpoint(path)
