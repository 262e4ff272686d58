"""Cosine and sine tables of the rotary embedding, for every scaling rule. Knows no model family.

Layout: a head's dimension ``i`` is paired with ``i + rotary_dim / 2``. Frequencies, angles and
attention factors are computed in float64 and rounded once, so the tables do not depend on the
device. Rules whose frequencies depend on the length of the text take ``max_len`` instead: one
engine has one table, otherwise cached keys would go stale when a text grows.

Sources: YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; the ``llama3`` rule is the one of the
Llama 3.1 release.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.models.backend import WeightOps
from paceline.models.layer_sizes import GROWTH_START, QUERY_GROWTH, RopeConfig
from paceline.tensors.arrays import Floats, sparse_zeros

_CHUNK = 1 << 10  # positions that are computed at a time
_Doubles = npt.NDArray[np.float64]
_Params = dict[str, Any]
"""A rule's own numbers, by name."""


class RotaryTable:
    """Cosines and sines of the positions that were asked for so far, as the forwards read them.

    Memory for all positions is reserved and none of it is taken before: the table of a long context
    is larger than a small model, and few texts get there.

    Args:
        max_len: positions that there can be; fixes what depends on the length.
        ops: the backend that will read it.
        ahead: row i is of position ``i + ahead``.

    Attributes:
        cos, sin: float32 ``[max_len, rotary_dim]`` as the backend has vectors, for both halves of a
            head; the first half of ``sin`` is negated.
        q_scale: float32 ``[max_len]``, what queries are multiplied with; None: 1 everywhere.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_len: int, ops: WeightOps, ahead: int = 0
    ) -> None:
        self._ahead = ahead
        self._rope, self._head_dim, self._max_len, self._reached = rope, head_dim, max_len, 0
        self._pack = ops.pack_vector
        shape = (max_len, rope.dim or head_dim)
        self.cos, self.sin = (self._pack(sparse_zeros(shape, np.float32)) for _ in range(2))
        scale = query_scale(rope, max_len)
        self.q_scale = None if scale is None else self._pack(scale)

    def reach(self, length: int) -> None:
        """Have positions ``0 .. length - 1``, or all that there can be."""
        while self._reached < min(length, self._max_len):
            first, last = self._reached, min(self._reached + _CHUNK, self._max_len)
            positions = range(first + self._ahead, last + self._ahead)
            cos, sin = rope_tables(self._rope, self._head_dim, self._max_len, positions)
            self.cos[first:last] = self._pack(np.concatenate((cos, cos), axis=-1))
            self.sin[first:last] = self._pack(np.concatenate((-sin, sin), axis=-1))
            self._reached = last


def query_scale(rope: RopeConfig, max_len: int) -> Floats | None:
    """What queries at ``0 .. max_len - 1`` are multiplied with, in Llama 4's way: it grows with the
    logarithm of how often the trained length fits into the text so far. None where it is 1.
    """
    params: _Params = dict(rope.params)
    growth = params.get(QUERY_GROWTH, 0.0)
    trained = params.get("original_max_position_embeddings", max_len)
    start = params.get(GROWTH_START, 0.0)
    if not growth or max_len + start <= trained:
        return None
    spans = np.floor((np.arange(max_len, dtype=np.float64) + start) / trained)
    found: Floats = (1.0 + growth * np.log1p(spans)).astype(np.float32)
    return found


def rope_tables(
    rope: RopeConfig, head_dim: int, max_len: int, positions: range | None = None
) -> tuple[Floats, Floats]:
    """Tables of some positions; of ``0 .. max_len - 1`` where none are given.

    Returns:
        cos, sin: float32 ``[positions, rotary_dim // 2]``, attention factor included.
    """
    frequencies, attention = _frequencies(rope, rope.dim or head_dim, max_len)  # [dim // 2]
    wanted = range(max_len) if positions is None else positions
    angles = np.array(wanted, np.float64)[:, None] * frequencies[None, :]
    cos, sin = np.cos(angles) * attention, np.sin(angles) * attention
    return cos.astype(np.float32), sin.astype(np.float32)


def _frequencies(rope: RopeConfig, dim: int, max_len: int) -> tuple[_Doubles, float]:
    """Angle per position of each pair, float64 ``[dim // 2]``, and the factor on cos and sin."""
    params: _Params = dict(rope.params)
    base = _plain(rope.theta, dim)
    if rope.scaling == "linear":
        return base / rope.factor, 1.0
    if rope.scaling == "dynamic":
        return _plain(_dynamic_theta(rope, params, dim, max_len), dim), 1.0
    if rope.scaling == "llama3":
        return _llama3(base, rope.factor, params), 1.0
    if rope.scaling == "yarn":
        return _yarn(base, rope, params, dim), _yarn_attention(rope.factor, params)
    if rope.scaling == "longrope":
        beyond = max_len > params.get("original_max_position_embeddings", max_len)
        factors = params["long_factor" if beyond else "short_factor"]
        divisors = np.array(factors, np.float64)
        own = params.get("long_mscale" if beyond else "short_mscale")
        return base / divisors, _longrope_attention(rope.factor, params) if own is None else own
    if rope.scaling == "proportional":
        return _proportional(base, params) / rope.factor, 1.0
    assert rope.scaling == "default", rope.scaling
    return base, 1.0


def _plain(theta: float, dim: int) -> _Doubles:
    found: _Doubles = np.float64(theta) ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    return found


def _proportional(base: _Doubles, params: _Params) -> _Doubles:
    """The slowest pairs do not turn at all: Gemma 4's way to rotate a part of a head."""
    turned = base.copy()
    turned[int(params["turned"]) :] = 0.0
    return turned


def _dynamic_theta(rope: RopeConfig, params: _Params, dim: int, max_len: int) -> float:
    """The base grows with the text beyond the trained length, and is the trained one below it."""
    trained = params.get("original_max_position_embeddings", max_len)
    if max_len <= trained or dim <= 2:
        return rope.theta
    stretch = rope.factor * max_len / trained - (rope.factor - 1)
    return rope.theta * math.pow(stretch, dim / (dim - 2))


def _llama3(base: _Doubles, factor: float, params: _Params) -> _Doubles:
    """Slow pairs are divided by the factor, fast ones kept, those between blended."""
    low, high = params.get("low_freq_factor", 1.0), params.get("high_freq_factor", 4.0)
    trained = params.get("original_max_position_embeddings", 8192)
    turns = trained * base / (2 * math.pi)  # full turns within the trained length
    keep = np.clip((turns - low) / ((high - low) or 1e-9), 0.0, 1.0)
    blended: _Doubles = keep * base + (1.0 - keep) * base / factor
    return blended


def _yarn(base: _Doubles, rope: RopeConfig, params: _Params, dim: int) -> _Doubles:
    """A linear ramp over pairs, from kept frequencies to divided ones."""
    trained = params.get("original_max_position_embeddings", 4096)

    def pair_with(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(params.get("beta_fast", 32)), pair_with(params.get("beta_slow", 1))
    if params.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001  # the ramp becomes a step
    pairs = np.arange(dim // 2, dtype=np.float64)
    divided = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    scaled: _Doubles = base / rope.factor * divided + base * (1.0 - divided)
    return scaled


def _yarn_attention(factor: float, params: _Params) -> float:
    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if "attention_factor" in params:
        return float(params["attention_factor"])
    scale, all_dims = params.get("mscale", 0.0), params.get("mscale_all_dim", 0.0)
    if scale and all_dims:
        return temperature(scale) / temperature(all_dims)
    return temperature(1.0)


def _longrope_attention(factor: float, params: _Params) -> float:
    if "attention_factor" in params:
        return float(params["attention_factor"])
    trained = params.get("original_max_position_embeddings", 4096)
    if factor <= 1.0 or trained <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(trained))
