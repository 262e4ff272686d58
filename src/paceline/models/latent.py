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

from paceline.errors import ModelLoadError
from paceline.models.arrays import Array, as_bytes
from paceline.models.blocks import FLOAT_BYTES
from paceline.models.config import ModelConfig
from paceline.models.stored import FilePart, StoredRows, StoredTensors

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


class _Place(NamedTuple):
    """Where a matrix lies: rows of a stored one, its transpose or one of a stack."""

    stored: str
    rows: Array | slice | None = None  # in the order in which they are wanted
    total: int = 0  # rows that there must be
    head: int | None = None  # of a stack
    transposed: bool = False


class LatentTensors(StoredTensors):
    """A checkpoint in which each head's matrices are tensors of their own.

    In its projections, the two rows of a rotary pair are not neighbours but in two halves.

    Args:
        stored: the checkpoint; its ``kv_b_proj`` has the matrices of all heads, or stacks
            ``k_b_proj`` and ``v_b_proj`` have them.
    """

    _where: dict[str, _Place]

    def __init__(self, stored: StoredTensors, config: ModelConfig) -> None:
        assert config.latent is not None
        self.stored, self._heads, self._latent = stored, config.num_heads, config.latent
        self._unpacked: tuple[str, Array] | None = None
        self._where = {}
        for name in stored:
            match = _NAME.fullmatch(name)
            self._where |= self._places(name, *match.groups()) if match else {name: _Place(name)}

    def _places(self, name: str, attn: str, kind: str) -> dict[str, _Place]:
        latent, heads = self._latent, range(self._heads)
        if kind == "kv_b_proj":
            each, nope = latent.nope_dim + latent.value_dim, latent.nope_dim
            of = partial(_Place, name, total=each * self._heads)
            keys = [slice(h * each, h * each + nope) for h in heads]
            values = [slice(h * each + nope, (h + 1) * each) for h in heads]
            return {
                **{f"{attn}k_b_proj.{h}.weight": of(keys[h], transposed=True) for h in heads},
                **{f"{attn}v_b_proj.{h}.weight": of(values[h]) for h in heads},
            }
        if kind in ("k_b_proj", "v_b_proj"):
            return {f"{attn}{kind}.{h}.weight": _Place(name, head=h) for h in heads}
        if kind in ("q_proj", "q_b_proj"):
            return {name: self._in_halves(name, latent.nope_dim, self._heads)}
        if kind == "kv_a_proj_with_mqa":
            return {name: self._in_halves(name, latent.rank, 1)}
        return {name: _Place(name)}

    def _in_halves(self, name: str, before: int, heads: int) -> _Place:
        """The rows of heads, each with so many dimensions before its rotated ones."""
        if not self._latent.interleaved:
            return _Place(name)
        each = before + self._latent.rope_dim
        head = np.arange(each)
        head[before:] = np.concatenate((head[before::2], head[before + 1 :: 2]))
        order = (np.arange(heads)[:, None] * each + head).ravel()
        return _Place(name, order, total=len(order))

    def _place(self, name: str) -> _Place:
        return self._where.get(name, _Place(name))  # what is not there is looked up: it says so

    def __getitem__(self, name: str) -> Array:
        place = self._place(name)
        if self._unpacked is None or self._unpacked[0] != place.stored:
            self._unpacked = place.stored, self.stored[place.stored]
        found = self._picked(name, place, self._unpacked[1])
        return np.ascontiguousarray(found.T) if place.transposed else found

    def _picked(self, name: str, place: _Place, rows: Array) -> Array:
        if place.head is not None:
            if rows.ndim != 3 or len(rows) != self._heads:
                raise ModelLoadError(
                    f"tensor {place.stored} has shape {rows.shape}; the configuration needs a "
                    f"stack of {self._heads} matrices"
                )
            one: Array = rows[place.head]
            return one
        if place.rows is None:
            return rows
        if rows.ndim != 2 or len(rows) != place.total:
            raise ModelLoadError(
                f"tensor {place.stored} has shape {rows.shape}; the configuration needs "
                f"{place.total} rows"
            )
        found: Array = rows[place.rows]
        return found

    def rows(self, name: str, first: int, last: int) -> Array:
        place = self._place(name)
        if place.rows is None and place.head is None:
            return self.stored.rows(place.stored, first, last)
        return self[name][first:last]

    def as_stored(self, name: str) -> StoredRows | None:
        place = self._place(name)
        if place.transposed:
            kind = self.type_of(name)
            return StoredRows(kind, as_bytes(self[name])) if kind in FLOAT_BYTES else None
        found = self.stored.as_stored(place.stored)
        return found and found._replace(rows=self._picked(name, place, found.rows))

    def shape_of(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = self.stored.shape_of(place.stored)
        if place.head is not None:
            return shape[1:]
        if isinstance(place.rows, slice):
            shape = (place.rows.stop - place.rows.start, *shape[1:])
        return shape[::-1] if place.transposed else shape

    def file_part(self, name: str) -> FilePart | None:
        place = self._place(name)
        is_whole = place.rows is None and place.head is None and not place.transposed
        return self.stored.file_part(place.stored) if is_whole else None

    def type_of(self, name: str) -> str:
        return self.stored.type_of(self._place(name).stored)

    def num_bytes(self) -> int:
        return self.stored.num_bytes()

    def release(self, name: str) -> None:
        self._unpacked = None
        self.stored.release(self._place(name).stored)
