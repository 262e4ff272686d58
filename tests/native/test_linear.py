"""Linears of every block format against the numpy decoding, at every level that this CPU has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline._native as native
from paceline.tensors.quantised_blocks import FORMATS, Decoded, decode, quantise_q8_0, row_bytes
from tests.backends.block_rows import random_rows

pytestmark = pytest.mark.usefixtures("isa")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 25, 37, 64)
SHAPES = ((1, 1), (16, 64), (17, 65), (40, 130), (100, 300), (33, 1024), (20, 1400))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def linear_of(name: str, rows: np.ndarray, k: int, bias: np.ndarray | None = None) -> native.Linear:
    return native.Linear([(name, native.pack(name, rows, k), len(rows))], bias, k)


def int8_linear(n: int, k: int, bias: bool = False) -> native.Linear:
    rows = quantise_q8_0(normal(n, k, seed=1))
    return linear_of("Q8_0", rows, k, normal(n, seed=2) if bias else None)


def all_rows(linear: native.Linear) -> np.ndarray:
    found: np.ndarray = linear.rows(np.arange(linear.n, dtype=np.int32))
    return found


# --- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_the_decoded_ones(name: str) -> None:
    for n, k in ((1, 256), (37, 512), (16, 768)):
        rows = random_rows(name, n, k, seed=n)
        assert np.array_equal(all_rows(linear_of(name, rows, k)), decode(name, rows).floats())


def test_formats_are_those_of_the_table() -> None:
    sizes = {name: (form.inputs, form.num_bytes) for name, form in FORMATS.items()}
    assert native.block_formats() == sizes


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_floats_are_rounded_to_8_bits_as_in_numpy(n: int, k: int) -> None:
    weight = normal(n, k) * np.float32(10.0) ** np.arange(-6, 6)[np.arange(n) % 12, None]
    weight = weight.astype(np.float32)
    weight[0] = 0
    assert np.array_equal(native.quantise("Q8_0", weight), quantise_q8_0(weight))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 65), (40, 1056)])
def test_4_bits_are_close(n: int, k: int) -> None:
    weight = normal(n, k)
    got = decode("Q4_0", native.quantise("Q4_0", weight)).floats()
    assert not got[:, k:].any()
    error = np.square(got[:, :k] - weight).sum() / np.square(weight).sum()
    assert error < 0.0095


def test_4_bits_beat_the_plain_rule_clearly() -> None:
    weight = normal(64, 1024)
    groups = weight.reshape(64, -1, 32)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / 7
    plain = np.square(np.rint(groups / scale) * scale - groups).mean()
    got = decode("Q4_0", native.quantise("Q4_0", weight)).floats()
    assert np.square(got - weight).mean() < 0.8 * plain


def test_4_bits_repeat_what_can_be_stored() -> None:
    rng = np.random.default_rng(5)
    code = rng.integers(-8, 8, (4, 4, 32))
    code[..., 0] = -8
    scale = np.float32(2.0) ** rng.integers(-6, 3, (4, 4, 1))
    weight = (code * scale).astype(np.float32).reshape(4, -1)
    assert np.array_equal(decode("Q4_0", native.quantise("Q4_0", weight)).floats(), weight)


FEW_BITS = {"Q3_K": 0.03, "Q2_K": 0.09}
"""Squared error that is allowed, over the squares of normal weights."""


@pytest.mark.parametrize(("n", "k"), [(1, 16), (17, 80), (40, 1056)])
@pytest.mark.parametrize("name", FEW_BITS)
def test_few_bits_are_close(name: str, n: int, k: int) -> None:
    weight = normal(n, k)
    got = decode(name, native.quantise(name, weight)).floats()
    error = np.square(got[:, :k] - weight).sum() / np.square(weight).sum()
    assert 0 < error < FEW_BITS[name]


def test_3_bits_beat_the_plain_rule_clearly() -> None:
    weight = normal(64, 1024)
    groups = weight.reshape(64, -1, 16)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / 3.5
    plain = np.square(np.clip(np.rint(groups / scale), -4, 3) * scale - groups).mean()
    got = decode("Q3_K", native.quantise("Q3_K", weight)).floats()
    assert np.square(got - weight).mean() < 0.8 * plain


def test_2_bits_beat_the_plain_rule_clearly() -> None:
    weight = normal(64, 1024)
    groups = weight.reshape(64, -1, 16)
    low = np.minimum(groups.min(axis=-1, keepdims=True), 0)
    scale = (groups.max(axis=-1, keepdims=True) - low) / 3
    plain = np.square(np.rint((groups - low) / scale) * scale + low - groups).mean()
    got = decode("Q2_K", native.quantise("Q2_K", weight)).floats()
    assert np.square(got - weight).mean() < 0.8 * plain


def test_3_bits_repeat_what_can_be_stored() -> None:
    rng = np.random.default_rng(5)
    code = rng.integers(-4, 4, (4, 2, 16, 16))
    code[..., 0] = -4
    steps = rng.integers(1, 32, (4, 2, 16, 1))
    steps[:, :, 3] = -32
    weight = (code * steps * np.float32(2.0**-9)).astype(np.float32).reshape(4, -1)
    assert np.array_equal(decode("Q3_K", native.quantise("Q3_K", weight)).floats(), weight)


def test_2_bits_repeat_what_can_be_stored() -> None:
    rng = np.random.default_rng(5)
    code = rng.integers(0, 4, (4, 2, 16, 16))
    code[..., 0], code[..., 1] = 0, 3
    steps, minima = rng.integers(1, 16, (2, 4, 2, 16, 1))
    steps[:, :, 3], minima[:, :, 5] = 15, 15
    weight = ((code * steps - minima) * np.float32(2.0**-6)).astype(np.float32)
    got = decode("Q2_K", native.quantise("Q2_K", weight.reshape(4, -1))).floats()
    assert np.array_equal(got, weight.reshape(4, -1))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", *FEW_BITS])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_not_quantised(name: str, wrong: float) -> None:
    weight = normal(20, 300)
    weight[18, 299] = wrong
    with pytest.raises(ValueError, match="NaN or infinite"):
        native.quantise(name, weight)


# --- products ------------------------------------------------------------------------------------


def program(x: np.ndarray, decoded: Decoded, level: str) -> np.ndarray:
    """The specified arithmetic: groups in ascending order, fused where the level can."""
    fused = level not in ("sse2", "plain")
    groups = decoded.scales.shape[1]
    size = decoded.codes.shape[1] // groups
    q, scale, _ = native.quantize(x)

    def added(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
        if not fused:
            return (a * b).astype(np.float32) + total
        wide = np.longdouble
        return (a.astype(wide) * b.astype(wide) + total.astype(wide)).astype(np.float32)

    total = np.zeros((len(x), len(decoded.codes)), np.float32)
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        own = scale[:, group * size // 32, None]
        exact = q[:, part].astype(np.int64) @ decoded.codes[:, part].T.astype(np.int64)
        total = added(exact.astype(np.float32), own * decoded.scales[:, group], total)
        if decoded.minima is not None:
            inputs = own * q[:, part].sum(axis=1, dtype=np.int32, keepdims=True).astype(np.float32)
            total = added(decoded.minima[:, group] * np.ones_like(inputs), inputs, total)
    return total


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="sums are rounded twice here")
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_bitwise_the_specified_program(name: str, threads: int, isa: str) -> None:
    n, k = 37, 768
    rows, bias = random_rows(name, n, k), normal(n, seed=2)
    linear, decoded = linear_of(name, rows, k, bias), decode(name, rows)
    for count in (1, 2, 5, 8, 13, 25, 70):
        x = normal(count, k, seed=count)
        assert np.array_equal(linear.linear(x), program(x, decoded, isa) + bias), count


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="sums are rounded twice here")
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tails(n: int, k: int, threads: int, isa: str) -> None:
    rows = quantise_q8_0(normal(n, k, seed=1))
    linear, decoded = linear_of("Q8_0", rows, k), decode("Q8_0", rows)
    assert (linear.n, linear.k) == (n, k)
    for count in ROWS:
        x = normal(count, k, seed=count)
        assert np.array_equal(linear.linear(x), program(x, decoded, isa)), count


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_close_to_float64(name: str) -> None:
    rows, x = random_rows(name, 24, 512), normal(5, 512)
    weight = decode(name, rows).floats().astype(np.float64)
    q, scale, _ = native.quantize(x)
    inputs = (q.reshape(5, -1, 32) * scale[..., None].astype(np.float64)).reshape(5, -1)
    got = linear_of(name, rows, 512).linear(x)
    # A minimum and its product cancel, so the bound is on the sizes of what is added.
    bound = 4e-6 * (np.abs(inputs) @ np.abs(weight).T) + 3e-5 * np.abs(got).max()
    assert (np.abs(got - inputs @ weight.T) <= bound).all()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 70), st.integers(1, 5), st.integers(1, 30))
def test_shapes(name: str, n: int, blocks: int, count: int) -> None:
    k = FORMATS[name].inputs * blocks
    rows, x = random_rows(name, n, k, seed=n), normal(count, k, seed=count)
    linear = linear_of(name, rows, k)
    assert np.array_equal(all_rows(linear), decode(name, rows).floats())
    alone = np.concatenate([linear.linear(x[i : i + 1]) for i in range(count)])
    assert np.array_equal(linear.linear(x), alone)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("code", [-128, 127])
def test_extremes_do_not_saturate(code: int, sign: int) -> None:
    """Files may have a code of -128, which quantising never makes."""
    n, k = 32, 2048
    blocks = np.zeros((n, k // 32, 34), np.uint8)
    blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    codes = np.full((n, k // 32, 32), code, np.int8)
    codes[1], codes[2, :, ::2] = -128, -128
    blocks[..., 2:] = codes.view(np.uint8)
    linear = linear_of("Q8_0", blocks.reshape(n, -1), k)
    x = np.full((9, k), sign * 127, np.float32)
    x[3], x[4, ::2] = -x[3], 0
    want = x.astype(np.int64) @ codes.reshape(n, k).T.astype(np.int64)
    assert np.array_equal(linear.linear(x), want.astype(np.float32))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_extreme_codes_of_few_bits(name: str) -> None:
    rows = random_rows(name, 16, 512)
    form = FORMATS[name]
    rows.reshape(16, -1, form.num_bytes)[8:, :, 20:175] = 0xFF
    x = np.full((9, 512), 127.0, np.float32)
    x[1::2] *= -1
    decoded = decode(name, rows)
    want = x.astype(np.float64) @ decoded.floats().T.astype(np.float64)
    got = linear_of(name, rows, 512).linear(x)
    size = 127 * np.abs(decoded.floats()).sum(axis=1)
    assert (np.abs(got - want) <= 1e-5 * size + 1e-3).all()


def test_stacked_linears_of_several_formats(threads: int) -> None:
    k, names, counts = 512, ("Q4_K", "Q6_K", "Q8_0"), (40, 16, 24)
    rows = [random_rows(name, n, k) for name, n in zip(names, counts, strict=True)]
    bias, x = normal(80), normal(19, k)
    parts = [
        (name, native.pack(name, part, k), len(part))
        for name, part in zip(names, rows, strict=True)
    ]
    linear = native.Linear(parts, bias, k)
    alone = [linear_of(name, part, k).linear(x) for name, part in zip(names, rows, strict=True)]
    assert np.array_equal(linear.linear(x), np.concatenate(alone, axis=1) + bias)
    weights = [decode(name, part).floats() for name, part in zip(names, rows, strict=True)]
    assert np.array_equal(all_rows(linear), np.concatenate(weights))


# --- one row alone, and bad input --------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "Q2_K"])
def test_a_row_does_not_depend_on_the_others(name: str, threads: int) -> None:
    linear = linear_of(name, random_rows(name, 85, 512), 512, normal(85))
    x = normal(70, 512, seed=9)
    alone = np.concatenate([linear.linear(x[i : i + 1]) for i in range(70)])
    for rows in (*ROWS, 70):
        assert np.array_equal(linear.linear(x[:rows]), alone[:rows]), rows
    order = np.random.default_rng(0).permutation(70)[:29]
    shuffled = np.ascontiguousarray(x[order])
    assert np.array_equal(linear.linear(shuffled), alone[order])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q3_K"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(name: str, bad: float) -> None:
    linear = linear_of(name, random_rows(name, 40, 512), 512)
    x = normal(9, 512)
    want = linear.linear(x)
    x[4, 200] = bad
    got = linear.linear(x)
    assert not np.isfinite(got[4]).any()
    rest = np.arange(9) != 4
    assert np.array_equal(got[rest], want[rest])


def test_no_rows() -> None:
    assert int8_linear(40, 64).linear(np.zeros((0, 64), np.float32)).shape == (0, 40)


def test_arrays_may_be_read_only_and_unaligned_and_are_kept_alive() -> None:
    rows = random_rows("Q5_0", 40, 128)
    data = native.pack("Q5_0", rows, 128)
    want = native.Linear([("Q5_0", data, 40)], None, 128)
    shifted = np.zeros(data.size + 3, np.uint8)[3:]
    shifted[:] = data
    shifted.flags.writeable = False
    linear = native.Linear([("Q5_0", shifted, 40)], None, 128)
    del shifted
    x = normal(5, 128)
    assert np.array_equal(linear.linear(x), want.linear(x))
    assert linear.nbytes == data.nbytes


def test_what_packed_bytes_say_stays_within_memory() -> None:
    """A packed file is not read before it is used, so its bytes may be anything."""
    for name in FORMATS:
        size = native.packed_bytes(name, 16, 256)
        data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        linear = native.Linear([(name, data, 16)], None, 256)
        assert linear.linear(normal(3, 256)).shape == (3, 16)
        assert all_rows(linear).shape == (16, 256)


def test_sizes_are_checked() -> None:
    data = native.pack("Q8_0", quantise_q8_0(normal(16, 64)), 64)
    bias = np.zeros(16, np.float32)
    for refused in (
        lambda: native.Linear([("Q8_0", data[:-1], 16)], None, 64),
        lambda: native.Linear([("Q8_0", data, 16)], bias[:-1], 64),
        lambda: native.Linear([("Q8_0", data, 16)], np.zeros(17, np.float32), 64),
        lambda: native.Linear([("Q8_0", data, 17)], None, 64),
        lambda: native.Linear([("Q8_0", data, 0)], None, 64),
        lambda: native.Linear([("Q8_0", data, 16)], None, -(1 << 40)),
        lambda: native.Linear([("Q8_0", data, 1 << 40)], None, 1 << 40),
        lambda: native.Linear([("Q4_0", data, 16)], None, 64),
        lambda: native.Linear([], None, 64),
        lambda: native.Linear([("Q8_0", data, 16)] * 5, None, 64),
        lambda: native.Linear([("Q8_0", data, 16)], bias, 64).linear(np.zeros((2, 63), np.float32)),
        lambda: native.Linear([("Q8_0", data, 16)], bias, 64).rows(np.array([16], np.int32)),
        lambda: native.quantise("Q8_0", np.full((2, 8), np.nan, np.float32)),
        lambda: native.quantise("Q4_0", np.full((2, 8), -np.inf, np.float32)),
        lambda: native.quantise("Q6_K", np.zeros((2, 256), np.float32)),
        lambda: native.pack("Q4_0", np.full((2, 18), 0xFF, np.uint8), 32),
        lambda: native.pack("Q4_0", np.zeros((2, 17), np.uint8), 32),
        lambda: native.pack("Q9_9", np.zeros((2, 17), np.uint8), 32),
    ):
        with pytest.raises(ValueError, match=r"\d|not finite|quantised|NaN"):
            refused()
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        native.Linear([("Q8_0", bias, 16)], None, 64)


def test_bandwidth_is_a_rate(threads: int) -> None:
    assert 0.1 < native.bandwidth(8) < 1e5


def check_mutations(count: int, seed: int) -> None:
    """Any bytes are blocks, refused for a scale that is no number, or stand for some weights."""
    rng, x = np.random.default_rng(seed), normal(2, 256)
    formats = [*FORMATS, "F16", "BF16", "F32", "F8_128"]
    good = {name: random_rows(name, 16, 256) for name in FORMATS}
    refused = 0
    for index in range(count):
        name = formats[index % len(formats)]
        rows = good.get(name, np.zeros((16, row_bytes(name, 256)), np.uint8)).copy()
        places = rng.integers(0, rows.size, rng.integers(1, 40))
        rows.reshape(-1)[places] = rng.integers(0, 256, len(places))
        try:
            linear = linear_of(name, rows, 256)
        except ValueError:
            refused += 1
            continue
        assert linear.linear(x).shape == (2, 16)
        assert linear.rows(np.array([index % 16], np.int32)).shape == (1, 256)
    assert 0 < refused < count // 2


def test_mutated_blocks(isa: str) -> None:
    check_mutations(600, seed=1)


@pytest.mark.slow
def test_many_mutated_blocks(isa: str) -> None:
    check_mutations(20_000, seed=2)
