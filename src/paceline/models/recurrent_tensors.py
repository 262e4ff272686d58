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

from paceline.models.config import ModelConfig
from paceline.models.placed_tensors import Place, PlacedTensors
from paceline.models.recurrent import DELTA
from paceline.models.stored import StoredTensors

_FUSED = re.compile(r"(.*\.linear_attn\.)in_proj_(qkvz|ba)(\.weight)")
_QUERIES = re.compile(r"(.*\.self_attn\.)q_proj(\.weight|\.bias)")


class RecurrentTensors(PlacedTensors):
    """A hybrid model's checkpoint in which each linear is a tensor."""

    def __init__(self, stored: StoredTensors, config: ModelConfig) -> None:
        super().__init__(stored)
        self._config = config
        for name in stored:
            # Where there are no experts, what all rows have is a dense layer.
            plain = name if config.experts else name.replace(".mlp.shared_expert.", ".mlp.")
            self._where |= self._places(name) if plain == name else {plain: Place(name)}

    def _places(self, name: str) -> dict[str, Place]:
        c, fused, queries = self._config, _FUSED.fullmatch(name), _QUERIES.fullmatch(name)
        if queries and c.attention_gate:
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
