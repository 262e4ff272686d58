"""How checkpoints name and lay out tensors, and the same in the way that a decoder reads them.

That is: names as Llama's checkpoints have them, matrices ``[outputs, inputs]``, one for each
linear, and the rows of a query or key head in two halves, of which row ``i`` of the first is
rotated with row ``i`` of the second. A mixture of experts is under ``model.layers.I.mlp.``: the
router ``gate.weight``, matrices of each expert ``experts.N.{gate,up,down}_proj.weight``, or
``gate_up_proj`` for the first two, those of the shared expert ``shared_expert.*`` likewise,
``shared_expert_gate.weight``, and what is added to the scores for the choice,
``gate.e_score_correction.bias``; biases have the same names with ``.bias``. Checkpoints differ in
these names, and many keep what all experts have in one stack.

Each class here is a view of a checkpoint's tensors; :mod:`paceline.loading.checkpoint` says which
ones a checkpoint needs. Knows no file and no arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelLoadError
from paceline.models.config import ModelConfig
from paceline.models.families.family import PLAIN, Layout
from paceline.models.layer_sizes import DELTA
from paceline.tensors.stored import Place, PlacedTensors, StoredTensors

_LINEARS = re.compile(r".*\.(qkv|o|up|down)_proj\.weight")
_TURNED = re.compile(r".*\.(q|k|qkv)_proj\.(weight|bias)")
Index = npt.NDArray[np.int64]


@cache
def halves(heads: int, head_dim: int, rotary_dim: int) -> Index:
    """Which interleaved row of some heads each row in halves is; rows past the rotated stay."""
    head = np.arange(head_dim)
    head[:rotary_dim] = np.concatenate((head[:rotary_dim:2], head[1:rotary_dim:2]))
    rows: Index = (np.arange(heads)[:, None] * head_dim + head).ravel()
    return rows


def _fused_halves(config: ModelConfig, rotary_dim: int) -> Index:
    """The same of fused queries, keys and values."""
    turned, dim = config.num_heads + config.num_kv_heads, config.head_dim
    values = np.arange(turned * dim, (turned + config.num_kv_heads) * dim)
    return np.concatenate((halves(turned, dim, rotary_dim), values))


def _by_kind(config: ModelConfig) -> Index:
    """Which row of queries, keys and values head by head each row kind by kind is."""
    rows = np.arange(3 * config.num_heads * config.head_dim)
    by_kind: Index = rows.reshape(config.num_heads, 3, -1).swapaxes(0, 1).ravel()
    return by_kind


def row_order(layout: Layout, config: ModelConfig, name: str) -> Index | None:
    """Which stored row each row of a tensor is; None where they are in their order."""
    match = _TURNED.fullmatch(name)
    if match is not None and layout.by_head:
        return _by_kind(config) if match[1] == "qkv" else None
    if match is None or not layout.interleaved:
        return None
    dim = config.head_dim
    rotary_dim = dim if layout.turned_whole else config.positions.rope.dim or dim
    if match[1] == "qkv":
        return _fused_halves(config, rotary_dim)
    heads = config.num_heads if match[1] == "q" else config.num_kv_heads
    return halves(heads, dim, rotary_dim)


class LaidOutTensors(PlacedTensors):
    """A family's checkpoint in the way of all others."""

    def __init__(self, stored: StoredTensors, layout: Layout, config: ModelConfig) -> None:
        places: dict[str, Place] = {}
        for there in stored:
            name = layout.plain(there)
            if layout.ignored and re.fullmatch(layout.ignored, there):
                continue
            if name in places:
                raise ModelLoadError(f"tensor {name} appears twice, the second time as {there}")
            order = row_order(layout, config, name)
            is_transposed = layout.transposed and _LINEARS.fullmatch(name) is not None
            total = 0 if order is None else len(order)
            places[name] = Place(there, rows=order, transposed=is_transposed, total=total)
        super().__init__(stored, places)


_RENAMED = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\.feed_forward\.", ".mlp."),
        (r"\.block_sparse_moe\.gate\.", ".mlp.gate."),
        (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
        (r"\.block_sparse_moe\.input_linear\.", ".mlp.experts.gate_up_proj."),
        (r"\.block_sparse_moe\.output_linear\.", ".mlp.experts.down_proj."),
        (r"\.block_sparse_moe\.(experts\.|e_score)", r".mlp.\1"),
        (r"(\.mlp\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.mlp\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.mlp\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"\.mlp\.(shared_experts|shared_mlp)\.", ".mlp.shared_expert."),
        (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
        (
            r"\.mlp\.(gate\.)?(moe_statics\.)?e_score_correction_bias$",
            ".mlp.gate.e_score_correction.bias",
        ),
        (r"\.mlp\.router\.", ".mlp.gate."),
        (r"(\.layers\.\d+)\.router\.(proj\.)?", r"\1.mlp.gate."),
        (r"(\.layers\.\d+)\.experts\.", r"\1.mlp.experts."),
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
    )
)
_MARKS = re.compile(
    r"\.(block_sparse_moe|shared_mlp|shared_experts|wg|e_score_correction_bias|mlp\.router"
    r"|feed_forward\.(router|experts|shared_expert|gate_proj|up_proj|down_proj)"
    r"|\d+\.router|\d+\.experts)(\.|$)"
)
_STACK = re.compile(
    r"(.*\.mlp\.experts)\.((?:gate|up|gate_up|down)_proj)(\.weight|\.bias|_bias|_blocks|_scales)?"
)
ALTUP_STACK = re.compile(r"(model\.altup(?:_unembed)?_projections)()(\.weight)")
"""What GGUF files of Gemma 3n keep in stacks: linears from and to further residual streams."""
_ENDS = {None: ".weight", "_bias": ".bias"}
_DIMENSIONS = {".weight": 3, ".bias": 2, "_blocks": 4, "_scales": 3}


def plain_expert_name(name: str) -> str:
    """What a tensor of a mixture would be called by the names above; others keep their name."""
    if _MARKS.search(name):
        for pattern, plain in _RENAMED:
            name = pattern.sub(plain, name)
    return name


class ExpertTensors(PlacedTensors):
    """A checkpoint in which each expert's tensors are tensors of their own.

    Args:
        stored: the checkpoint, in which they may lie in stacks ``[experts, n, k]``.
        number: experts of each layer that has some.
        layout: of the stacks.
        stack: names of stacks, as a pattern of what is before and after a matrix's number.

    Raises:
        ModelLoadError: a stack is not one of so many matrices, or a matrix appears twice.
    """

    def __init__(
        self,
        stored: StoredTensors,
        number: int,
        layout: Layout = PLAIN,
        stack: re.Pattern[str] = _STACK,
    ) -> None:
        super().__init__(stored, {})
        for name in stored:
            match = stack.fullmatch(name)
            if match is None:
                self._add({name: Place(name)})
                continue
            shape, end = stored.shape_of(name), _ENDS.get(match[3], match[3])
            if len(shape) != _DIMENSIONS[end] or shape[0] != number:
                raise ModelLoadError(
                    f"tensor {name} has shape {shape}; the configuration needs a stack of {number} "
                    "matrices"
                )
            for expert in range(number):
                prefix = f"{match[1]}.{expert}" + ("." if match[2] else "")
                self._add(_expert_places(layout, Place(name, expert), prefix, match[2], end))

    def _add(self, places: Mapping[str, Place]) -> None:
        twice = self._where.keys() & places
        if twice:
            raise ModelLoadError(f"{min(twice)} appears twice, by itself and in a stack of experts")
        self._where.update(places)


def _expert_places(
    layout: Layout, place: Place, prefix: str, part: str, end: str
) -> dict[str, Place]:
    """The tensors that an expert's matrix of a stack stands for."""
    is_transposed = layout.inputs_first and end == ".weight"
    place = place._replace(transposed=is_transposed)
    if part != "gate_up_proj" or not layout.in_turn:
        return {prefix + part + end: place}
    places = {}
    for first, half in enumerate(("gate_proj", "up_proj")):
        outputs = slice(first, None, 2)
        own = place._replace(columns=outputs) if is_transposed else place._replace(rows=outputs)
        places[prefix + half + end] = own
    return places


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
        super().__init__(stored, {})
        self._heads, self._latent = config.num_heads, config.attention.latent
        for name in stored:
            match = _NAME.fullmatch(name)
            self._where |= self._places(name, *match.groups()) if match else {name: Place(name)}

    def _places(self, name: str, attn: str, kind: str) -> dict[str, Place]:
        latent, heads = self._latent, range(self._heads)
        if kind == "kv_b_proj":
            height, nope = latent.nope_dim + latent.value_dim, latent.nope_dim
            of = partial(Place, name, total=height * self._heads)
            keys = [slice(h * height, h * height + nope) for h in heads]
            values = [slice(h * height + nope, (h + 1) * height) for h in heads]
            return {
                **{f"{attn}k_b_proj.{h}.weight": of(rows=keys[h], transposed=True) for h in heads},
                **{f"{attn}v_b_proj.{h}.weight": of(rows=values[h]) for h in heads},
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
        height = before + self._latent.rope_dim
        head = np.arange(height)
        head[before:] = np.concatenate((head[before::2], head[before + 1 :: 2]))
        order = (np.arange(heads)[:, None] * height + head).ravel()
        return Place(name, rows=order, total=len(order))


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
        super().__init__(stored, {})
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
        r, heads = c.recurrent, c.recurrent.heads // c.recurrent.groups
        if fused[2] == "ba":
            widths = {"in_proj_b": heads, "in_proj_a": heads}
            return _apart(name, fused[1], fused[3], widths, r.groups)
        values = heads * r.value_dim
        widths = {"q": r.key_dim, "k": r.key_dim, "v": values, "in_proj_z": values}
        places = _apart(name, fused[1], fused[3], widths, r.groups)
        parts = [places.pop(f"{fused[1]}{part}{fused[3]}") for part in "qkv"]
        rows = np.concatenate([np.asarray(part.rows) for part in parts])
        joined = f"{fused[1]}in_proj_qkv{fused[3]}"
        return {**places, joined: parts[0]._replace(rows=rows)}


def _apart(
    stored: str, prefix: str, end: str, widths: dict[str, int], groups: int
) -> dict[str, Place]:
    """The parts of a matrix in which every group has rows of each, one part after another."""
    height, at, places = sum(widths.values()), 0, {}
    for name, width in widths.items():
        rows = np.arange(groups)[:, None] * height + np.arange(at, at + width)
        places[prefix + name + end] = Place(stored, rows=rows.ravel(), total=groups * height)
        at += width
    return places


class GroupedHeads(PlacedTensors):
    """A GGUF file's gated delta nets in which heads that share a key follow one another.

    Files of Qwen3.5 have the first head of every key, then the second of every key, and so on: in
    the rows of what values, gates, rates and decays come from, and in the columns of the last
    linear, which are left where they are and say which input is theirs.
    """

    def __init__(self, stored: StoredTensors, config: ModelConfig) -> None:
        super().__init__(stored, {name: Place(name) for name in stored})
        r = config.recurrent
        if r is None or r.heads == r.groups:  # an MTP layer alone, or no two heads share a key
            return
        heads = np.arange(r.heads).reshape(-1, r.groups).T.ravel()
        values = (heads[:, None] * r.value_dim + np.arange(r.value_dim)).ravel()
        channels = np.concatenate((np.arange(2 * r.keys), 2 * r.keys + values))
        orders = {"in_proj_qkv": channels, "conv1d": channels, "in_proj_z": values}
        for name in stored:
            match = _OF_HEADS.fullmatch(name)
            if match is not None:
                rows = orders.get(match[1], heads)
                self._where[name] = Place(name, rows=rows, total=len(rows))
            elif name.endswith(".linear_attn.out_proj.weight"):
                shape = stored.shape_of(name)
                if len(shape) != 2 or shape[1] != len(values):
                    raise ModelLoadError(
                        f"tensor {name} has shape {shape}; the configuration needs {len(values)} "
                        "columns"
                    )
                self._where[name] = Place(name, columns=values)
