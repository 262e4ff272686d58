"""Bytes and operations of a forward, counted anew from tensors and row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.memory_needs import bytes_per_block
from paceline.models.shapes import Experts
from paceline.profiling import machine
from paceline.profiling.machine import Work, measure_roofs
from tests.toy import TOY, toy_tensors

MATRICES = sum(t.numel() for t in toy_tensors().values() if t.dim() == 2)
"""The embedding among them, which is the head too."""


def test_weights_are_those_of_the_tensors() -> None:
    work = Work.of(TOY, "float32", "bfloat16")
    assert work.weights == MATRICES
    assert work.weight_bytes == 4 * MATRICES
    assert Work.of(TOY, "int8", "float32").weight_bytes == MATRICES * 34 // 32
    assert Work.of(TOY, "file", "float32", 12345).weight_bytes == 12345
    kv = TOY.num_layers * 2 * TOY.num_kv_heads * TOY.head_dim * 2
    assert work.bytes_read(3, 10) == 4 * MATRICES + 13 * kv


def test_a_head_in_8_bits_has_a_scale_for_each_group() -> None:
    wide = replace(TOY, head_dim=80)  # three groups of 32
    per_head = 80 + 3 * 2
    assert Work.of(wide, "int8", "int8").kv_bytes == 2 * TOY.num_kv_heads * per_head
    block = 16 * TOY.num_layers * 2 * TOY.num_kv_heads * per_head
    assert bytes_per_block(wide, "int8") == block


@pytest.mark.parametrize("window", [0, 6])
def test_operations_row_by_row(window: int) -> None:
    config = TOY.with_traits(
        {
            "attention.sliding_window": window,
            "attention.sliding_layers": (True, False) if window else (),
        }
    )
    work = Work.of(config, "float32", "float32")
    width, context = 5, 4
    expected = 2 * MATRICES * width
    for layer in range(config.num_layers):
        for row in range(width):
            keys = list(range(context + row + 1))
            if config.attention.is_sliding(layer):
                keys = [p for p in keys if context + row - p < window]
            # A dot product with each key, and each value weighed and added.
            expected += len(keys) * config.num_heads * config.head_dim * 4
    assert work.operations(width, context) == expected


def test_of_a_mixture_the_experts_that_were_chosen_count() -> None:
    """Two of eight experts a row; three rows may read from two experts of a layer to six."""
    mixture = TOY.with_traits({"mlp.experts": Experts(8, 2, 24)})
    work, dense = Work.of(mixture, "float32", "float32"), Work.of(TOY, "float32", "float32")
    kv = dense.bytes_read(3, 10) - dense.weight_bytes
    expert = 3 * TOY.hidden_size * 24
    others = work.weights - TOY.num_layers * 8 * expert
    assert work.bytes_read(3, 10, experts=7) == pytest.approx(4 * (others + 7 * expert) + kv, abs=1)
    assert work.bytes_read(3, 10, TOY.num_layers * 8) == work.weight_bytes + kv
    attended = dense.operations(3, 10) - 2 * dense.weights * 3
    active = others + TOY.num_layers * 2 * expert
    assert work.operations(3, 10) == 2 * active * 3 + attended


def test_a_window_is_read_once() -> None:
    config = TOY.with_traits({"attention.sliding_window": 6})
    work = Work.of(config, "int8", "float32")
    far, farther = work.bytes_read(2, 100), work.bytes_read(2, 200)
    assert far == farther == MATRICES * 34 // 32 + 8 * TOY.num_layers * 2 * TOY.num_kv_heads * 8 * 4


def test_roofs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "GEMM_WIDTH", 64)
    roofs = measure_roofs(ReferenceOps("float32"))
    assert 0.01 < roofs.read_gb_per_s < 1e5
    assert 0.01 < roofs.gflop_per_s < 1e6
