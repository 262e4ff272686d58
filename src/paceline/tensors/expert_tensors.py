"""The tensors of mixtures of experts under one set of names, however they are stored.

A mixture is under ``model.layers.I.mlp.``: the router ``gate.weight``, matrices of each expert
``experts.N.{gate,up,down}_proj.weight`` or ``gate_up_proj`` for the first two, those of the shared
expert ``shared_expert.*`` likewise, ``shared_expert_gate.weight``, and what is added to the scores
for the choice, ``gate.e_score_correction.bias``; biases have the same names with ``.bias``.
Checkpoints differ in these names, and many keep what all experts have in one stack. Knows no
arithmetic.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from paceline.core.errors import ModelLoadError
from paceline.tensors.arrays import Array
from paceline.tensors.stored import FilePart, StoredRows, StoredTensors

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
IN_TURN = ("gpt_oss",)
"""Families whose Hugging Face stacks have the outputs of gates and of ups in turn."""
INPUTS_FIRST = ("gpt_oss", "llama4_text")
"""Families whose Hugging Face stacks of floats have the inputs before the outputs, ``[experts, k,
n]``."""


def plain_expert_name(name: str) -> str:
    """What a tensor of a mixture would be called by the names above; others keep their name."""
    if _MARKS.search(name):
        for pattern, plain in _RENAMED:
            name = pattern.sub(plain, name)
    return name


class _Place(NamedTuple):
    """Where a tensor is: all of a stored one, or an expert's part of a stack.

    Attributes:
        outputs: of the expert's, which ones.
        turned: the expert's is ``[k, n]``.
    """

    stored: str
    expert: int | None = None
    outputs: slice = slice(None)
    turned: bool = False

    def of(self, matrix: Array) -> Array:
        found: Array = (matrix.T if self.turned else matrix)[self.outputs]
        return found


class ExpertTensors(StoredTensors):
    """A checkpoint in which each expert's tensors are tensors of their own.

    Args:
        stored: the checkpoint, in which they may lie in stacks ``[experts, n, k]``.
        number: experts of each layer that has some.
        family: the ``model_type`` whose stacks these are; empty for those of GGUF files.
        stack: names of stacks, as a pattern of what is before and after a matrix's number.

    Raises:
        ModelLoadError: a stack is not one of so many matrices, or a matrix appears twice.
    """

    _where: dict[str, _Place]

    def __init__(
        self,
        stored: StoredTensors,
        number: int,
        family: str = "",
        stack: re.Pattern[str] = _STACK,
    ) -> None:
        self.stored, self._in_turn = stored, family in IN_TURN
        self._inputs_first = family in INPUTS_FIRST
        self._where = {}
        for name in stored:
            match = stack.fullmatch(name)
            if match is None:
                self._add(name, _Place(name))
                continue
            shape, end = stored.shape_of(name), _ENDS.get(match[3], match[3])
            if len(shape) != _DIMENSIONS[end] or shape[0] != number:
                raise ModelLoadError(
                    f"tensor {name} has shape {shape}; the configuration needs a stack of {number} "
                    "matrices"
                )
            for expert in range(number):
                prefix = f"{match[1]}.{expert}" + ("." if match[2] else "")
                self._add_expert(name, prefix, match[2], end, expert)

    def _add_expert(self, stored: str, prefix: str, part: str, end: str, expert: int) -> None:
        turned = self._inputs_first and end == ".weight"
        if not self._in_turn or part != "gate_up_proj":
            self._add(prefix + part + end, _Place(stored, expert, turned=turned))
            return
        for first, half in enumerate(("gate_proj", "up_proj")):
            outputs = slice(first, None, 2)
            self._add(prefix + half + end, _Place(stored, expert, outputs, turned))

    def _add(self, name: str, place: _Place) -> None:
        if name in self._where:
            raise ModelLoadError(f"{name} appears twice, by itself and in a stack of experts")
        self._where[name] = place

    def _place(self, name: str) -> _Place:
        # What is not there is looked up there, which says so.
        return self._where.get(name, _Place(name))

    def __getitem__(self, name: str) -> Array:
        place = self._place(name)
        if place.expert is None:
            return self.stored[place.stored]
        return place.of(self.stored.rows(place.stored, place.expert, place.expert + 1)[0])

    def rows(self, name: str, first: int, last: int) -> Array:
        place = self._place(name)
        if place.expert is None:
            return self.stored.rows(place.stored, first, last)
        return self[name][first:last]

    def as_stored(self, name: str) -> StoredRows | None:
        place = self._place(name)
        if place.turned:
            return None
        found = self.stored.as_stored(place.stored)
        if place.expert is None or found is None:
            return found
        return StoredRows(found.format, place.of(found.rows[place.expert]), found.order)

    def shape_of(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = self.stored.shape_of(place.stored)
        if place.expert is None:
            return shape
        outputs, *others = shape[:0:-1] if place.turned else shape[1:]
        return len(range(outputs)[place.outputs]), *others

    def file_part(self, name: str) -> FilePart | None:
        place = self._place(name)
        return self.stored.file_part(place.stored) if place.expert is None else None

    def type_of(self, name: str) -> str:
        return self.stored.type_of(self._place(name).stored)

    def num_bytes(self) -> int:
        return self.stored.num_bytes()

    def release(self, name: str) -> None:
        self.stored.release(self._place(name).stored)
