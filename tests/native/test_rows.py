"""The row kernels against torch and numpy, at every level, odd sizes and non-finite rows included.

Row independence is bitwise: any selection of rows gives each of them the bits it has in the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import paceline._native as native
from paceline.backends.rows.reference import ACTIVATIONS, ReferenceOps, activation_of
from paceline.backends.rows.tensor_memory import DTYPES, encode
from paceline.models.backend import head_elements

pytestmark = pytest.mark.usefixtures("isa")
WIDTHS = [1, 15, 16, 17, 40, 63, 64, 65, 100, 128, 300, 1024]
REFERENCE = ReferenceOps("float32", deterministic=False)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, shape).astype(np.float32)


def with_bad_values(x: np.ndarray) -> np.ndarray:
    """A copy whose row 1 has a NaN, row 2 an inf and row 3 a -inf."""
    bad = x.copy()
    for row, value in ((1, np.nan), (2, np.inf), (3, -np.inf)):
        bad[row, (row * 5) % x.shape[1]] = value
    return bad


# --- quantising -----------------------------------------------------------------------------------


def rows_to_quantise(k: int) -> np.ndarray:
    x = normal(6, k, seed=k)
    x[1] *= 1e-34  # below the least scale
    x[2] = 0.0
    x[3] *= np.float32(1e36)
    scale = np.float32(0.37)  # products that lie on a half, or all but
    x[4] = np.round(x[4] * 20) / 2 * scale
    x[4, 0] = 127 * scale
    return x


def reference_quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tensor = torch.from_numpy(x)
    scale = tensor.abs().amax(dim=1, keepdim=True).div_(127.0).clamp_min_(1e-30)
    return torch.round(tensor * (1.0 / scale)).to(torch.int8).numpy(), scale.numpy()


@pytest.mark.parametrize("k", WIDTHS)
def test_quantize_has_a_scale_per_32_inputs(k: int) -> None:
    x = rows_to_quantise(k)
    q, scale, scaled_sum = native.quantize(x)
    stride = -(-k // 32) * 32
    assert q.shape == (6, stride)
    assert scale.shape == scaled_sum.shape == (6, stride // 32)
    for group in range(-(-k // 32)):
        part = slice(32 * group, min(k, 32 * group + 32))
        expected_q, expected_scale = reference_quantize(np.ascontiguousarray(x[:, part]))
        np.testing.assert_array_equal(q[:, part], expected_q)
        np.testing.assert_array_equal(scale[:, group : group + 1], expected_scale)
    np.testing.assert_array_equal(q[:, k:], 0)
    sums = q.reshape(6, -1, 32).sum(axis=2, dtype=np.int32).astype(np.float32)
    np.testing.assert_array_equal(scaled_sum, scale * sums)


@pytest.mark.parametrize("k", [5, 64, 300])
def test_quantize_marks_non_finite_rows(k: int) -> None:
    x = normal(5, k)
    bad = with_bad_values(x)
    good, marked = native.quantize(x), native.quantize(bad)
    for expected, got in zip(good, marked, strict=True):
        np.testing.assert_array_equal(got[[0, 4]], expected[[0, 4]])
    assert np.isnan(marked[1][1:4]).any(axis=1).all()


def test_quantize_never_exceeds_127() -> None:
    bits = np.random.default_rng(3).integers(0x0DA24260, 0x7F800000, 4000)
    x = np.repeat(bits.astype(np.uint32).view(np.float32)[:, None], 2, axis=1)
    x[:, 1] *= -1.0
    q = native.quantize(x)[0]
    assert q.max() == 127
    assert q.min() == -127


# --- norms and activations ------------------------------------------------------------------------


@pytest.mark.parametrize("n", WIDTHS)
def test_rms_norm(n: int) -> None:
    x, weight = normal(4, n, seed=n, scale=3.0), normal(n, seed=1)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(native.rms_norm(x, weight, 1e-5), exact, rtol=1e-6)


@pytest.mark.parametrize("n", WIDTHS)
def test_layer_norm(n: int) -> None:
    x, weight, bias = normal(4, n, seed=n, scale=3.0) + 5.0, normal(n, seed=1), normal(n, seed=2)
    away = x.astype(np.float64) - x.astype(np.float64).mean(axis=1, keepdims=True)
    exact = away / np.sqrt((away**2).mean(axis=1, keepdims=True) + 1e-5) * weight + bias
    got = native.layer_norm(x, weight, bias, 1e-5)
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "xielu"])
def test_without_a_gate(width: int, activation: str) -> None:
    x = normal(4, width, seed=width, scale=4.0)
    learnt = np.array([0.7, 1.1, 0.5], np.float32) if activation == "xielu" else None
    function = activation_of(activation, None if learnt is None else torch.from_numpy(learnt))
    exact = function(torch.from_numpy(x).double()).numpy()
    got = native.activate(x, activation, learnt)
    np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(width: int, activation: str) -> None:
    x = normal(4, 2 * width, seed=width, scale=4.0)
    gate, up = torch.from_numpy(x).double().chunk(2, dim=1)
    exact = (ACTIVATIONS[activation](gate) * up).numpy()
    np.testing.assert_allclose(native.gated(x, activation), exact, rtol=2e-6, atol=2e-6)


def test_gated_far_from_zero() -> None:
    gate = np.array([[-1e38, -200.0, -90.0, 90.0, 1e30, np.inf, -np.inf, np.nan]], np.float32)
    x = np.concatenate([gate, np.ones_like(gate)], axis=1)
    for activation in ("silu", "gelu_tanh", "gelu"):
        y = native.gated(x, activation)[0]
        np.testing.assert_allclose(y[:5], [0.0, 0.0, 0.0, 90.0, 1e30], rtol=1e-6, atol=1e-30)
        assert not np.isfinite(y[5:]).any()


def test_relu2_far_from_zero() -> None:
    gate = np.array([[-1e38, -np.inf, -0.0, 3.0, 1e30, np.inf, np.nan]], np.float32)
    y = native.gated(np.concatenate([gate, np.ones_like(gate)], axis=1), "relu2")[0]
    np.testing.assert_array_equal(y, [0, 0, 0, 9, np.inf, np.inf, np.nan])


def test_clamped_swiglu() -> None:
    """Both halves have limits, and no limit hides a NaN."""
    gate = np.array([[-1e38, -3.0, 2.0, 7.5, np.inf, 1.0, 1.0, np.nan, 1.0]], np.float32)
    up = np.array([[1.0, 4.0, -9.0, 9.0, 0.0, np.inf, -np.inf, 1.0, np.nan]], np.float32)
    y = native.gated(np.concatenate([gate, up], axis=1), "clamped_swiglu")[0]
    bounded = np.minimum(gate[0].astype(np.float64), 7.0)
    with np.errstate(over="ignore"):
        want = bounded / (1 + np.exp(-1.702 * bounded)) * (np.clip(up[0], -7.0, 7.0) + 1)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("n", WIDTHS)
def test_softcap(n: int) -> None:
    x = normal(3, n, seed=n, scale=60.0)
    exact = 30.0 * np.tanh(x.astype(np.float64) / 30.0)
    np.testing.assert_allclose(native.softcap(x, 30.0), exact, rtol=5e-7)


ROW_KERNELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rms_norm": lambda x: native.rms_norm(x, normal(x.shape[1], seed=2), 1e-6),
    "layer_norm": lambda x: native.layer_norm(
        x, normal(x.shape[1], seed=2), normal(x.shape[1], seed=3), 1e-6
    ),
    "xielu": lambda x: native.activate(x, "xielu", np.array([0.7, 1.1, 0.5], np.float32)),
    "silu": lambda x: native.gated(x, "silu"),
    "gelu_tanh": lambda x: native.gated(x, "gelu_tanh"),
    "gelu": lambda x: native.gated(x, "gelu"),
    "relu2": lambda x: native.gated(x, "relu2"),
    "clamped_swiglu": lambda x: native.gated(x, "clamped_swiglu"),
    "softcap": lambda x: native.softcap(x, 5.0),
    "quantised": lambda x: native.quantize(x)[0].astype(np.float32),
    "scales": lambda x: native.quantize(x)[1],
}


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_rows_are_independent(name: str) -> None:
    kernel = ROW_KERNELS[name]
    x = with_bad_values(normal(7, 90, scale=2.0))
    whole = kernel(x)
    for rows in ([0], [6, 0, 3], [5, 4, 2, 2], list(range(7))[::-1]):
        np.testing.assert_array_equal(kernel(x[rows]), whole[rows])


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "silu", "gelu_tanh", "gelu", "xielu"])
def test_non_finite_values_stay_visible_in_their_row(name: str) -> None:
    x = with_bad_values(normal(5, 90))
    finite = np.isfinite(ROW_KERNELS[name](x)).all(axis=1)
    np.testing.assert_array_equal(finite, [True, False, False, False, True])


# --- rotary embedding and the cache ---------------------------------------------------------------


KINDS = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # their bits
    "int8": np.int8,
}


def stored(x: np.ndarray, kv: str) -> np.ndarray:
    """The elements of heads as the cache holds them, by the specification."""
    elements = encode(torch.from_numpy(x.copy()), DTYPES[kv])
    return (elements.view(torch.uint16) if kv == "bfloat16" else elements).numpy()


class RotaryCase:
    """Five rows at scattered slots of caches that hold a mark wherever nothing is written."""

    heads, kv_heads, blocks = 4, 2, 3
    slots = np.array([17, 0, 47, 16, 5], np.int32)

    def __init__(self, head_dim: int, rotary_dim: int, norm: bool) -> None:
        rows, angles = len(self.slots), normal(5, rotary_dim // 2, seed=9, scale=3.0)
        self.head_dim, self.padded = head_dim, -(-head_dim // 16) * 16
        self.qkv = normal(rows, (self.heads + 2 * self.kv_heads) * head_dim, seed=head_dim)
        self.cos = np.concatenate([np.cos(angles)] * 2, axis=1)
        self.sin = np.concatenate([-np.sin(angles), np.sin(angles)], axis=1)
        self.norms = [normal(head_dim, seed=s) if norm else None for s in (5, 6)]

    def run(self, kv: str = "float32", rows: list[int] | None = None) -> tuple[np.ndarray, ...]:
        pick = list(range(len(self.slots))) if rows is None else rows
        key, value = head_elements(self.head_dim, kv), head_elements(self.padded, kv)
        k = np.full((self.blocks, self.kv_heads, key, 16), 7, KINDS[kv])
        v = np.full((self.blocks, self.kv_heads, 16, value), 7, KINDS[kv])
        tables = self.cos[pick], self.sin[pick]
        q = native.rotary_kv(
            self.qkv[pick], *tables, *self.norms, 1e-5, k, v, np.ascontiguousarray(self.slots[pick])
        )
        return q, k, v

    def reference(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x = torch.from_numpy(self.qkv).view(len(self.slots), -1, self.head_dim)
        parts = list(x.split([self.heads, self.kv_heads, self.kv_heads], dim=1))
        tables = [torch.from_numpy(t)[:, None] for t in (self.cos, self.sin)]
        for i, norm in enumerate(self.norms):
            if norm is not None:
                parts[i] = F.rms_norm(parts[i], (self.head_dim,), torch.from_numpy(norm), 1e-5)
            parts[i] = REFERENCE.rotary(parts[i], *tables)
        return parts[0].numpy(), parts[1].numpy(), parts[2].numpy()


SHAPES = [(8, 8), (16, 16), (24, 10), (64, 64), (80, 20), (128, 128), (256, 256)]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SHAPES)
def test_rotary_kv(head_dim: int, rotary_dim: int, norm: bool) -> None:
    case = RotaryCase(head_dim, rotary_dim, norm)
    q, k, v = case.run()
    expected_q, expected_k, expected_v = case.reference()
    np.testing.assert_allclose(q, expected_q, rtol=1e-5, atol=1e-6)
    block, lane = case.slots // 16, case.slots % 16
    np.testing.assert_allclose(k[block, :, :, lane], expected_k, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(v[block, :, lane, :head_dim], expected_v)
    np.testing.assert_array_equal(v[block, :, lane, head_dim:], 0.0)
    k[block, :, :, lane] = 7  # and nothing else was touched
    v[block, :, lane] = 7
    assert (k == 7).all()
    assert (v == 7).all()


def assert_same_numbers(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, but that one NaN is as good as another."""
    if got.dtype == np.uint16:
        got, expected = (x.astype(np.uint32) << 16 for x in (got, expected))
        got, expected = got.view(np.float32), expected.view(np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kv", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SHAPES)
def test_the_cache_holds_the_floats_as_specified(head_dim: int, rotary_dim: int, kv: str) -> None:
    """Halves, ties, what no half can hold, all zeros, NaN and inf."""
    case = RotaryCase(head_dim, rotary_dim, norm=True)
    case.qkv[0, -1] = np.nan
    case.qkv[1, -1] = -np.inf
    case.qkv[2, -8:] = [65504, 65519, 65520, -1e30, 2**-24, 3 * 2**-25, -(2**-25), 2**-14]
    case.qkv[3, -head_dim:] = 0
    q, k, v = case.run()
    got_q, got_k, got_v = case.run(kv)
    block, lane = case.slots // 16, case.slots % 16
    np.testing.assert_array_equal(got_q, q)
    assert_same_numbers(got_k[block, :, :, lane], stored(k[block, :, :, lane], kv))
    assert_same_numbers(got_v[block, :, lane], stored(v[block, :, lane], kv))
    got_k[block, :, :, lane] = 7  # and nothing else was touched
    got_v[block, :, lane] = 7
    assert (got_k == 7).all()
    assert (got_v == 7).all()


def test_every_half_is_stored_as_itself() -> None:
    """Values that are halves, and such as lie in the middle between two or beside it."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)].astype(np.float32).reshape(-1, 256)
    middle = (finite + np.nextafter(finite.astype(np.float16), np.float16(0))) / 2
    for x in (finite, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)):
        rows = np.concatenate([np.zeros((len(x), 512), np.float32), x.astype(np.float32)], axis=1)
        k = np.zeros((-(-len(x) // 16), 1, 256, 16), np.float16)
        v = np.zeros((len(k), 1, 16, 256), np.float16)
        turn = np.ones((len(x), 2), np.float32), np.zeros((len(x), 2), np.float32)
        slots = np.arange(len(x), dtype=np.int32)
        native.rotary_kv(rows, *turn, None, None, 1e-5, k, v, slots)
        expected = stored(x.astype(np.float32), "float16").view(np.uint16)
        np.testing.assert_array_equal(v.reshape(-1, 256)[: len(x)].view(np.uint16), expected)


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_rotary_kv_rows_are_independent(kv: str) -> None:
    case = RotaryCase(24, 10, norm=True)
    q, k, v = case.run(kv)
    for row, slot in enumerate(case.slots):
        one_q, one_k, one_v = case.run(kv, [row])
        block, lane = slot // 16, slot % 16
        np.testing.assert_array_equal(one_q[0], q[row])
        np.testing.assert_array_equal(one_k[block, :, :, lane], k[block, :, :, lane])
        np.testing.assert_array_equal(one_v[block, :, lane], v[block, :, lane])


def test_a_cache_of_more_than_2_to_the_31_elements() -> None:
    case = RotaryCase(256, 256, norm=False)
    _, k, v = case.run("bfloat16")
    block, lane = case.slots // 16, case.slots % 16
    first = (1 << 31) // (2 * 256 * 16)  # block; pages that nobody touches take no memory
    try:
        far_k = np.zeros((first + 3, 2, 256, 16), np.uint16)
        far_v = np.zeros((first + 3, 2, 16, 256), np.uint16)
    except MemoryError:
        pytest.skip("this machine does not lend that much address space")
    far = (case.slots + 16 * first).astype(np.int32)
    native.rotary_kv(case.qkv, case.cos, case.sin, None, None, 1e-5, far_k, far_v, far)
    np.testing.assert_array_equal(far_k[first + block, :, :, lane], k[block, :, :, lane])
    np.testing.assert_array_equal(far_v[first + block, :, lane], v[block, :, lane])


# --- refusals -------------------------------------------------------------------------------------


def test_wrong_shapes_are_refused() -> None:
    x = normal(2, 6)
    with pytest.raises(ValueError, match="one element for each column"):
        native.rms_norm(x, normal(5), 1e-5)
    with pytest.raises(ValueError, match="even number of columns"):
        native.gated(normal(2, 5), "silu")
    with pytest.raises(ValueError, match="allowed are silu, gelu_tanh, gelu, relu2"):
        native.gated(x, "relu")
    with pytest.raises(ValueError, match="not positive"):
        native.softcap(x, 0.0)
    case = RotaryCase(16, 16, norm=False)
    case.slots = case.slots + 48
    with pytest.raises(ValueError, match="outside the cache"):
        case.run()
