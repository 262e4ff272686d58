"""The tensors of hybrid models under one set of names, however they are stored. Knows no
arithmetic.

Some checkpoints have in one matrix what comes out of several linears, group by group or head by
head: here each linear is a tensor of its own, ``in_proj_{qkv,z,b,a}`` of a delta rule's layer and
``q_proj`` and ``gate_proj`` of an attention with gates. The feed-forward of a Granite without
experts is called like a shared expert in the checkpoint.
"""

from __future__ import annotations

import re

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.models.config import ModelConfig
from paceline.models.recurrent import DELTA
from paceline.tensors.arrays import Array
from paceline.tensors.placed_tensors import Place, PlacedTensors
from paceline.tensors.stored import StoredRows, StoredTensors

_FUSED = re.compile(r"(.*\.linear_attn\.)in_proj_(qkvz|ba)(\.weight)")
_OF_HEADS = re.compile(r".*\.linear_attn\.(in_proj_[qkvzba]+|conv1d|A|dt_bias)(\.weight)?")
_TILED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families whose GGUF files have the heads of values in another order than their checkpoints."""
_QUERIES = re.compile(r"(.*\.self_attn\.)q_proj(\.weight|\.bias)")


class RecurrentTensors(PlacedTensors):
    """A hybrid model's checkpoint in which each linear is a tensor."""

    def __init__(self, stored: StoredTensors, config: ModelConfig) -> None:
        super().__init__(stored)
        self._config = config
        for name in stored:
            # Where there are no experts, what all rows have is a dense layer.
            plain = name if config.mlp.experts else name.replace(".mlp.shared_expert.", ".mlp.")
            self._where |= self._places(name) if plain == name else {plain: Place(name)}

    def _places(self, name: str) -> dict[str, Place]:
        c, fused, queries = self._config, _FUSED.fullmatch(name), _QUERIES.fullmatch(name)
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
        if r is None or config.architecture not in _TILED or r.heads == r.groups:
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
