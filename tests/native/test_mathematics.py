"""exp, tanh, erf and softplus against float64, in units in the last place, over all of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline._native as native

WORST = {"softplus": 3.0}  # others: 2.0
pytestmark = pytest.mark.usefixtures("isa")
FUNCTIONS = {
    "exp": np.exp,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "erf": lambda x: torch.erf(torch.from_numpy(x)).numpy(),
}


def from_bits(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def ulps(y: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in float32 ulps of the exact value; 0 where both are the same inf or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(np.float32)
        size = np.minimum(np.abs(rounded), np.finfo(np.float32).max)
        distance = np.abs(y.astype(np.float64) - exact) / np.spacing(size).astype(np.float64)
    same = (np.isinf(rounded) & (y == rounded)) | (np.isnan(rounded) & np.isnan(y))
    return np.where(same, 0.0, distance)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "bits",
    [
        pytest.param(np.arange(0, 1 << 32, 4999, dtype=np.uint64), id="all"),
        # where exp and tanh leave their asymptotes: |x| in [2**-6, 128)
        pytest.param(np.arange(0x3C800000, 0x43000000, 499, dtype=np.uint64), id="positive"),
        pytest.param(np.arange(0xBC800000, 0xC3000000, 499, dtype=np.uint64), id="negative"),
    ],
)
def test_within_a_few_ulps(name: str, bits: np.ndarray) -> None:
    x = from_bits(bits)[None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exact = FUNCTIONS[name](x.astype(np.float64))
    error = ulps(getattr(native, name)(x), exact)
    worst = error.argmax()
    assert error.flat[worst] <= WORST.get(name, 2.0), f"{name}({x.flat[worst]!r})"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_float_around_the_seams(name: str) -> None:
    seams = [0.0, 0.625, 0.8125, 4.0, 0.346574, 9.01, 88.722839, 89.0, 87.3365, 103.97208, 104.0]
    bits = np.array(seams, np.float32).view(np.uint32).astype(np.int64)[:, None]
    near = from_bits(np.maximum(bits + np.arange(-2000, 2000), 0).ravel())
    x = np.concatenate([near, -near])[None]
    with np.errstate(over="ignore", under="ignore"):
        exact = FUNCTIONS[name](x.astype(np.float64))
    assert ulps(getattr(native, name)(x), exact).max() <= WORST.get(name, 2.0)


def test_values_without_an_ulp() -> None:
    x = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30]], np.float32)
    np.testing.assert_array_equal(native.exp(x)[0], [np.nan, np.inf, 0, 1, 1, np.inf, 0])
    np.testing.assert_array_equal(native.tanh(x)[0], [np.nan, 1, -1, 0, 0, 1, -1])
    np.testing.assert_array_equal(native.erf(x)[0], [np.nan, 1, -1, 0, 0, 1, -1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_lane_is_a_function_of_itself_alone(name: str) -> None:
    function = getattr(native, name)
    generator = np.random.default_rng(1)
    x = generator.normal(0, 20, 61).astype(np.float32)
    x[7] = np.nan
    alone = np.array([function(x[i : i + 1, None])[0, 0] for i in range(x.size)])
    for shift in range(17):
        np.testing.assert_array_equal(function(np.roll(x, shift)[None])[0], np.roll(alone, shift))
