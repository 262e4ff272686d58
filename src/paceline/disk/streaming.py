"""Weights that do not stay in memory: which, and where in their files they are read.

Of a dense model some layers are read in every step (``csrc/disk/layer_stream.h``). Of a mixture
all stays but the experts, which have a cache (``csrc/disk/expert_cache.h``). Owns the choice; bits
do not depend on it. Files in other layouts than that of ``paceline convert`` would have to be
packed again in every step, so they are packed once (:mod:`paceline.disk.packed_cache`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.backends.native.native import native_module
from paceline.core.errors import ConfigError
from paceline.tensors.arrays import Arena, Array
from paceline.tensors.placement import SLOTS, Placement, place_experts, place_layers
from paceline.tensors.stored import FilePart, StoredTensors

log = logging.getLogger(__name__)
READERS = 4
EXPERT_READERS = 16
"""Reads of experts at once."""
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.")
LEAST_BYTES = 1 << 16
"""What is smaller stays in memory."""


_Parts = dict[str, FilePart]
_Experts = dict[int, _Parts]


class StreamedTensors(StoredTensors):
    """A packed checkpoint of which some weights have their place and come when they are needed.

    Args:
        tensors: all of them.
        num_layers: of the model.
        limit: bytes for all weights.

    Attributes:
        stream: what a decoder of these tensors needs, a ``LayerStream`` or an ``ExpertCache``; None
            where all fit.
        placement: what it reads.

    Raises:
        ConfigError: the limit is too small, or this system cannot read so.
    """

    def __init__(self, tensors: StoredTensors, num_layers: int, limit: int) -> None:
        self._tensors, self._where = tensors, dict.fromkeys(tensors)
        self.in_use = tensors.in_use
        self._arrays: dict[str, Array] = {}
        self._arena = Arena()
        experts, layers = _parts_of(tensors, num_layers)
        self.placement = placement = _placed(tensors, experts, layers, limit)
        if placement.experts:
            self._open_experts(experts, limit - tensors.num_bytes() + _size_of(experts))
        elif placement.streamed:
            streamed = placement.streamed
            self._open_layers([each if i in streamed else {} for i, each in enumerate(layers)])
        if placement.experts or placement.streamed:
            log.info("%s", placement.told(num_layers))

    def _open_layers(self, parts: Sequence[_Parts]) -> None:
        files = _Files(parts)
        extents = [list(map(files.extent, layer.values())) for layer in parts]
        self.stream = _opened("LayerStream", files.paths, extents, SLOTS, READERS)
        for index, layer in enumerate(parts):
            for at, name in enumerate(layer):
                self._arrays[name] = self.stream.array(index, at)

    def _open_experts(self, layers: Sequence[_Experts], room: int) -> None:
        files = _Files(part for experts in layers for part in experts.values())
        extents = [
            [list(map(files.extent, part.values())) for part in experts.values()]
            for experts in layers
        ]
        self.stream = _opened("ExpertCache", files.paths, extents, room, EXPERT_READERS)
        for index, experts in enumerate(layers):
            for number, part in enumerate(experts.values()):
                for at, name in enumerate(part):
                    self._arrays[name] = self.stream.array(index, number, at)

    def __getitem__(self, name: str) -> Array:
        found = self._arrays.get(name)
        return self._held(name) if found is None else found

    def _held(self, name: str) -> Array:
        """A tensor that stays: in memory, where the system cannot take it for other files."""
        stored = self._tensors[name]
        held = self._arena.zeros(stored.nbytes, np.uint8).view(stored.dtype).reshape(stored.shape)
        held[...] = stored
        self._tensors.release(name)
        self._arrays[name] = held
        return held

    def type_of(self, name: str) -> str:
        return self._tensors.type_of(name)


class _Files:
    """The files of parts, by their place in a list."""

    def __init__(self, groups: Iterable[_Parts]) -> None:
        found = dict.fromkeys(each.path for group in groups for each in group.values())
        self._places = {path: place for place, path in enumerate(found)}
        self.paths = list(map(str, found))

    def extent(self, part: FilePart) -> tuple[int, int, int]:
        return self._places[part.path], part.offset, part.num_bytes


def _opened(kind: str, *arguments: Any) -> Any:
    try:
        return getattr(native_module(), kind)(*arguments)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--weight-memory cannot be kept here: {error}") from error


def _size(parts: Iterable[_Parts]) -> int:
    return sum(each.num_bytes for part in parts for each in part.values())


def _size_of(experts: Iterable[_Experts]) -> int:
    return _size(part for each in experts for part in each.values())


def placement_of(tensors: StoredTensors, num_layers: int, limit: int) -> Placement:
    """As :class:`StreamedTensors` would place a model's weights; else ``ConfigError``."""
    return _placed(tensors, *_parts_of(tensors, num_layers), limit)


def _placed(
    tensors: StoredTensors, experts: Sequence[_Experts], layers: Sequence[_Parts], limit: int
) -> Placement:
    if any(experts):
        of_experts = [[_size([part]) for part in each.values()] for each in experts if each]
        return place_experts(of_experts, tensors.num_bytes() - _size_of(experts), limit)
    sizes = [sum(each.num_bytes for each in layer.values()) for layer in layers]
    return place_layers(sizes, tensors.num_bytes() - sum(sizes), limit)


def _parts_of(tensors: StoredTensors, num_layers: int) -> tuple[list[_Experts], list[_Parts]]:
    """Of each layer the packed parts of its experts, or else its large ones, in their files."""
    experts: list[_Experts] = [{} for _ in range(num_layers)]
    layers: list[_Parts] = [{} for _ in range(num_layers)]
    for name in tensors:
        match = _IN_LAYER.match(name)
        if match is None or int(match[1]) >= num_layers or tensors.type_of(name) != "U8":
            continue
        part, expert = tensors.file_part(name), _EXPERT.match(name)
        if part is not None and expert is not None:
            experts[int(match[1])].setdefault(int(expert[2]), {})[name] = part
        elif part is not None and part.num_bytes >= LEAST_BYTES:
            layers[int(match[1])][name] = part
    return [dict(sorted(each.items())) for each in experts], layers
