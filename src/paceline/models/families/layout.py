"""How a family's own checkpoints name and lay out tensors, and the same in the way of all others.

Knows no file and no arithmetic. What is in the way of all others: names as Llama's checkpoints have
them, matrices ``[outputs, inputs]``, and the rows of a query or key head in two halves, of which
row ``i`` of the first is rotated with row ``i`` of the second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelLoadError
from paceline.models.config import ModelConfig
from paceline.tensors.arrays import Array, as_bytes
from paceline.tensors.blocks import FLOAT_BYTES
from paceline.tensors.stored import StoredRows, StoredTensors

_LINEARS = re.compile(r".*\.(qkv|o|up|down)_proj\.weight")
_TURNED = re.compile(r".*\.([qk])_proj\.(weight|bias)")
_FUSED = re.compile(r".*\.qkv_proj\.(weight|bias)")
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """What sets a family's checkpoints apart; by default nothing.

    Attributes:
        renames: patterns and what stands for each of their matches, one after another.
        ignored: names of tensors that are no weights, as a pattern.
        interleaved: pairs of rows that are rotated together follow one another.
        by_head: the fused queries, keys and values go head by head.
        transposed: linears are ``[inputs, outputs]``.
    """

    renames: tuple[tuple[str, str], ...] = ()
    ignored: str = ""
    interleaved: bool = False
    by_head: bool = False
    transposed: bool = False

    def plain(self, stored: str) -> str:
        """What others call a tensor that the family's checkpoints call so."""
        for pattern, replacement in self.renames:
            stored = re.sub(pattern, replacement, stored)
        return stored


PLAIN = Layout()


def halves(heads: int, head_dim: int, rotary_dim: int) -> Index:
    """Which interleaved row of some heads each row in halves is; rows past the rotated stay."""
    head = np.arange(head_dim)
    head[:rotary_dim] = np.concatenate((head[:rotary_dim:2], head[1:rotary_dim:2]))
    found: Index = (np.arange(heads)[:, None] * head_dim + head).ravel()
    return found


def fused_halves(config: ModelConfig) -> Index:
    """The same of fused queries, keys and values."""
    turned, dim = config.num_heads + config.num_kv_heads, config.head_dim
    values = np.arange(turned * dim, (turned + config.num_kv_heads) * dim)
    return np.concatenate((halves(turned, dim, config.positions.rope.dim or dim), values))


def _by_kind(config: ModelConfig) -> Index:
    """Which row of queries, keys and values head by head each row kind by kind is."""
    rows = np.arange(3 * config.num_heads * config.head_dim)
    found: Index = rows.reshape(config.num_heads, 3, -1).swapaxes(0, 1).ravel()
    return found


def row_order(layout: Layout, config: ModelConfig, name: str) -> Index | None:
    """Which stored row each row of a tensor is; None where they are in their order."""
    if layout.by_head and _FUSED.fullmatch(name):
        return _by_kind(config)
    match = _TURNED.fullmatch(name) if layout.interleaved else None
    if match is None:
        return None
    heads = config.num_heads if match[1] == "q" else config.num_kv_heads
    return halves(heads, config.head_dim, config.positions.rope.dim or config.head_dim)


class LaidOutTensors(StoredTensors):
    """A family's checkpoint in the way of all others."""

    def __init__(self, tensors: StoredTensors, layout: Layout, config: ModelConfig) -> None:
        self._tensors, self._layout, self._config = tensors, layout, config
        self._where: dict[str, Any] = {}
        for stored in tensors:
            name = layout.plain(stored)
            if layout.ignored and re.fullmatch(layout.ignored, stored):
                continue
            if name in self._where:
                raise ModelLoadError(f"tensor {name} appears twice, the second time as {stored}")
            self._where[name] = stored

    def _stored(self, name: str) -> str:
        return str(self._where.get(name, name))  # what is not there is looked up there: it says so

    def _is_transposed(self, name: str) -> bool:
        return self._layout.transposed and _LINEARS.fullmatch(name) is not None

    def _ordered(self, name: str, tensor: Array) -> Array:
        order = row_order(self._layout, self._config, name)
        if order is None:
            return tensor
        if len(tensor) != len(order):
            raise ModelLoadError(
                f"tensor {self._stored(name)} has {len(tensor)} rows; the configuration needs "
                f"{len(order)}"
            )
        return tensor[order]

    def __getitem__(self, name: str) -> Array:
        tensor = self._tensors[self._stored(name)]
        if self._is_transposed(name):
            tensor = np.ascontiguousarray(tensor.T)
        return self._ordered(name, tensor)

    def as_stored(self, name: str) -> StoredRows | None:
        if name not in self._where:
            return None
        if self._is_transposed(name):
            kind = self.type_of(name)
            return StoredRows(kind, as_bytes(self[name])) if kind in FLOAT_BYTES else None
        found = self._tensors.as_stored(self._stored(name))
        return found and found._replace(rows=self._ordered(name, found.rows))

    def shape_of(self, name: str) -> tuple[int, ...]:
        shape = self._tensors.shape_of(self._stored(name))
        return shape[::-1] if self._is_transposed(name) else shape

    def rows(self, name: str, first: int, last: int) -> Array:
        if self._is_transposed(name) or row_order(self._layout, self._config, name) is not None:
            return self[name][first:last]
        return self._tensors.rows(self._stored(name), first, last)

    def type_of(self, name: str) -> str:
        return self._tensors.type_of(self._stored(name))

    def num_bytes(self) -> int:
        return self._tensors.num_bytes()

    def release(self, name: str) -> None:
        self._tensors.release(self._stored(name))
