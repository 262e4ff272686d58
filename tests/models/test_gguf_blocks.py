"""Q4_0 goes from a file to the 4-bit kernels as it is; other types are rounded, and it is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.ops.cpu import CpuOps
from paceline.models.ops.native import native_module, why_not_native
from paceline.models.ops.packing import Packer
from paceline.models.ops.resolve import resolve_dtype
from paceline.models.stored import StoredTensors
from paceline.models.weights import WeightReader
from tests.models.gguf_writing import convert
from tests.models.reference import Driver

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
TOKENS = torch.randint(3, 300, (20,), generator=torch.Generator().manual_seed(3)).tolist()
WIDE = {"intermediate_size": 96}  # whole blocks of 32, and not of the kernels' 64


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(path: Path, family: str = "llama", qtype: str = "Q4_0", **options: Any) -> Checkpoint:
    convert(family, path, qtype=qtype, changes=WIDE, **options)
    return load_checkpoint(path, with_tokenizer=False)


def stacked(checkpoint: Checkpoint, *names: str) -> np.ndarray:
    """Dequantised by the gguf package and put into Hugging Face order: what a linear stands for."""
    parts = [checkpoint.tensors[f"model.layers.1.{name}.weight"].float() for name in names]
    return torch.cat(parts).numpy()


def unpacked(linear: Any) -> np.ndarray:
    found: np.ndarray = native_module().unpack_int4(linear.data, linear.n, linear.k)
    return found


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_codes_and_scales_are_the_file_s(tmp_path: Path, family: str, load_format: str) -> None:
    """Queries and keys of a llama lie interleaved in the file; phi3's are fused there."""
    opened(tmp_path / "m.gguf", family)
    checkpoint = load_checkpoint(tmp_path / "m.gguf", load_format=load_format, with_tokenizer=False)
    packer = Packer("int4")
    layer = WeightReader(checkpoint.tensors, checkpoint.config, packer).layer(1)
    fused = family == "phi3"
    qkv = ("self_attn.qkv_proj",) if fused else QKV
    gate_up = ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj")
    for linear, names in (
        (layer.qkv, qkv),
        (layer.o, ("self_attn.o_proj",)),
        (layer.gate_up, gate_up),
        (layer.down, ("mlp.down_proj",)),
    ):
        assert np.array_equal(unpacked(linear), stacked(checkpoint, *names))
    assert packer.rounding.squares == 0  # nothing was rounded


def test_biases_and_the_forward(tmp_path: Path) -> None:
    """The same logits as from packed floats of the same values."""
    checkpoint = opened(tmp_path / "m.gguf", "llama-biased")

    class Unpacking(CpuOps):
        """Takes the blocks as floats, and rounds those to what they are."""

        def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            blocks = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q4_0)
            return self.pack_q4_0(torch.from_numpy(blocks), bias)

    floats = Checkpoint(checkpoint.config, dict(checkpoint.tensors), None, "floats")
    got = Driver(checkpoint, max_len=32, ops=CpuOps("int4")).chunk(TOKENS)
    want = Driver(floats, max_len=32, ops=Unpacking("int4")).chunk(TOKENS)
    assert got.std() > 0.05
    # Values survive another rounding to blocks of their own grid but for a last bit of the scale.
    assert (got - want).abs().max() < 0.02 * want.std()


def test_other_types_are_rounded_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = opened(tmp_path / "m.gguf", qtype="Q8_0")
    with caplog.at_level(logging.INFO):
        Driver(checkpoint, max_len=32, ops=CpuOps("int4"))
    packer = Packer("int4")
    reader = WeightReader(checkpoint.tensors, checkpoint.config, packer)
    layers = [reader.layer(index) for index in range(2)]
    names = {"qkv": QKV, "o": ("self_attn.o_proj",), "down": ("mlp.down_proj",)}
    names["gate_up"] = ("mlp.gate_proj", "mlp.up_proj")
    error = squares = 0.0
    for index, layer in enumerate(layers):
        for part, of in names.items():
            parts = [checkpoint.tensors[f"model.layers.{index}.{n}.weight"] for n in of]
            want = torch.cat(parts).numpy()
            error += float(np.square(unpacked(getattr(layer, part)) - want, dtype="f8").sum())
            squares += float(np.square(want, dtype="f8").sum())
    relative = (error / squares) ** 0.5
    assert packer.rounding.relative == pytest.approx(relative, rel=1e-4)
    assert 0.03 < relative < 0.12
    assert "14 tensors of Q8_0" in caplog.text
    assert f"relative RMS error {100 * relative:.1f}%" in caplog.text


def test_one_other_type_rounds_its_own_linear_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = opened(tmp_path / "m.gguf", other_types={"blk.1.ffn_down.weight": "Q4_1"})
    assert checkpoint.quantised == "int4"
    with caplog.at_level(logging.INFO):
        packer = Packer("int4")
        reader = WeightReader(checkpoint.tensors, checkpoint.config, packer)
        reader.layer(0)
        assert packer.rounding.squares == 0
        reader.layer(1)
        reader.log_rounding()
    assert "rounded to 4 bits in groups of 32: 1 tensors of Q4_1;" in caplog.text


def test_auto(tmp_path: Path) -> None:
    blocks = opened(tmp_path / "a.gguf")
    other = opened(tmp_path / "b.gguf", qtype="Q8_0")
    assert (blocks.quantised, other.quantised) == ("int4", None)
    assert resolve_dtype("auto", "cpu", blocks) == "int4"
    assert resolve_dtype("auto", "cpu", other) == "int8"
    assert resolve_dtype("int8", "cpu", blocks) == "int8"
    assert resolve_dtype("auto", "cpu", blocks, "reference") != "int4"


@pytest.mark.parametrize("qtype", ["Q4_0", "Q8_0", "F16"])
def test_some_rows_of_the_embedding(tmp_path: Path, qtype: str) -> None:
    tensors = opened(tmp_path / "m.gguf", qtype=qtype).tensors
    name = "model.embed_tokens.weight"
    assert isinstance(tensors, StoredTensors)
    assert tensors.shape_of(name) == (300, 64)
    for first, last in ((0, 16), (16, 96), (288, 300)):
        assert torch.equal(tensors.rows(name, first, last), tensors[name][first:last])
