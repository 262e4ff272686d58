"""How families' own checkpoints name and lay out tensors, and the same in the way of all others.

What is in the way of all others: names as Llama's checkpoints have them, matrices
``[outputs, inputs]``, one for each linear, and the rows of a query or key head in two halves, of
which row ``i`` of the first is rotated with row ``i`` of the second. Knows no file and no
arithmetic.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelLoadError
from paceline.models.config import ModelConfig
from paceline.models.families import FAMILIES
from paceline.models.families.family import Layout
from paceline.models.layer_sizes import DELTA
from paceline.tensors.arrays import Array, as_bytes
from paceline.tensors.quantised_blocks import FLOAT_BYTES
from paceline.tensors.stored import Place, PlacedTensors, StoredRows, StoredTensors

_LINEARS = re.compile(r".*\.(qkv|o|up|down)_proj\.weight")
_TURNED = re.compile(r".*\.([qk])_proj\.(weight|bias)")
_FUSED_HEADS = re.compile(r".*\.qkv_proj\.(weight|bias)")
Index = npt.NDArray[np.int64]


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
    if layout.by_head and _FUSED_HEADS.fullmatch(name):
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


_NAME = re.compile(r"(.*\.self_attn\.)(\w+_proj(?:_with_mqa)?)\.weight")


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


_FUSED_DELTA = re.compile(r"(.*\.linear_attn\.)in_proj_(qkvz|ba)(\.weight)")
_OF_HEADS = re.compile(r".*\.linear_attn\.(in_proj_[qkvzba]+|conv1d|A|dt_bias)(\.weight)?")
_QUERIES = re.compile(r"(.*\.self_attn\.)q_proj(\.weight|\.bias)")


class RecurrentTensors(PlacedTensors):
    """A hybrid model's checkpoint in which each linear is a tensor.

    Some checkpoints have in one matrix what comes out of several linears, group by group or head by
    head: here each linear is a tensor of its own, ``in_proj_{qkv,z,b,a}`` of a delta rule's layer
    and ``q_proj`` and ``gate_proj`` of an attention with gates. The feed-forward of a Granite
    without experts is called like a shared expert in the checkpoint.
    """

    def __init__(self, stored: StoredTensors, config: ModelConfig) -> None:
        super().__init__(stored)
        self._config = config
        for name in stored:
            # Where there are no experts, what all rows have is a dense layer.
            plain = name if config.mlp.experts else name.replace(".mlp.shared_expert.", ".mlp.")
            self._where |= self._places(name) if plain == name else {plain: Place(name)}

    def _places(self, name: str) -> dict[str, Place]:
        c, fused, queries = self._config, _FUSED_DELTA.fullmatch(name), _QUERIES.fullmatch(name)
        if queries and c.attention.gate:
            widths = {"q_proj": c.head_dim, "gate_proj": c.head_dim}
            return _apart(name, queries[1], queries[2], widths, c.num_heads)
        if fused is None or c.recurrent is None or c.recurrent.kind != DELTA:
            return {name: Place(name)}
        r, each = c.recurrent, c.recurrent.heads // c.recurrent.groups
        if fused[2] == "ba":
            widths = {"in_proj_b": each, "in_proj_a": each}
            return _apart(name, fused[1], fused[3], widths, r.groups)
        values = each * r.value_dim
        widths = {"q": r.key_dim, "k": r.key_dim, "v": values, "in_proj_z": values}
        found = _apart(name, fused[1], fused[3], widths, r.groups)
        parts = [found.pop(f"{fused[1]}{part}{fused[3]}") for part in "qkv"]
        rows = np.concatenate([np.asarray(part.rows) for part in parts])
        joined = f"{fused[1]}in_proj_qkv{fused[3]}"
        return {**found, joined: Place(name, rows, parts[0].total)}


def _apart(
    stored: str, prefix: str, end: str, widths: dict[str, int], groups: int
) -> dict[str, Place]:
    """The parts of a matrix in which every group has rows of each, one part after another."""
    of_group, at, found = sum(widths.values()), 0, {}
    for name, width in widths.items():
        rows = np.arange(groups)[:, None] * of_group + np.arange(at, at + width)
        found[prefix + name + end] = Place(stored, rows.ravel(), groups * of_group)
        at += width
    return found


class GroupedHeads(PlacedTensors):
    """A GGUF file's gated delta nets in which heads that share a key follow one another.

    Files of Qwen3.5 have the first head of every key, then the second of every key, and so on: in
    the rows of what values, gates, rates and decays come from, and in the columns of the last
    linear, which are left where they are and say which input is theirs.
    """

    def __init__(self, stored: StoredTensors, config: ModelConfig) -> None:
        super().__init__(stored)
        self._where = {name: Place(name) for name in stored}
        self._columns: Array | None = None
        r = config.recurrent
        family = FAMILIES.get(config.architecture)
        if r is None or family is None or not family.gguf.tiled_heads or r.heads == r.groups:
            return
        heads = np.arange(r.heads).reshape(-1, r.groups).T.ravel()
        values = (heads[:, None] * r.value_dim + np.arange(r.value_dim)).ravel()
        channels = np.concatenate((np.arange(2 * r.keys), 2 * r.keys + values))
        self._columns = values
        orders = {"in_proj_qkv": channels, "conv1d": channels, "in_proj_z": values}
        for name in stored:
            match = _OF_HEADS.fullmatch(name)
            if match is not None:
                rows = orders.get(match[1], heads)
                self._where[name] = Place(name, rows, len(rows))

    def _columns_of(self, name: str) -> Array | None:
        """Which stored column each input is; None where they are in their order."""
        if self._columns is None or not name.endswith(".linear_attn.out_proj.weight"):
            return None
        shape = self.shape_of(name)
        if len(shape) != 2 or shape[1] != len(self._columns):
            raise ModelLoadError(
                f"tensor {name} has shape {shape}; the configuration needs {len(self._columns)} "
                "columns"
            )
        return self._columns

    def __getitem__(self, name: str) -> Array:
        found, columns = super().__getitem__(name), self._columns_of(name)
        return found if columns is None else np.ascontiguousarray(found[:, columns])

    def as_stored(self, name: str) -> StoredRows | None:
        found, columns = super().as_stored(name), self._columns_of(name)
        if found is None or columns is None:
            return found
        return found._replace(order=np.argsort(columns).astype(np.int32))
