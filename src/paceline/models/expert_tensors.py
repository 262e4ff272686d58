"""The tensors of mixtures of experts under one set of names, however they are stored.

A mixture is under ``model.layers.I.mlp.``: the router ``gate.weight``, matrices of each expert
``experts.N.{gate,up,down}_proj.weight`` or ``gate_up_proj`` for the first two, those of the shared
expert ``shared_expert.*`` likewise, ``shared_expert_gate.weight``, and what is added to the scores
for the choice, ``gate.e_score_correction.bias``. Checkpoints differ in these names, and many keep
the matrices of all experts in one stack. Knows no arithmetic.
"""

from __future__ import annotations

import re

from paceline.errors import ModelLoadError
from paceline.models.arrays import Array
from paceline.models.stored import StoredRows, StoredTensors

_RENAMED = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
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
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
    )
)
_MARKS = re.compile(
    r"\.(block_sparse_moe|shared_mlp|shared_experts|wg|e_score_correction_bias)(\.|$)"
)
_STACK = re.compile(r"(.*\.mlp\.experts)\.((?:gate|up|gate_up|down)_proj)(\.weight)?")


def plain_expert_name(name: str) -> str:
    """What a tensor of a mixture would be called by the names above; others keep their name."""
    if _MARKS.search(name):
        for pattern, plain in _RENAMED:
            name = pattern.sub(plain, name)
    return name


class ExpertTensors(StoredTensors):
    """A checkpoint in which each expert's matrices are tensors of their own.

    Args:
        stored: the checkpoint, in which they may lie in stacks ``[experts, n, k]``.
        number: experts of each layer that has some.

    Raises:
        ModelLoadError: a stack is not one of so many matrices, or a matrix is there twice.
    """

    _where: dict[str, tuple[str, int | None]]

    def __init__(self, stored: StoredTensors, number: int) -> None:
        self.stored = stored
        self._where = {}
        for name in stored:
            match = _STACK.fullmatch(name)
            if match is None:
                self._add(name, name, None)
                continue
            shape = stored.shape_of(name)
            if len(shape) != 3 or shape[0] != number:
                raise ModelLoadError(
                    f"tensor {name} has shape {shape}; the configuration needs a stack of {number} "
                    "experts"
                )
            for expert in range(number):
                self._add(f"{match[1]}.{expert}.{match[2]}.weight", name, expert)

    def _add(self, name: str, stored: str, expert: int | None) -> None:
        if name in self._where:
            raise ModelLoadError(f"{name} is there twice, by itself and in a stack of experts")
        self._where[name] = stored, expert

    def _place(self, name: str) -> tuple[str, int | None]:
        # What is not there is looked up there, which says so.
        return self._where.get(name, (name, None))

    def __getitem__(self, name: str) -> Array:
        stored, expert = self._place(name)
        if expert is None:
            return self.stored[stored]
        found: Array = self.stored.rows(stored, expert, expert + 1)[0]
        return found

    def rows(self, name: str, first: int, last: int) -> Array:
        stored, expert = self._place(name)
        if expert is None:
            return self.stored.rows(stored, first, last)
        return self[name][first:last]

    def as_stored(self, name: str) -> StoredRows | None:
        stored, expert = self._place(name)
        found = self.stored.as_stored(stored)
        if expert is None or found is None:
            return found
        return StoredRows(found.format, found.rows[expert], found.order)

    def shape_of(self, name: str) -> tuple[int, ...]:
        stored, expert = self._place(name)
        shape = self.stored.shape_of(stored)
        return shape if expert is None else shape[1:]

    def type_of(self, name: str) -> str:
        return self.stored.type_of(self._place(name)[0])

    def num_bytes(self) -> int:
        return self.stored.num_bytes()

    def release(self, name: str) -> None:
        self.stored.release(self._place(name)[0])
