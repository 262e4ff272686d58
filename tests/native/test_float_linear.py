"""Packed linears of float weights against exact products, at every level that this CPU has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline._native as native

pytestmark = pytest.mark.usefixtures("isa")
TYPES = ("F32", "F16", "BF16", "F8_128")
FP8 = "F8_128"
SHAPES = ((1, 1), (16, 16), (17, 31), (40, 130), (33, 1024), (150, 321))
SCALE_INPUTS = 128
NAN_CODES = (0x7F, 0xFF)  # of FP8


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def values_of(code: np.ndarray, name: str) -> np.ndarray:
    """What stored weights stand for, in float64 and so exactly."""
    if name == "F32":
        return code.astype(np.float64)
    if name == "F16":
        return code.view(np.float16).astype(np.float64)
    if name == "BF16":
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            return (code.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    bits = code.astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(bits & 128, -1, 1) * np.where(bits & 127 == 127, np.nan, size)


def codes(weight: np.ndarray, name: str) -> np.ndarray:
    """Stored weights close to these float32 values; any finite ones for FP8."""
    if name == "F32":
        return weight
    if name == "F16":
        return weight.astype(np.float16).view(np.uint16)
    if name == "BF16":
        return (weight.view(np.uint32) >> 16).astype(np.uint16)
    code = (weight.view(np.uint32) >> 13 & 255).astype(np.uint8)
    code[np.isin(code, NAN_CODES)] = 0x55
    return code


@dataclass
class Case:
    """A linear, and the float64 weights and biases that it stands for."""

    linear: native.Linear
    weight: np.ndarray
    bias: np.ndarray


def case(name: str, n: int, k: int, seed: int = 1) -> Case:
    code, bias = codes(normal(n, k, seed=seed), name), normal(n, seed=seed + 1)
    weight, scale = values_of(code, name), None
    if name == FP8:
        scale = np.exp(normal(n, -(-k // SCALE_INPUTS), seed=seed + 2))
        weight = weight * np.repeat(scale, SCALE_INPUTS, axis=1)[:, :k]
    return Case(linear_of(code, name, scale, bias), weight, bias)


def rows_of(code: np.ndarray, name: str, scale: np.ndarray | None = None) -> np.ndarray:
    """Stored weights as bytes; FP8 in blocks of a float32 scale and 128 codes."""
    if name != FP8:
        return np.ascontiguousarray(code).view(np.uint8)
    n, k = code.shape
    units = -(-k // SCALE_INPUTS)
    scale = np.ones((n, units), np.float32) if scale is None else scale
    padded = np.pad(code, ((0, 0), (0, units * SCALE_INPUTS - k))).reshape(n, units, -1)
    return np.concatenate((scale[..., None].view(np.uint8), padded), axis=2).reshape(n, -1)


def packed(code: np.ndarray, name: str, scale: np.ndarray | None = None) -> np.ndarray:
    found: np.ndarray = native.pack(name, rows_of(code, name, scale), code.shape[1])
    return found


def linear_of(
    code: np.ndarray, name: str, scale: np.ndarray | None = None, bias: np.ndarray | None = None
) -> native.Linear:
    n, k = code.shape
    return native.Linear([(name, packed(code, name, scale), n)], bias, k)


def plain(code: np.ndarray, name: str) -> native.Linear:
    """A linear of these stored weights alone."""
    return linear_of(code, name)


def assert_close(got: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> None:
    """Within a few roundings to float32 of the sum of magnitudes."""
    wide = x.astype(np.float64)
    size = np.abs(wide) @ np.abs(weight).T + np.abs(bias)
    assert (np.abs(got - (wide @ weight.T + bias)) <= 6 * 2.0**-23 * size).all()


# --- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packing_is_the_layout_bit_by_bit(name: str, n: int, k: int) -> None:
    code = codes(normal(n, k), name)
    tiles, padded = -(-n // 16), -(-k // 16) * 16
    want = np.zeros((tiles * 16, padded), code.dtype)
    want[:n, :k] = code
    data = packed(code, name)
    layout = want.reshape(tiles, 16, padded).transpose(0, 2, 1).reshape(tiles, -1).copy()
    found = data.reshape(tiles, -1)
    assert (found[:, : padded * 16 * code.itemsize] == layout.view(np.uint8)).all()
    slices = [packed(code[at : at + 16], name) for at in range(0, n, 16)]
    assert (np.concatenate(slices) == data).all()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gather_gives_the_weights_back(name: str, n: int, k: int) -> None:
    made = case(name, n, k)
    ids = np.random.default_rng(0).integers(0, n, 5, dtype=np.int32)
    want = made.weight[ids].astype(np.float32) * np.float32(1.5)
    assert (made.linear.rows(ids, 1.5) == want).all()


def test_every_code_is_converted_exactly() -> None:
    half = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    eight = np.arange(1 << 8, dtype=np.uint8).reshape(16, 16)
    for name, code in (("F16", half), ("BF16", half), (FP8, eight)):
        linear, n = plain(code, name), len(code)
        want = values_of(code, name)
        np.testing.assert_array_equal(linear.rows(np.arange(n, dtype=np.int32), 1.0), want)
        one = np.eye(code.shape[1], dtype=np.float32)
        for at in (0, 7, 15):  # by a product as well, where nothing else is NaN or infinite
            column = np.ascontiguousarray(code[:, at : at + 1])
            got = plain(column, name).linear(one[:1, :1])
            np.testing.assert_array_equal(got[0], want[:, at])


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_product_is_that_of_the_stored_weights(name: str, n: int, k: int) -> None:
    made = case(name, n, k)
    assert (made.linear.n, made.linear.k) == (n, k)
    for rows in (1, 2, 3, 5, 8, 13, 24, 40):
        x = normal(rows, k, seed=rows)
        assert_close(made.linear.linear(x), x, made.weight, made.bias)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(TYPES),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    rows=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_shape(name: str, n: int, k: int, rows: int, seed: int) -> None:
    made, x = case(name, n, k, seed), normal(rows, k, seed=seed)
    got = made.linear.linear(x)
    assert_close(got, x, made.weight, made.bias)
    assert (made.linear.linear(x[-1:]) == got[-1:]).all()


@pytest.mark.parametrize("name", TYPES)
def test_a_row_does_not_depend_on_the_others_or_the_threads(name: str, threads: int) -> None:
    # 85 outputs are 6 tiles: threads take them in pieces of 2, of 1, and of 1.
    linear, x = case(name, 85, 331).linear, normal(70, 331, seed=9)
    native.set_threads(1)
    alone = np.concatenate([linear.linear(x[i : i + 1]) for i in range(70)])
    native.set_threads(threads)
    for rows in (*range(1, 41), 64, 70):
        assert (linear.linear(x[:rows]) == alone[:rows]).all(), rows
    order = np.random.default_rng(0).permutation(70)[:29]
    assert (linear.linear(np.ascontiguousarray(x[order])) == alone[order]).all()


@pytest.mark.parametrize("name", TYPES)
def test_an_output_does_not_depend_on_the_others(name: str) -> None:
    code, x = codes(normal(100, 200), name), normal(14, 200, seed=3)
    whole = plain(code, name).linear(x)
    for first, last in ((0, 16), (16, 17), (32, 80), (48, 100)):
        part = plain(np.ascontiguousarray(code[first:last]), name).linear(x)
        assert (part == whole[:, first:last]).all()


@pytest.mark.parametrize("name", TYPES)
def test_extreme_weights(name: str) -> None:
    largest = {"F32": 3e38, "F16": 65504, "BF16": 3e38, FP8: 448}[name]
    least = {"F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133, FP8: 2.0**-9}[name]
    if name == FP8:
        code = np.array([[0x7E, 1], [0xFE, 0x81]], np.uint8)
    else:
        code = codes(np.array([[largest, least], [-largest, -least]], np.float32), name)
    weight = values_of(code, name)
    assert abs(weight[0, 1]) == least
    assert abs(weight[0, 0] / largest - 1) < 0.01
    linear = plain(code, name)
    for rows in (1, 14):
        large = np.tile(np.array([[1, 0]], np.float32), (rows, 1))
        small = np.tile(np.array([[0, 1]], np.float32), (rows, 1))
        assert (linear.linear(large) == weight[:, 0]).all()
        assert (linear.linear(small) == weight[:, 1]).all()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_input_that_is_not_finite_stays_in_its_row(name: str, bad: float) -> None:
    linear, x = case(name, 40, 330).linear, normal(17, 330)
    want = linear.linear(x)
    x[4, 200] = bad
    got = linear.linear(x)
    assert not np.isfinite(got[4]).any()
    rest = np.arange(17) != 4
    assert (got[rest] == want[rest]).all()


@pytest.mark.parametrize("name", TYPES)
def test_a_weight_that_is_not_finite_stays_in_its_output(name: str) -> None:
    code, x = codes(normal(40, 130), name), normal(17, 130)
    want = plain(code, name).linear(x)
    for bad in NAN_CODES if name == FP8 else (np.nan, np.inf, -np.inf):
        changed = code.copy()
        changed[21, 77] = (
            bad if name == FP8 else codes(np.full((1, 1), bad, np.float32), name)[0, 0]
        )
        for rows in (1, 17):
            got = plain(changed, name).linear(x[:rows])
            assert not np.isfinite(got[:, 21]).any()
            rest = np.arange(40) != 21
            assert (got[:, rest] == want[:rows, rest]).all()


# --- the class -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_no_rows(name: str) -> None:
    assert case(name, 40, 64).linear.linear(np.zeros((0, 64), np.float32)).shape == (0, 40)


def test_blocks_and_floats_may_follow_each_other() -> None:
    code, blocks = codes(normal(40, 128), "F16"), native.quantise("Q8_0", normal(24, 128))
    parts = [("F16", packed(code, "F16"), 40), ("Q8_0", native.pack("Q8_0", blocks, 128), 24)]
    x = normal(5, 128)
    alone = [native.Linear([part], None, 128).linear(x) for part in parts]
    got = native.Linear(parts, None, 128).linear(x)
    assert np.array_equal(got, np.concatenate(alone, axis=1))
