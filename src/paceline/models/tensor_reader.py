"""Tensors of a checkpoint as a backend's packed linears and vectors. Knows no file and no layer.

Linears come in three forms: floats, which the backend packs; bytes of the format in which the file
has them, which a backend that computes in the file's own formats takes as they are; and packed ones
(:mod:`paceline.disk.packed_folder`), ready to use. One linear is in memory as floats at a time.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import PACKED_DTYPES
from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.backend import PackedLinear, PackedOps, PackedPart, WeightOps, WeightPart
from paceline.models.config import ModelConfig
from paceline.models.heads import mtp_layers_behind
from paceline.tensors.arrays import FLOAT_NAMES, Array
from paceline.tensors.arrays import floats as as_floats
from paceline.tensors.quantised_blocks import FLOAT_BYTES, FORMATS, row_bytes
from paceline.tensors.stored import StoredTensors

Join = Callable[[Sequence[Any]], Any]
log = logging.getLogger(__name__)


class TensorReader:
    """Takes tensors out of a checkpoint under their Hugging Face names, checking their shapes."""

    def __init__(self, tensors: Mapping[str, Any], config: ModelConfig, ops: WeightOps) -> None:
        self._tensors = tensors
        self.config = config
        self.ops = ops
        self._rounded: Counter[str] = Counter()  # tensors per stored type
        self._used: set[str] = set()

    def take(self, name: str, *shape: int) -> Any:
        tensor = self._tensors[name]
        self._check_shape(name, tuple(tensor.shape), shape)
        self._used.add(name)
        return tensor

    def floats(self, name: str, *shape: int) -> Any:
        """A tensor of weights, which can be of a type with floats of 16 bits or more alone."""
        tensor = self.take(name, *shape)
        self._check_floats(name, tensor)
        return tensor

    def _check_floats(self, name: str, tensor: Any) -> None:
        check_floats(name, tensor, self._type_of(name, str(tensor.dtype)))

    @staticmethod
    def _check_shape(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {found}; the configuration needs {shape}"
            )

    def norm(self, name: str, size: int) -> Any:
        """A norm of rows: ``[size]``, or of a layer norm ``[2, size]``, weights and biases."""
        if not self.config.norms.layer_norm:
            return self.packed_norm(self.vector(name, size))
        weight = self.vector(name, size)
        bias = weight * 0
        if self.config.norms.bias:
            bias = self.vector(name.removesuffix("weight") + "bias", size)
        if self.config.norms.plus_one:
            weight = weight + 1
        rows = [weight.reshape(1, size), bias.reshape(1, size)]
        return self.ops.pack_vector(self.ops.join(rows))

    def host_norm(self, name: str, size: int) -> Any:
        """As :meth:`norm`, for a norm that no backend computes."""
        weight = as_floats(self.floats(name, size))
        return weight + np.float32(1.0) if self.config.norms.plus_one else weight

    def vector(self, name: str, *shape: int) -> Any:
        """Floats that no linear is made of."""
        return self.floats(name, *shape)

    def packed_vector(self, name: str, *shape: int) -> Any:
        """The same as the backend keeps them."""
        return self.ops.pack_vector(self.vector(name, *shape))

    def has(self, name: str) -> bool:
        return name in self._tensors

    def has_linear(self, name: str) -> bool:
        return self.has(f"{name}.weight") or self.is_packed(name)

    def is_packed(self, linear: str) -> bool:
        return bool(packed_formats(self._tensors, linear))

    def leave_out(self, names: Iterable[str]) -> None:
        """Have tensors count as used, which some checkpoints have and no decoder reads."""
        self._used.update(names)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def packed_norm(self, weight: Any) -> Any:
        packed = self.ops.pack_vector(weight)
        return packed + 1.0 if self.config.norms.plus_one else packed

    def linear(self, names: list[str], fused: str, outs: list[int], width: int, bias: bool) -> Any:
        """One packed linear out of several stacked ones, or out of their fused form."""
        if self.is_packed(fused):
            return self._adopted(fused, outs, width, bias)
        if fused + ".weight" in self._tensors:
            names, outs = [fused], [sum(outs)]
        vector = self._joined_bias(names, outs, bias)
        with _naming(fused):
            parts = [
                self._part(f"{name}.weight", out, width)
                for name, out in zip(names, outs, strict=True)
            ]
            parts = _stacked(parts, self.ops.join)
            packed = self.ops.pack_linear(parts, width, vector)
        self._release([f"{name}.weight" for name in names])
        return packed

    def single(self, name: str, out: int, width: int, bias: bool = False) -> Any:
        """A linear that is by itself."""
        return self.linear([name], name, [out], width, bias)

    def float_linear(
        self, names: list[str], fused: str, outs: list[int], width: int, bias: bool
    ) -> Any:
        """A linear of several stacked ones that is float32 on every backend.

        One with a single output may be stored as a vector.
        """
        if self.is_packed(fused):
            return self._adopted(fused, [sum(outs)], width, bias)
        weights = []
        for name, out in zip((f"{n}.weight" for n in names), outs, strict=True):
            is_vector = out == 1 and self._tensors[name].ndim == 1
            weight = self.floats(name, *([width] if is_vector else [out, width]))
            wide = as_floats(weight) if isinstance(weight, np.ndarray) else weight
            weights.append(wide.reshape(out, width))
        whole = self.ops.join(weights)
        rows = whole.view(np.uint8) if isinstance(whole, np.ndarray) else whole
        part = WeightPart(sum(outs), lambda first, last: rows[first:last], "F32")
        return self.ops.pack_linear([part], width, self._joined_bias(names, outs, bias))

    def _joined_bias(self, names: list[str], outs: list[int], bias: bool) -> Any:
        """That of stacked linears; None where they have none."""
        if not bias:
            return None
        pairs = zip(names, outs, strict=True)
        return self.ops.join([self.floats(f"{name}.bias", out) for name, out in pairs])

    def _part(self, weight: str, n: int, width: int) -> WeightPart:
        """Rows of a matrix: as they are stored where the backend takes them so."""
        stored = self._as_stored(weight, n, width)
        if stored is not None:
            return stored
        part = WeightPart.of(self.floats(weight, n, width))
        self._rounded[self._type_of(weight, "floats")] += 1
        return part

    def _as_stored(self, weight: str, n: int, width: int) -> WeightPart | None:
        tensors = self._tensors
        if self.ops.dtype != "file" or not isinstance(tensors, StoredTensors):
            return None
        found = tensors.as_stored(weight)
        if found is None:
            return None
        form, rows, order = found
        self._check_shape(weight, tensors.shape_of(weight), (n, width))
        if tuple(rows.shape) != (n, row_bytes(form, width)):
            raise ModelLoadError(f"tensor {weight} has {tuple(rows.shape)} bytes of {form}")
        self._used.add(weight)
        return WeightPart(n, lambda first, last: rows[first:last], form, order)

    def end(
        self,
        name: str,
        n: int,
        pack: Callable[[WeightPart, int], Any],
        width: int = 0,
        bias: bool = False,
    ) -> Any:
        """Embedding or head, which are large, without unpacking them as a whole.

        Args:
            bias: whether there is one where it is packed; ``pack`` knows it where it is not.
        """
        weight, tensors = name + ".weight", self._tensors
        width = width or self.config.hidden_size
        if packed_formats(tensors, name):
            return self._adopted(name, [n], width, bias)
        with _naming(name):
            part = self._as_stored(weight, n, width)
            if part is None and isinstance(tensors, StoredTensors):
                self._check_shape(weight, tensors.shape_of(weight), (n, width))
                self._check_floats(weight, tensors.rows(weight, 0, 1))
                self._used.add(weight)
                part = WeightPart(n, partial(tensors.rows, weight))
            packed = pack(part or WeightPart.of(self.floats(weight, n, width)), width)
        self._release([weight])
        return packed

    def _adopted(self, name: str, outs: list[int], k: int, bias: bool) -> Any:
        """A linear of a packed folder: one part, or one for each of the stacked linears."""
        assert isinstance(self.ops, PackedOps), "packed weights need a backend that takes them"
        parts = packed_parts(self._tensors, name, outs)
        for index, part in enumerate(parts):
            kinds = (part.format,) if part.order is None else (part.format, ORDER)
            self._used.update(packed_name(name, index, kind) for kind in kinds)
        if (f"{name}.bias" in self._tensors) != bias:
            raise ModelLoadError(
                f"{name} is not packed as the configuration says: it has "
                f"{'no' if bias else 'a'} bias"
            )
        vector = None
        if bias:
            self._used.add(f"{name}.bias")
            vector = self._tensors[f"{name}.bias"]
        with _naming(name):
            return self.ops.adopt(PackedLinear(parts, vector, k))

    def check_all_used(self) -> None:
        """Raise :class:`UnsupportedModelError` where the checkpoint has more than what was read."""
        check_leftovers(self._tensors, self._used)

    def log_rounding(self) -> None:
        """Say what was rounded to another format while loading, and how much that changed it."""
        for rounding in self.ops.roundings():
            log.info(
                "rounded to %s: %s; relative RMS error %.2f%%",
                rounding.format,
                ", ".join(f"{n} tensors of {kind}" for kind, n in sorted(self._rounded.items())),
                100 * rounding.relative,
            )

    def _type_of(self, name: str, default: str) -> str:
        tensors = self._tensors
        return tensors.type_of(name) if isinstance(tensors, StoredTensors) else default

    def _release(self, names: list[str]) -> None:
        if isinstance(self._tensors, StoredTensors):
            for name in names:
                self._tensors.release(name)


def stacked_rows(join: Join, parts: list[Any], first: int, last: int) -> Any:
    """Rows ``first:last`` of matrices on top of each other, without stacking the others."""
    found = []
    for part in parts:
        rows = part[max(first, 0) : max(last, 0)]
        if len(rows):
            found.append(rows)
        first, last = first - len(part), last - len(part)
    return found[0] if len(found) == 1 else join(found)


def _stacked(parts: list[WeightPart], join: Join) -> list[WeightPart]:
    """One part where all are of the same format and have their inputs in the same order."""
    first = parts[0]
    if not all(_are_alike(first, part) for part in parts[1:]):
        return parts
    whole = [part.read(0, part.num_outputs) for part in parts]
    count = sum(part.num_outputs for part in parts)
    return [WeightPart(count, partial(stacked_rows, join, whole), first.format, first.order)]


def _are_alike(first: WeightPart, other: WeightPart) -> bool:
    if first.order is None or other.order is None:
        return first.format == other.format and first.order is other.order
    return first.format == other.format and np.array_equal(first.order, other.order)


@contextmanager
def _naming(linear: str) -> Iterator[None]:
    """Refusals of a backend, such as that of a NaN among the weights, name their linear."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"the weights of {linear} cannot be used: {error}") from error


FORMAT, VERSION = "paceline-packed", "3"
PACKED_FORMATS = (*FORMATS, *FLOAT_BYTES, "F8_128")
ORDER = "order"
"""How the name of the tensor ends that holds the order of a part's inputs."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """What the files of such a folder say of themselves.

    Attributes:
        dtype: what the model was converted to, one of :data:`~paceline.config.PACKED_DTYPES`.
    """

    dtype: str

    @property
    def metadata(self) -> dict[str, str]:
        return {"format": FORMAT, "version": VERSION, "dtype": self.dtype}


def folder_format(files: Sequence[Mapping[str, str]], where: Path) -> PackedFormat | None:
    """The format that the metadata of a folder's files speak of; None for other checkpoints.

    Raises:
        ModelLoadError: the files differ, or are of a version or a dtype that is not known.
    """
    if not any(metadata.get("format") == FORMAT for metadata in files):
        return None
    said = files[0]
    if any(metadata != said for metadata in files):
        raise ModelLoadError(f"the files in {where} were not converted together; convert again")
    if said.get("version") != VERSION or said.get("dtype") not in PACKED_DTYPES:
        raise ModelLoadError(
            f"{where} is packed as {str(said.get('dtype'))[:20]!r} in version "
            f"{str(said.get('version'))[:20]!r} of the format; {' and '.join(PACKED_DTYPES)} in "
            f"version {VERSION} are supported: convert the model again"
        )
    return PackedFormat(said["dtype"])


def packed_name(linear: str, index: int, kind: str) -> str:
    """The tensor that holds a part of a packed linear: a format's name or :data:`ORDER`."""
    return f"{linear}.{index}.{kind}"


def packed_formats(tensors: Mapping[str, Array], linear: str) -> list[str]:
    """The formats of a packed linear's parts; empty where it is not packed."""
    found: list[str] = []
    while True:
        names = (
            form for form in PACKED_FORMATS if packed_name(linear, len(found), form) in tensors
        )
        form = next(names, None)
        if form is None:
            return found
        found.append(form)


def packed_parts(tensors: Mapping[str, Array], linear: str, outs: list[int]) -> list[PackedPart]:
    """The parts of a packed linear: one, or one for each of the stacked linears."""
    formats = packed_formats(tensors, linear)
    if len(formats) not in (1, len(outs)):
        raise ModelLoadError(
            f"{linear} is not packed as the configuration says: it has {len(formats)} parts; "
            f"needed are 1 or {len(outs)}"
        )
    counts = [sum(outs)] if len(formats) == 1 else outs
    parts = []
    for index, (form, count) in enumerate(zip(formats, counts, strict=True)):
        order = packed_name(linear, index, ORDER)
        ordered = tensors[order] if order in tensors else None  # noqa: SIM401 (get of a lazy mapping)
        data = tensors[packed_name(linear, index, form)]
        parts.append(PackedPart(form, data, count, ordered))
    return parts


_SHOWN = 4
# What follows from the configuration, or belongs to parts that plain decoding of text does not run.
_HARMLESS = re.compile(
    r"""
    (.*\.)? rotary_emb \. (inv_freq | cos_cached | sin_cached)  # tables that are computed anew
    | .*\. attn_rot_embd \. weight                               # the same in GGUF files
    | (.*\.)? masked_bias                                        # a constant of old exports
    | t2d                                                        # follows from d2t
    | (model\.)? (visual | vision_tower | vision_model | audio_tower) \. .*
    | (model\.)? (multi_modal_projector | embed_vision | embed_audio) \. .*
    | (model\.)? image_newline
    | (v | a | mm) \. .*                                          # these parts in GGUF files
    | v_head \. .*                                               # values, for training alone
    | (model\.)? (mtp | mtp_layers) \. .*                         # drafts of several tokens
    """,
    re.VERBOSE,
)


def is_harmless(name: str) -> bool:
    """Whether a tensor may stay unread."""
    return _HARMLESS.fullmatch(name) is not None


def check_leftovers(tensors: Mapping[str, Any], used: Collection[str]) -> None:
    """Refuse a checkpoint that has more than what was used of it.

    A tensor that is left out in silence (the scales of quantised weights, a bias, a router) makes
    another model of the checkpoint, so all but a few known ones are an error.

    A bias of zeros adds nothing; some tools write one for every linear.

    Args:
        tensors: all that it has.
        used: those that the decoder took.

    Raises:
        UnsupportedModelError: some of the others are not known to be harmless.
    """
    left = sorted(name for name in tensors if name not in used and not is_harmless(name))
    behind = [p for p in mtp_layers_behind(left) if not any(n.startswith(p) for n in used)]
    left = [name for name in left if not name.startswith(tuple(behind))]
    left = [name for name in left if not name.endswith(".bias") or _adds_something(tensors, name)]
    if left:
        shown = ", ".join(name[:80] for name in left[:_SHOWN])
        raise UnsupportedModelError(
            f"the configuration has no use for {len(left)} of the checkpoint's tensors: {shown}"
            f"{', ...' if len(left) > _SHOWN else ''}; without them it would be another model. "
            "Either config.json does not describe this checkpoint, or it is of a kind that is not "
            "supported, such as a quantised one"
        )


def _adds_something(tensors: Mapping[str, Any], name: str) -> bool:
    try:
        return bool((tensors[name] != 0).any())
    except ModelLoadError:  # not of the shape that it would have
        return True


def check_floats(name: str, tensor: Any, kind: str) -> None:
    """Refuse weights that are not floats of 16 bits or more, and so need scales to be read."""
    if str(tensor.dtype).removeprefix("torch.") not in FLOAT_NAMES:
        raise UnsupportedModelError(
            f"tensor {name} is of type {kind}, which is not a weight by itself: the checkpoint is "
            "quantised, and config.json does not say how. Use its unquantised form with --dtype "
            "int8, or a GGUF file"
        )
