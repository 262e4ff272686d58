"""Quantised linears that are computed with as they are stored: groups that are scattered over the
inputs (``desc_act``), and codes of 8 bits with zero points."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.backends.native.packing import Packer, read_layers
from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import ModelLoadError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.decoder_reader import DecoderReader
from paceline.models.tensor_reader import TensorReader
from tests.arrays import same
from tests.loading.test_quantised_checkpoints import TOKENS, change, save_quantised
from tests.models.reference import Driver

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
SCATTERED = ["gptq-act", "gptq-act-8", "gptq-act-shared", "gptq-2-act", "packed-order"]
ZEROS = ["gptq-8", "packed-8-zeros", "int8-zeros"]
EVERY = SCATTERED + ZEROS
LAYER = "model.layers.0."
LINEARS = {
    "qkv": [f"self_attn.{x}_proj" for x in "qkv"],
    "o": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


def weights(plain: Path, linear: str) -> np.ndarray:
    """What the quantised linears stand for, by the packing of the tests."""
    tensors = load_checkpoint(plain).tensors
    return np.concatenate([tensors[f"{LAYER}{name}.weight"] for name in LINEARS[linear]])


def rows(linear: Any) -> np.ndarray:
    packed = native_module().Linear(linear.parts, None, linear.k)
    found: np.ndarray = packed.rows(np.arange(packed.n, dtype=np.int32))
    return found


@pytest.mark.parametrize("form", EVERY)
def test_weights_are_exact(tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = save_quantised(tmp_path / "tiny", form)
    checkpoint = load_checkpoint(tmp_path / "tiny")
    with caplog.at_level(logging.INFO):
        tensors = TensorReader(checkpoint.tensors, checkpoint.config, Packer("file"))
        layer = DecoderReader(tensors).layer(0)
        tensors.log_rounding()
    assert "rounded" not in caplog.text
    for name in LINEARS:
        got, want = rows(getattr(layer, name)), weights(plain, name)
        if form == "int8-zeros":  # whose scales have bits that the floats have no room for
            assert np.allclose(got, want, rtol=0.0, atol=1e-6)
        else:
            assert np.array_equal(got, want), name
    assert len(layer.qkv.parts) == (3 if form in SCATTERED and form != "gptq-act-shared" else 1)
    assert all((part.order is not None) == (form in SCATTERED) for part in layer.qkv.parts)


@pytest.mark.parametrize("form", EVERY)
def test_products_are_those_of_the_reference(tmp_path: Path, form: str) -> None:
    """The specified arithmetic on inputs in the order of the columns."""
    save_quantised(tmp_path / "tiny", form)
    checkpoint = load_checkpoint(tmp_path / "tiny")
    x = np.random.default_rng(1).standard_normal((5, 64), np.float32)
    got, want = (
        ops.linear(
            x,
            DecoderReader(TensorReader(checkpoint.tensors, checkpoint.config, ops))
            .layer(0)
            .gate_up,
        )
        for ops in (CpuOps("file"), ReferenceOps("file"))
    )
    assert np.allclose(got, want, rtol=1e-5, atol=1e-4)


def greedy(checkpoint: Checkpoint, ops: Any) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, and the tokens that are picked after it one by one."""
    driver = Driver(checkpoint, max_len=64, ops=ops)
    logits, tokens = driver.chunk(TOKENS), []
    last = logits[-1]
    for _ in range(12):
        tokens.append(int(last.argmax()))
        last = driver.chunk([tokens[-1]])[-1]
    return logits, tokens


@pytest.mark.parametrize("form", EVERY)
def test_greedy_tokens_are_those_of_the_reference(tmp_path: Path, form: str) -> None:
    save_quantised(tmp_path / "tiny", form)
    checkpoint = load_checkpoint(tmp_path / "tiny")
    got, tokens = greedy(checkpoint, CpuOps("file"))
    want, expected = greedy(checkpoint, ReferenceOps("file"))
    assert tokens == expected
    assert (got - want).abs().median() < 0.05 * want.std()


@pytest.mark.parametrize("form", EVERY)
def test_a_converted_folder_is_the_same(tmp_path: Path, form: str) -> None:
    save_quantised(tmp_path / "tiny", form)
    source = load_checkpoint(tmp_path / "tiny")
    write_packed(source, tmp_path / "packed", Packer("file"))
    packed = load_checkpoint(tmp_path / "packed")
    assert (f"{LAYER}mlp.down_proj.0.order" in packed.tensors) == (form in SCATTERED)
    got, want = (greedy(checkpoint, CpuOps("file")) for checkpoint in (packed, source))
    assert same(got[0], want[0])
    assert got[1] == want[1]


def test_a_converted_folder_in_fewer_bits(tmp_path: Path) -> None:
    plain = save_quantised(tmp_path / "tiny", "gptq-act")
    write_packed(load_checkpoint(tmp_path / "tiny"), tmp_path / "packed", Packer("file"))
    packed = load_checkpoint(tmp_path / "packed")
    layer = read_layers(packed, packed.config, Packer("float32"))[0]
    for name in LINEARS:
        assert np.array_equal(rows(getattr(layer, name)), weights(plain, name)), name


Damage = Callable[[np.ndarray], np.ndarray]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda order: np.zeros_like(order), "twice"),
        (lambda order: order + 1, "this one has"),
        (lambda order: order[:-1], "elements"),
        (lambda order: order.astype(np.int64), "int32"),
        (lambda order: order.astype(np.float32), "int32"),
        (lambda order: order[:, None], "int32"),
    ],
)
def test_a_damaged_order(tmp_path: Path, damage: Damage, words: str) -> None:
    save_quantised(tmp_path / "tiny", "gptq-act")
    out = tmp_path / "packed"
    write_packed(load_checkpoint(tmp_path / "tiny"), out, Packer("file"))
    file, name = out / "packed-00001.safetensors", f"{LAYER}mlp.down_proj.0.order"
    tensors = load_file(file)
    tensors[name] = np.ascontiguousarray(damage(tensors[name]))
    save_file(tensors, file, load_checkpoint(out).packed.metadata)  # type: ignore[union-attr]
    checkpoint = load_checkpoint(out)
    with pytest.raises(ModelLoadError, match=rf"mlp\.down_proj cannot be used.*{words}"):
        Decoder(checkpoint.config, checkpoint.tensors, CpuOps("file"), 32)


def test_groups_of_different_sizes_become_8_bit_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantised(tmp_path / "tiny", "gptq-act")
    index = torch.randperm(128, generator=torch.Generator().manual_seed(1)) // 40
    change(tmp_path / "tiny", model__layers__0__mlp__down_proj__g_idx=index.int())
    checkpoint = load_checkpoint(tmp_path / "tiny")
    with caplog.at_level(logging.INFO):
        tensors = TensorReader(checkpoint.tensors, checkpoint.config, Packer("file"))
        parts = DecoderReader(tensors).layer(0).down.parts
        tensors.log_rounding()
    assert [(part.format, part.order) for part in parts] == [("Q8_0", None)]
    assert "rounded to Q8_0: 1 tensors of GPTQ 4-bit, groups of 32" in caplog.text
