"""Linears whose columns are of inputs in another order: as if the inputs had come in that order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import paceline._native as native
from paceline.tensors.quantised_blocks import decode
from tests.backends.block_rows import random_rows

K = 256
FORMATS = ("Z4_32", "Z4_128", "C8_128", "F4_16", "Q6_K", "F32")


@pytest.fixture(params=native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape, dtype=np.float32)


def order_of(seed: int, k: int = K) -> np.ndarray:
    return np.random.default_rng(seed).permutation(k).astype(np.int32)


def stored(name: str, n: int, k: int = K) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a format, and the weights that they stand for."""
    if name == "F32":
        weights = normal(n, k)
        return weights.view(np.uint8), weights
    rows = random_rows(name, n, k, seed=n)
    return rows, decode(name, rows).floats()


def part(name: str, n: int, order: np.ndarray | None) -> tuple[object, ...]:
    return name, native.pack(name, stored(name, n)[0], K), n, order


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 7, 33])
def test_inputs_come_in_the_order(name: str, count: int) -> None:
    order, bias, x = order_of(1), normal(37), normal(count, K)
    plain = native.Linear([part(name, 37, None)], bias, K)
    linear = native.Linear([part(name, 37, order)], bias, K)
    assert np.array_equal(linear.linear(x), plain.linear(np.ascontiguousarray(x[:, order])))
    assert linear.nbytes == plain.nbytes + order.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_the_inputs(name: str) -> None:
    order = order_of(1)
    linear = native.Linear([part(name, 20, order)], None, K)
    rows = linear.rows(np.arange(20, dtype=np.int32), 2.0)
    assert np.array_equal(rows[:, order], 2.0 * stored(name, 20)[1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seeds", [(1, 2, 3), (1, 1, 2), (1, None, 1), (None, 1, 2), (1, 1, 1)])
def test_stacked_linears_have_orders_of_their_own(
    seeds: tuple[int | None, ...], threads: int
) -> None:
    before = native.num_threads()
    native.set_threads(threads)
    names, counts, x = ("Z4_128", "F32", "C8_32"), (40, 16, 23), normal(19, K)
    orders = [None if seed is None else order_of(seed) for seed in seeds]
    parts = [part(*each) for each in zip(names, counts, orders, strict=True)]
    linear = native.Linear(parts, None, K)
    alone = [native.Linear([each], None, K) for each in parts]
    assert np.array_equal(linear.linear(x), np.concatenate([one.linear(x) for one in alone], 1))
    every = np.arange(79, dtype=np.int32)
    rows = [one.rows(np.arange(one.n, dtype=np.int32)) for one in alone]
    assert np.array_equal(linear.rows(every), np.concatenate(rows))
    native.set_threads(before)


def test_inputs_that_fill_no_stretch() -> None:
    k, order = 45, order_of(1, 45)
    x, weights = normal(5, k), normal(17, k)
    rows = native.quantise("Q8_0", weights)
    data = native.pack("Q8_0", rows, k)
    plain = native.Linear([("Q8_0", data, 17)], None, k)
    for other in (None, order_of(2, k)):
        linear = native.Linear([("Q8_0", data, 17, order), ("Q8_0", data, 17, other)], None, k)
        want = [
            plain.linear(x if o is None else np.ascontiguousarray(x[:, o])) for o in (order, other)
        ]
        assert np.array_equal(linear.linear(x), np.concatenate(want, 1))


def test_what_is_no_order_is_refused() -> None:
    good = order_of(1)
    beyond, twice, below = good.copy(), good.copy(), good.copy()
    beyond[5], twice[5], below[5] = K, twice[4], -1
    for bad, words in (
        (beyond, "this one has 256"),
        (twice, "twice"),
        (below, "this one has -1"),
        (good[:-1], "order has 255 elements"),
    ):
        with pytest.raises(ValueError, match=words):
            native.Linear([part("Z4_32", 16, bad)], None, K)
    for kind in (np.int64, np.float32):
        with pytest.raises(TypeError, match="order is not an array of int32"):
            native.Linear([part("Z4_32", 16, good.astype(kind))], None, K)
    with pytest.raises(ValueError, match="a part is"):
        native.Linear([(*part("Z4_32", 16, good), 1)], None, K)


def test_an_order_that_changes_later_is_not_followed() -> None:
    """It may lie in a file that somebody writes to."""
    order, x = order_of(1), normal(3, K)
    linear = native.Linear([part("Z4_32", 16, order)], None, K)
    want = linear.linear(x)
    order[:] = 1 << 30
    assert np.array_equal(linear.linear(x), want)
