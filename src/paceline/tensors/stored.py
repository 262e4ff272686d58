"""A checkpoint's tensors under their Hugging Face names, and how they lie in its files.

Owns what a source of weights may offer beyond a look-up, how a part of a tensor is taken (some of
its rows, a transpose, one of a stack) in floats and as bytes, and one set of names for mixtures of
experts, however they are stored. A mixture is under ``model.layers.I.mlp.``: the router
``gate.weight``, matrices of each expert ``experts.N.{gate,up,down}_proj.weight``, or
``gate_up_proj`` for the first two, those of the shared expert ``shared_expert.*`` likewise,
``shared_expert_gate.weight``, and what is added to the scores for the choice,
``gate.e_score_correction.bias``; biases have the same names with ``.bias``. Checkpoints differ in
these names, and many keep what all experts have in one stack. Knows no arithmetic.
"""

from __future__ import annotations

import copy
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from paceline.core.errors import ModelLoadError
from paceline.tensors.arrays import Array, as_bytes
from paceline.tensors.placement import Placement
from paceline.tensors.quantised_blocks import FLOAT_BYTES, FORMATS, decode

PAGE = mmap.PAGESIZE


class StoredRows(NamedTuple):
    """A matrix ``[n, k]`` as bytes.

    Attributes:
        format: a name that :func:`paceline.tensors.quantised_blocks.row_bytes` knows.
        rows: uint8 ``[n, bytes of a row]``.
        order: int32 ``[k]``, which input each column is of; None where they are in their order.
    """

    format: str
    rows: Array
    order: Array | None = None


class FilePart(NamedTuple):
    """Bytes of a file, one after another."""

    path: Path
    offset: int
    num_bytes: int


class StoredTensors(Mapping[str, Array]):
    """Lazy mapping, whose lookups raise ``ModelLoadError``. Subclasses fill ``_where``.

    Attributes:
        in_use: while this lives, what is stored is not removed; None where nothing says so.
        stream: brings what does not stay in memory (:mod:`paceline.disk.streaming`); None where
            everything stays.
        placement: which tensors these are; None where everything stays.
    """

    _where: dict[str, Any]
    in_use: object = None
    stream: Any = None
    placement: Placement | None = None

    def only(self, names: Iterable[str]) -> Self:
        """The same without the other tensors."""
        found = copy.copy(self)
        found._where = {name: self._where[name] for name in names}
        return found

    def type_of(self, name: str) -> str:
        """The stored type, by the format's own name."""
        raise NotImplementedError

    def as_stored(self, name: str) -> StoredRows | None:
        """A matrix ``[n, k]`` in the format in which it is stored; None for other formats.

        Its rows are in their Hugging Face order.
        """
        return None

    def num_bytes(self) -> int:
        """Of all tensors as they are stored."""
        return sum(self[name].nbytes for name in self)

    def file_part(self, name: str) -> FilePart | None:
        """Where the whole tensor lies as it is; None where it does not, or nobody knows."""
        return None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def rows(self, name: str, first: int, last: int) -> Array:
        """Rows ``first:last`` of the embedding or the head, without unpacking the others."""
        return self[name][first:last]

    def release(self, name: str) -> None:
        """Let go of the pages through which a tensor was read; it can be read again."""

    # Mapping's own versions of these wait for a KeyError.
    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (this is `get`)


class RenamedTensors(StoredTensors):
    """Some of a checkpoint's tensors under other names.

    Args:
        tensors: the checkpoint.
        names: new name -> name there.
        swapped: a new name, of a matrix whose inputs' two halves change places; empty for none.
    """

    def __init__(self, tensors: StoredTensors, names: Mapping[str, str], swapped: str = "") -> None:
        self._tensors, self._where, self._swapped = tensors, dict(names), swapped

    def _name(self, name: str) -> str:
        if name not in self._where:
            raise ModelLoadError(f"there is no tensor for {name}")
        return str(self._where[name])

    def __getitem__(self, name: str) -> Array:
        tensor = self._tensors[self._name(name)]
        if name != self._swapped or tensor.ndim != 2:
            return tensor
        return np.roll(tensor, tensor.shape[1] // 2, axis=1)

    def type_of(self, name: str) -> str:
        return self._tensors.type_of(self._name(name))

    def as_stored(self, name: str) -> StoredRows | None:
        if name == self._swapped or name not in self._where:
            return None
        return self._tensors.as_stored(self._name(name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape_of(self._name(name))

    def rows(self, name: str, first: int, last: int) -> Array:
        if name == self._swapped:
            return self[name][first:last]
        return self._tensors.rows(self._name(name), first, last)

    def release(self, name: str) -> None:
        self._tensors.release(self._name(name))


def drop_pages(source: mmap.mmap, start: int, end: int) -> None:
    """Give back the memory of whole pages within bytes ``start:end`` that nobody wrote to."""
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    if first < last and hasattr(source, "madvise"):
        source.madvise(mmap.MADV_DONTNEED, first, last - first)


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        stored: the checkpoint's name of what it lies in.
        rows: which of its rows, in the order in which they are wanted; None: all.
        total: rows that there must be, or matrices of a stack.
        matrix: which one of a stack; None where it lies in none.
        transposed: whether it lies as its transpose.
    """

    stored: str
    rows: Array | slice | None = None
    total: int = 0
    matrix: int | None = None
    transposed: bool = False


class PlacedTensors(StoredTensors):
    """A checkpoint in which each part that a decoder reads is a tensor of its own.

    Subclasses fill ``_where``; a name that is not in it is looked up as it is, which says so where
    there is no such tensor.
    """

    _where: dict[str, Place]

    def __init__(self, stored: StoredTensors) -> None:
        self.stored = stored
        self._unpacked: tuple[str, Array] | None = None
        self._where = {}

    def _place(self, name: str) -> Place:
        return self._where.get(name, Place(name))

    def __getitem__(self, name: str) -> Array:
        place = self._place(name)
        if self._unpacked is None or self._unpacked[0] != place.stored:
            self._unpacked = place.stored, self.stored[place.stored]
        found = _picked(place, self._unpacked[1])
        return np.ascontiguousarray(found.T) if place.transposed else found

    def rows(self, name: str, first: int, last: int) -> Array:
        place = self._place(name)
        if place.rows is None and place.matrix is None:
            return self.stored.rows(place.stored, first, last)
        blocks = None if place.transposed else self.as_stored(name)
        if blocks is None or blocks.format not in FORMATS or blocks.order is not None:
            return self[name][first:last]
        # A stack of experts may have more weights than there is memory for as floats.
        found: Array = decode(blocks.format, blocks.rows[first:last]).floats()
        return found[:, : self.shape_of(name)[1]]

    def as_stored(self, name: str) -> StoredRows | None:
        place = self._place(name)
        if place.transposed:
            kind = self.type_of(name)
            return StoredRows(kind, as_bytes(self[name])) if kind in FLOAT_BYTES else None
        found = self.stored.as_stored(place.stored)
        return found and found._replace(rows=_picked(place, found.rows))

    def shape_of(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = self.stored.shape_of(place.stored)
        if place.matrix is not None:
            return shape[1:]
        if place.rows is not None:
            picked = place.rows
            count = picked.stop - picked.start if isinstance(picked, slice) else len(picked)
            shape = (count, *shape[1:])
        return shape[::-1] if place.transposed else shape

    def file_part(self, name: str) -> FilePart | None:
        place = self._place(name)
        is_whole = place.rows is None and place.matrix is None and not place.transposed
        return self.stored.file_part(place.stored) if is_whole else None

    def type_of(self, name: str) -> str:
        return self.stored.type_of(self._place(name).stored)

    def num_bytes(self) -> int:
        return self.stored.num_bytes()

    def release(self, name: str) -> None:
        self._unpacked = None
        self.stored.release(self._place(name).stored)


def _picked(place: Place, rows: Array) -> Array:
    if place.matrix is not None:
        if rows.ndim != 3 or len(rows) != place.total:
            raise ModelLoadError(
                f"tensor {place.stored} has shape {rows.shape}; the configuration needs a "
                f"stack of {place.total} matrices"
            )
        one: Array = rows[place.matrix]
        return one
    if place.rows is None:
        return rows
    if not rows.ndim or len(rows) != place.total:
        raise ModelLoadError(
            f"tensor {place.stored} has shape {rows.shape}; the configuration needs "
            f"{place.total} rows"
        )
    found: Array = rows[place.rows]
    return found


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
