"""Block formats decoded in numpy: the values that the format's own package makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from paceline.tensors.quantised_blocks import FORMATS, FP4_VALUES, decode, quantise_q8_0
from tests.backends.block_rows import OWN, random_rows

OF_16 = ("Q2_K", "Q3_K", "Q6_K", "F4_16")
"""Formats that have a scale for 16 inputs; the others have one for 32."""
STORED = [name for name in FORMATS if name not in OWN]


@pytest.mark.parametrize("name", STORED)
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    rows = random_rows(name, 20, 512)
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert np.array_equal(decode(name, rows).floats(), want)


@pytest.mark.parametrize("name", FORMATS)
def test_sizes(name: str) -> None:
    form = FORMATS[name]
    decoded = decode(name, random_rows(name, 3, 512))
    assert decoded.codes.shape == (3, 512)
    assert decoded.scales.shape == (3, 512 // (16 if name in OF_16 else 32))
    assert decoded.minima is None or decoded.minima.shape == decoded.scales.shape
    assert -128 <= decoded.codes.min() <= decoded.codes.max() <= 127
    if name not in OWN:
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert sizes == (form.inputs, form.num_bytes)


@pytest.mark.parametrize("name", sorted(set(OWN) - {"F4_16"}))
def test_formats_with_float_scales(name: str) -> None:
    """A scale times a nibble or byte less its block's zero point, or times a signed byte."""
    form, rows = FORMATS[name], random_rows(name, 2, 256)
    blocks = rows.reshape(2, -1, form.num_bytes)
    scale = np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    if name.startswith("C"):
        want = scale * blocks[..., 4:].view(np.int8)
    else:
        codes = blocks[..., 5:]
        if name.startswith("Z4"):
            nibbles = codes.reshape(2, -1, form.inputs // 32, 1, 16)
            codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=3)
        zero = blocks[..., 4:5].astype(np.float32)
        want = scale * (codes.reshape(2, -1, form.inputs) - zero)
    assert np.array_equal(decode(name, rows).floats(), want.reshape(2, 256))


def test_four_bit_floats_with_a_scale_for_16_inputs() -> None:
    blocks = random_rows("F4_16", 2, 256).reshape(2, 8, 24)
    scale = np.ascontiguousarray(blocks[..., :8]).view(np.float32)
    values = np.array(FP4_VALUES, np.float32)[
        np.stack((blocks[..., 8:] & 15, blocks[..., 8:] >> 4), 2)
    ]
    want = (scale[..., None] * values).reshape(2, 256)
    assert np.array_equal(decode("F4_16", blocks.reshape(2, -1)).floats(), want)


def test_rounding_to_8_bits_is_to_the_nearest() -> None:
    weights = np.random.default_rng(0).standard_normal((7, 100)).astype(np.float32)
    weights[3] = 0.0
    found = decode("Q8_0", quantise_q8_0(weights)).floats()
    assert found.shape == (7, 128)
    assert not found[:, 100:].any()
    assert not found[3].any()
    padded = np.pad(weights, ((0, 0), (0, 28))).reshape(7, 4, 32)
    step = np.abs(padded).max(axis=2, keepdims=True) / 127
    assert (np.abs(found.reshape(7, 4, 32) - padded) <= 0.501 * step * 1.001).all()
