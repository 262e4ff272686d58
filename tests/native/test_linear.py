"""Packed int8 and 4-bit linears against numpy, at every level that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import paceline._native as native

TILE, GROUP, MULTIPLE, SCALE_GROUP = 16, 32, 64, 128
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 25, 64)


@pytest.fixture(params=native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.num_threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and a scale for each row of x."""
    scale = np.maximum(np.abs(x).max(axis=1) / np.float32(127), np.float32(1e-30))
    return np.rint(x / scale[:, None]).astype(np.int8), scale


def int8_linear(n: int, k: int, bias: bool = False, seed: int = 1) -> native.Int8Linear:
    data, scale = native.pack_int8(normal(n, k, seed=seed))
    return native.Int8Linear(data, scale, normal(n, seed=seed + 1) if bias else None, n, k)


def int4_linear(n: int, k: int, bias: bool = False, seed: int = 1) -> native.Int4Linear:
    data = native.pack_int4(normal(n, k, seed=seed))
    return native.Int4Linear(data, normal(n, seed=seed + 1) if bias else None, n, k)


SHAPES = ((1, 1), (16, 64), (17, 65), (40, 130), (100, 300), (33, 1024), (20, 1400))


# --- 8 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_packing_is_the_reference_quantisation(n: int, k: int) -> None:
    weight = normal(n, k)
    weight[0] = 0
    q, scale = quantised(weight)
    data, packed_scale = native.pack_int8(weight)
    assert (native.unpack_int8(data, n, k) == q).all()
    assert (packed_scale[:n] == scale).all()
    assert (native.pack_int8_rows(q) == data).all()
    tiles, padded = -(-n // TILE), -(-k // MULTIPLE) * MULTIPLE
    want = np.zeros((tiles * TILE, padded), np.int8)
    want[:n, :k] = q
    layout = want.reshape(tiles, TILE, padded // 4, 4).transpose(0, 2, 1, 3)
    assert (data == layout.reshape(-1)).all()


def exact_groups(x: np.ndarray, q: np.ndarray, level: str) -> np.ndarray:
    """Exact products within 128 inputs, added in ascending order: fused, where the level can."""
    wide = np.float32 if level in ("sse2", "plain") else np.longdouble
    total = np.zeros((len(x), len(q)), np.float32)
    for at in range(0, x.shape[1], SCALE_GROUP):
        a, scale = quantised(x[:, at : at + SCALE_GROUP])
        product = a.astype(np.int64) @ q[:, at : at + SCALE_GROUP].T.astype(np.int64)
        total = (product.astype(wide) * scale[:, None].astype(wide) + total).astype(np.float32)
    return total


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="sums are rounded twice here")
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_is_bitwise_the_exact_product(n: int, k: int, threads: int, isa: str) -> None:
    q, scale = quantised(normal(n, k, seed=1))
    bias = normal(n, seed=2)
    linear = int8_linear(n, k, bias=True)
    assert (linear.n, linear.k) == (n, k)
    for rows in ROWS:
        x = normal(rows, k, seed=rows)
        want = exact_groups(x, q, isa) * scale + bias
        assert (linear.linear(x) == want).all(), rows


@pytest.mark.parametrize("sign", [1, -1])
def test_int8_extremes_do_not_saturate(sign: int) -> None:
    n, k = 32, 2048
    q = np.full((n, k), 127, np.int8)
    q[1], q[2, ::2] = -127, -127
    linear = native.Int8Linear(native.pack_int8_rows(q), np.ones(n, np.float32), None, n, k)
    x = np.full((9, k), sign * 127, np.float32)
    x[3], x[4, ::2] = -x[3], 0
    want = x.astype(np.int64) @ q.T.astype(np.int64)
    assert (linear.linear(x) == want.astype(np.float32)).all()


# --- 4 bits --------------------------------------------------------------------------------------


def q4_0_blocks(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random Q4_0 blocks and the weights that they stand for."""
    rng = np.random.default_rng(seed)
    scale = rng.standard_normal((n, k // GROUP)).astype(np.float16)
    nibbles = rng.integers(0, 16, (n, k // GROUP, GROUP), dtype=np.uint8)
    low, high = nibbles[..., :16], nibbles[..., 16:]
    blocks = np.concatenate([scale[..., None].view(np.uint8), low | high << 4], axis=-1)
    weight = (nibbles.astype(np.float32) - 8) * scale[..., None].astype(np.float32)
    return blocks.reshape(n, -1), weight.reshape(n, k)


@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (17, 96), (40, 1056)])
def test_q4_0_blocks_keep_their_values(n: int, k: int) -> None:
    blocks, weight = q4_0_blocks(n, k)
    assert (native.unpack_int4(native.pack_q4_0(blocks), n, k) == weight).all()


@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (17, 96), (40, 1056), (100, 320)])
def test_int4_product(n: int, k: int, threads: int) -> None:
    blocks, weight = q4_0_blocks(n, k)
    bias = normal(n, seed=2)
    linear = native.Int4Linear(native.pack_q4_0(blocks), bias, n, k)
    for rows in ROWS:
        x = normal(rows, k, seed=rows)
        a = dequantised(x)
        want = a @ weight.T.astype(np.float64) + bias
        size = np.abs(a) @ np.abs(weight.T.astype(np.float64)) + 1
        assert (np.abs(linear.linear(x) - want) < 1e-5 * size).all(), rows


def test_int4_extremes_do_not_saturate() -> None:
    n, k = 16, 256
    blocks, _ = q4_0_blocks(n, k)
    blocks = blocks.reshape(n, k // GROUP, -1)
    blocks[..., :2] = np.array([1], np.float16).view(np.uint8)
    blocks[:8, :, 2:], blocks[8:, :, 2:] = 0xFF, 0
    linear = native.Int4Linear(native.pack_q4_0(blocks.reshape(n, -1)), None, n, k)
    x = np.full((20, k), 127, np.float32)
    x[1::2] = -127
    want = np.sign(x[:, :1]) * 7 * 127 * k * np.repeat([1, -8 / 7], 8)
    for rows in (2, 20):
        assert (linear.linear(x[:rows]) == want[:rows].astype(np.float32)).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int4_packing_is_close_and_in_the_layout(n: int, k: int) -> None:
    weight = normal(n, k)
    weight[0, :GROUP] = 0
    data = native.pack_int4(weight)
    got = native.unpack_int4(data, n, k)
    assert (got[0, :GROUP] == 0).all()
    padded = -(-k // MULTIPLE) * MULTIPLE
    groups = data.reshape(-1, padded // GROUP, 288)
    empty = groups[:, -(-k // GROUP) :]
    assert (empty[..., :32] == 0).all()
    assert (empty[..., 32:] == 0x88).all()
    # At least as good as the plain rule: the signed largest magnitude at -8.
    assert np.square(got - weight).sum() <= np.square(plain_q4(weight) - weight).sum()


def plain_q4(weight: np.ndarray) -> np.ndarray:
    n, k = weight.shape
    x = np.pad(weight, ((0, 0), (0, -k % GROUP))).reshape(n, -1, GROUP)
    most = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    d = (most / -8).astype(np.float16).astype(np.float32)
    code = np.clip(np.rint(x / np.where(d == 0, 1, d)), -8, 7)
    return (code * d).reshape(n, -1)[:, :k]


def test_int4_packing_beats_the_plain_rule_clearly() -> None:
    weight = normal(64, 2048)
    errors = [
        np.square(each - weight).mean()
        for each in (native.unpack_int4(native.pack_int4(weight), 64, 2048), plain_q4(weight))
    ]
    assert errors[0] < 0.92 * errors[1]


def test_int4_packing_repeats_what_can_be_stored() -> None:
    rng = np.random.default_rng(0)
    code = rng.integers(-8, 8, (4, 4, GROUP))
    code[..., 0] = -8
    scale = np.float32(2.0) ** rng.integers(-6, 3, (4, 4, 1))
    weight = (code * scale).astype(np.float32).reshape(4, -1)
    assert (native.unpack_int4(native.pack_int4(weight), 4, 4 * GROUP) == weight).all()


# --- both ----------------------------------------------------------------------------------------


def dequantised(x: np.ndarray) -> np.ndarray:
    """What the activations stand for once quantised, in float64."""
    parts = [x[:, at : at + SCALE_GROUP] for at in range(0, x.shape[1], SCALE_GROUP)]
    made = [quantised(part) for part in parts]
    return np.concatenate([q * scale[:, None].astype(np.float64) for q, scale in made], axis=1)


@pytest.mark.parametrize("make", [int8_linear, int4_linear])
def test_a_row_does_not_depend_on_the_others(make, threads: int) -> None:  # type: ignore[no-untyped-def]
    linear = make(85, 330, bias=True)
    x = normal(70, 330, seed=9)
    alone = np.concatenate([linear.linear(x[i : i + 1]) for i in range(70)])
    for rows in (*ROWS, 70):
        assert (linear.linear(x[:rows]) == alone[:rows]).all(), rows
    order = np.random.default_rng(0).permutation(70)[:29]
    shuffled = np.ascontiguousarray(x[order])
    assert (linear.linear(shuffled) == alone[order]).all()


@pytest.mark.parametrize("make", [int8_linear, int4_linear])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(make, bad: float) -> None:  # type: ignore[no-untyped-def]
    linear = make(40, 330)
    x = normal(9, 330)
    want = linear.linear(x)
    x[4, 200] = bad
    got = linear.linear(x)
    assert not np.isfinite(got[4]).any()
    rest = np.arange(9) != 4
    assert (got[rest] == want[rest]).all()


def test_more_inputs_than_blocks_of_rows_share_something_of() -> None:
    n, k = 17, 257 * SCALE_GROUP
    linear, x = int8_linear(n, k), normal(13, k, seed=5)
    alone = np.concatenate([linear.linear(x[i : i + 1]) for i in range(13)])
    assert (linear.linear(x) == alone).all()


@pytest.mark.parametrize("make", [int8_linear, int4_linear])
def test_no_rows(make) -> None:  # type: ignore[no-untyped-def]
    assert make(40, 64).linear(np.zeros((0, 64), np.float32)).shape == (0, 40)


def test_arrays_may_be_read_only_and_unaligned_and_are_kept_alive() -> None:
    data, scale = native.pack_int8(normal(40, 130, seed=1))
    want = native.Int8Linear(data, scale, None, 40, 130)
    shifted = np.zeros(data.size + 3, np.int8)[3:]
    shifted[:] = data
    shifted.flags.writeable = False
    linear = native.Int8Linear(shifted, scale, None, 40, 130)
    del shifted
    x = normal(5, 130)
    assert (linear.linear(x) == want.linear(x)).all()
    assert linear.nbytes == data.nbytes + scale.nbytes


def test_sizes_are_checked() -> None:
    data, scale = native.pack_int8(normal(16, 64))
    four = native.pack_int4(normal(16, 64))
    bias = np.zeros(16, np.float32)
    for refused in (
        lambda: native.Int8Linear(data[:-1], scale, None, 16, 64),
        lambda: native.Int8Linear(data, scale[:-1], None, 16, 64),
        lambda: native.Int8Linear(data, scale, bias[:-1], 16, 64),
        lambda: native.Int8Linear(data, scale, None, 17, 64),
        lambda: native.Int8Linear(data, scale, None, 0, 64),
        lambda: native.Int8Linear(data, scale, None, 16, -(1 << 40)),
        lambda: native.Int8Linear(data, scale, None, 1 << 40, 1 << 40),
        lambda: native.Int4Linear(four[:-1], None, 16, 64),
        lambda: native.Int4Linear(four, bias[:-1], 16, 64),
        lambda: native.Int4Linear(four, None, 16, 65),
        lambda: native.Int8Linear(data, scale, bias, 16, 64).linear(np.zeros((2, 63), np.float32)),
        lambda: native.pack_int8(np.full((2, 8), np.nan, np.float32)),
        lambda: native.pack_int4(np.full((2, 8), -np.inf, np.float32)),
        lambda: native.pack_int8_rows(np.full((2, 8), -128, np.int8)),
        lambda: native.pack_q4_0(np.full((2, 18), 0xFF, np.uint8)),
        lambda: native.pack_q4_0(np.zeros((2, 17), np.uint8)),
        lambda: native.unpack_int8(data, 16, 65),
        lambda: native.unpack_int4(four, 33, 64),
    ):
        with pytest.raises(ValueError, match=r"\d|not finite|quantised|NaN"):
            refused()
    with pytest.raises(TypeError):
        native.Int8Linear(scale, scale, None, 16, 64)


def test_bandwidth_is_a_rate(threads: int) -> None:
    assert 0.1 < native.bandwidth(8) < 1e5
