"""What a KV cache holds of a number, in each dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.backends.rows.tensor_memory import DTYPES, TensorKV, decode, encode
from paceline.models.backend import KV_BYTES, KV_GROUP, head_elements
from tests.arrays import assert_close
from tests.toy import TOY

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("kv_dtype", KV_BYTES)
@pytest.mark.parametrize("head_dim", [8, 32, 36, 80, 256])
def test_a_head_takes_what_is_reckoned_with(kv_dtype: str, head_dim: int) -> None:
    held = encode(torch.randn(3, 2, head_dim), DTYPES[kv_dtype])
    assert held.shape == (3, 2, head_elements(head_dim, kv_dtype))
    assert held.element_size() == KV_BYTES[kv_dtype]
    assert decode(held, head_dim).shape == (3, 2, head_dim)


@pytest.mark.parametrize("size", [1e-25, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("head_dim", [10, 64, 80])
def test_int8_is_off_by_half_a_step_at_most(head_dim: int, size: float) -> None:
    x = torch.randn(50, head_dim) * size
    for got, exact in zip(
        decode(encode(x, torch.int8), head_dim).split(KV_GROUP, dim=1),
        x.split(KV_GROUP, dim=1),
        strict=True,
    ):
        step = exact.abs().amax(dim=1, keepdim=True) / 127 * (1 + 2**-7)  # rounded up to bfloat16
        assert ((got - exact).abs() <= 0.501 * step).all()


def test_int8_codes_span_both_signs() -> None:
    codes = encode(torch.tensor([[3.0, -3.0, 0.0] + [1.0] * 29]), torch.int8)[0, :32]
    assert codes[0] == -codes[1] in (126, 127)
    assert codes[2] == 0


def test_int8_zeros_stay_zeros() -> None:
    assert not decode(encode(torch.zeros(2, 40), torch.int8), 40).any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_int8_marks_the_group_of_what_is_not_finite(bad: float) -> None:
    x = torch.ones(2, 70)
    x[1, 33] = bad
    got = decode(encode(x, torch.int8), 70)
    assert got[1, 32:64].isnan().all()
    rest = torch.cat((got[0], got[1, :32], got[1, 64:]))
    assert (rest - 1).abs().max() < 0.01


def test_halves_saturate() -> None:
    x = torch.tensor([65519.0, 65520.0, -1e30, INF, -INF, NAN])
    got = decode(encode(x, torch.float16), 6)
    assert got[:5].tolist() == [65504.0, 65504.0, -65504.0, INF, -INF]
    assert got[5].isnan()


@pytest.mark.parametrize("kv_dtype", KV_BYTES)
def test_filled_slots_hold_the_number(kv_dtype: str) -> None:
    memory = TensorKV(TOY, 2, kv_dtype)
    for value in (1.5, NAN):
        memory.fill(np.array([3, 17]), value)
        got = decode(torch.stack(memory.layers)[:, :, [3, 17]], TOY.head_dim)
        assert_close(got, torch.full_like(got, value), rtol=0.01, atol=0, equal_nan=True)
