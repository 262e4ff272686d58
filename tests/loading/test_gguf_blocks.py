"""Blocks go from a file to the kernels as they are; what is rounded again is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.backends.native.packing import Packer
from paceline.backends.resolve import resolve_dtype
from paceline.backends.rows.reference import ReferenceOps
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.backend import PackedLinear
from paceline.models.decoder_reader import DecoderReader
from paceline.models.tensor_reader import TensorReader
from paceline.tensors.arrays import floats
from paceline.tensors.stored import StoredTensors
from tests.arrays import same
from tests.loading.gguf_writing import convert
from tests.models.reference import Driver

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())),
]
TOKENS = torch.randint(3, 300, (20,), generator=torch.Generator().manual_seed(3)).tolist()
WIDE = {"intermediate_size": 96}  # whole blocks of 32, and not of the kernels' 64


def opened(path: Path, family: str = "llama", qtype: str = "Q4_0", **options: Any) -> Checkpoint:
    convert(family, path, qtype=qtype, changes=WIDE, **options)
    return load_checkpoint(path, with_tokenizer=False)


def stacked_of(checkpoint: Checkpoint, layer: int, *names: str) -> np.ndarray:
    """Dequantised by the gguf package and put into Hugging Face order: what a linear stands for."""
    parts = [floats(checkpoint.tensors[f"model.layers.{layer}.{name}.weight"]) for name in names]
    return np.concatenate(parts)


def stacked(checkpoint: Checkpoint, *names: str) -> np.ndarray:
    return stacked_of(checkpoint, 1, *names)


def unpacked(linear: PackedLinear) -> np.ndarray:
    parts = [(part.format, part.data, part.num_outputs) for part in linear.parts]
    every = np.arange(linear.n, dtype=np.int32)
    found: np.ndarray = native_module().Linear(parts, None, linear.k).rows(every)
    return found


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
@pytest.mark.parametrize("qtype", ["Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_codes_and_scales_are_the_file_s(
    tmp_path: Path, family: str, qtype: str, load_format: str
) -> None:
    """Queries and keys of a llama lie interleaved in the file; phi3's are fused there."""
    opened(tmp_path / "m.gguf", family, qtype)
    checkpoint = load_checkpoint(tmp_path / "m.gguf", load_format=load_format, with_tokenizer=False)
    packer = Packer("file")
    layer = DecoderReader(TensorReader(checkpoint.tensors, checkpoint.config, packer)).layer(1)
    fused = family == "phi3"
    qkv = ("self_attn.qkv_proj",) if fused else QKV
    gate_up = ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj")
    for linear, names in (
        (layer.qkv, qkv),
        (layer.o, ("self_attn.o_proj",)),
        (layer.gate_up, gate_up),
        (layer.down, ("mlp.down_proj",)),
    ):
        assert [part.format for part in linear.parts] == [qtype]
        assert np.array_equal(unpacked(linear), stacked(checkpoint, *names))
    assert not packer.roundings()


@pytest.mark.parametrize("backend", [CpuOps, ReferenceOps])
def test_biases_and_the_forward(tmp_path: Path, backend: Any) -> None:
    """Nearly the logits of the same values in float32."""
    checkpoint = opened(tmp_path / "m.gguf", "llama-biased", qtype="Q5_1")
    got = Driver(checkpoint, max_len=32, ops=backend("file")).chunk(TOKENS)
    want = Driver(checkpoint, max_len=32, ops=ReferenceOps("float32")).chunk(TOKENS)
    assert want.std() > 0.05
    assert (got - want).abs().median() < 0.05 * want.std()


def test_stacked_linears_of_different_types(tmp_path: Path) -> None:
    other = {"blk.1.attn_v.weight": "Q8_0", "blk.1.ffn_up.weight": "Q5_0"}
    checkpoint = opened(tmp_path / "m.gguf", other_types=other)
    layer = DecoderReader(
        TensorReader(checkpoint.tensors, checkpoint.config, Packer("file"))
    ).layer(1)
    assert [part.format for part in layer.qkv.parts] == ["Q4_0", "Q4_0", "Q8_0"]
    assert [part.format for part in layer.gate_up.parts] == ["Q4_0", "Q5_0"]
    assert np.array_equal(unpacked(layer.qkv), stacked(checkpoint, *QKV))
    got = Driver(checkpoint, max_len=32, ops=CpuOps("file")).chunk(TOKENS)
    want = Driver(checkpoint, max_len=32, ops=ReferenceOps("file")).chunk(TOKENS)
    assert (got - want).abs().max() < 0.25 * want.std()


def test_what_is_rounded_again_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = opened(tmp_path / "m.gguf", qtype="Q8_0")
    with caplog.at_level(logging.INFO):
        Driver(checkpoint, max_len=32, ops=CpuOps("int4"))
    packer = Packer("int4")
    layer = DecoderReader(TensorReader(checkpoint.tensors, checkpoint.config, packer)).layer(0)
    want = stacked_of(checkpoint, 0, "self_attn.o_proj")
    assert 0.01 < np.abs(unpacked(layer.o) - want).max() / np.abs(want).max() < 0.2
    (rounding,) = packer.roundings()
    assert 0.03 < rounding.relative < 0.12
    assert "rounded to Q4_0: 14 tensors of Q8_0; relative RMS error" in caplog.text


@pytest.mark.parametrize("floats", ["F16", "F32", "BF16"])
def test_floats_among_quantised_tensors_stay_floats(tmp_path: Path, floats: str) -> None:
    checkpoint = opened(tmp_path / "m.gguf", other_types={"blk.1.ffn_down.weight": floats})
    assert checkpoint.is_quantised
    packer = Packer("file")
    tensors = TensorReader(checkpoint.tensors, checkpoint.config, packer)
    layer = DecoderReader(tensors).layer(1)
    assert [part.format for part in layer.down.parts] == [floats]
    assert np.array_equal(unpacked(layer.down), stacked(checkpoint, "mlp.down_proj"))
    assert not packer.roundings()
    got = Driver(checkpoint, max_len=32, ops=CpuOps("file")).chunk(TOKENS)
    want = Driver(checkpoint, max_len=32, ops=ReferenceOps("file")).chunk(TOKENS)
    assert (got - want).abs().median() < 0.05 * want.std()


def test_unknown_formats_become_8_bit_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(tmp_path / "m.gguf", other_types={"blk.1.ffn_down.weight": "Q5_1"})
    known = type(checkpoint.tensors).as_stored

    def knows_no_q5_1(tensors: StoredTensors, name: str) -> Any:
        return None if tensors.type_of(name) == "Q5_1" else known(tensors, name)

    monkeypatch.setattr(type(checkpoint.tensors), "as_stored", knows_no_q5_1)
    with caplog.at_level(logging.INFO):
        tensors = TensorReader(checkpoint.tensors, checkpoint.config, Packer("file"))
        assert [part.format for part in DecoderReader(tensors).layer(1).down.parts] == ["Q8_0"]
        tensors.log_rounding()
    assert "rounded to Q8_0: 1 tensors of Q5_1; relative RMS error 0." in caplog.text


def test_auto(tmp_path: Path) -> None:
    blocks = opened(tmp_path / "a.gguf")
    floats = opened(tmp_path / "b.gguf", qtype="F16")
    assert (blocks.is_quantised, floats.is_quantised) == (True, False)
    assert (blocks.arithmetic("file"), floats.arithmetic("int8")) == ("Q4_0", "int8")
    mixed = opened(tmp_path / "c.gguf", other_types={"blk.1.ffn_down.weight": "Q4_1"})
    assert (mixed.main_format, mixed.arithmetic("file")) == ("Q4_0", "Q4_0")
    assert resolve_dtype("auto", "cpu", blocks) == "file"
    assert resolve_dtype("auto", "cpu", floats) == "int8"
    assert resolve_dtype("int8", "cpu", blocks) == "int8"
    assert resolve_dtype("auto", "cpu", blocks, "reference") == "file"


@pytest.mark.parametrize("qtype", ["Q4_0", "Q8_0", "F16"])
def test_some_rows_of_the_embedding(tmp_path: Path, qtype: str) -> None:
    tensors = opened(tmp_path / "m.gguf", qtype=qtype).tensors
    name = "model.embed_tokens.weight"
    assert isinstance(tensors, StoredTensors)
    assert tensors.shape_of(name) == (300, 64)
    for first, last in ((0, 16), (16, 96), (288, 300)):
        assert same(tensors.rows(name, first, last), tensors[name][first:last])
