"""Attention whose keys and values are one latent per token (MLA, arXiv 2405.04434).

Owns what a layer's packed weights are, and the tensors that they are packed from under one set of
names, however a checkpoint stores them. Knows no arithmetic.

Keys and values are never expanded: queries and results go through each head's half of the matrix
that would expand them, ``k_b_proj.H`` and ``v_b_proj.H``, so that a token's one key is its rotated
dimensions and, behind them, its latent, and its one value is the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from paceline.models.config import ModelConfig
from paceline.tensors.placed_tensors import Place, PlacedTensors
from paceline.tensors.stored import StoredTensors

_NAME = re.compile(r"(.*\.self_attn\.)(\w+_proj(?:_with_mqa)?)\.weight")


class LatentWeights(NamedTuple):
    """Packed weights of a layer's attention, besides those that all layers have.

    Attributes:
        q_norm, q_b: norm and linear of compressed queries; None where queries are not compressed.
        kv_norm: norm of the latents.
        k_b: of each head, a linear from its queries without positions to latents.
        v_b: of each head, a linear from latents to its results.
    """

    q_norm: Any
    q_b: Any
    kv_norm: Any
    k_b: Sequence[Any]
    v_b: Sequence[Any]


class LatentTensors(PlacedTensors):
    """A checkpoint in which each head's matrices are tensors of their own.

    In its projections, the two rows of a rotary pair are not neighbours but in two halves.

    Args:
        stored: the checkpoint; its ``kv_b_proj`` has the matrices of all heads, or stacks
            ``k_b_proj`` and ``v_b_proj`` have them.
    """

    def __init__(self, stored: StoredTensors, config: ModelConfig) -> None:
        assert config.attention.latent is not None
        super().__init__(stored)
        self._heads, self._latent = config.num_heads, config.attention.latent
        for name in stored:
            match = _NAME.fullmatch(name)
            self._where |= self._places(name, *match.groups()) if match else {name: Place(name)}

    def _places(self, name: str, attn: str, kind: str) -> dict[str, Place]:
        latent, heads = self._latent, range(self._heads)
        if kind == "kv_b_proj":
            each, nope = latent.nope_dim + latent.value_dim, latent.nope_dim
            of = partial(Place, name, total=each * self._heads)
            keys = [slice(h * each, h * each + nope) for h in heads]
            values = [slice(h * each + nope, (h + 1) * each) for h in heads]
            return {
                **{f"{attn}k_b_proj.{h}.weight": of(keys[h], transposed=True) for h in heads},
                **{f"{attn}v_b_proj.{h}.weight": of(values[h]) for h in heads},
            }
        if kind in ("k_b_proj", "v_b_proj"):
            of = partial(Place, name, total=self._heads)
            return {f"{attn}{kind}.{h}.weight": of(matrix=h) for h in heads}
        if kind in ("q_proj", "q_b_proj"):
            return {name: self._in_halves(name, latent.nope_dim, self._heads)}
        if kind == "kv_a_proj_with_mqa":
            return {name: self._in_halves(name, latent.rank, 1)}
        return {name: Place(name)}

    def _in_halves(self, name: str, before: int, heads: int) -> Place:
        """The rows of heads, each with so many dimensions before its rotated ones."""
        if not self._latent.interleaved:
            return Place(name)
        each = before + self._latent.rope_dim
        head = np.arange(each)
        head[before:] = np.concatenate((head[before::2], head[before + 1 :: 2]))
        order = (np.arange(heads)[:, None] * each + head).ravel()
        return Place(name, order, total=len(order))
