"""Layers whose weights do not stay in memory: which, and where in their files they are read.

Owns the choice of layers. Reading is ``csrc/layer_stream.h``'s; bits do not depend on it. Files in
other layouts than that of ``paceline convert`` would have to be packed again in every step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import ConfigError
from paceline.models.arrays import Array
from paceline.models.ops.native import native_module
from paceline.models.pages import Arena
from paceline.models.stored import FilePart, StoredTensors

log = logging.getLogger(__name__)
SLOTS = 3
"""Layers in memory of those that are read: one computes, two come."""
READERS = 2
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.")
LEAST_BYTES = 1 << 16
"""What is smaller stays in memory."""


_Parts = dict[str, FilePart]


class Placement(NamedTuple):
    """What of a model stays in memory.

    Attributes:
        streamed: layers that do not, in their order.
        resident_bytes: that stay, with the memory of those that come and go.
        streamed_bytes: that every step reads.
    """

    streamed: tuple[int, ...]
    resident_bytes: int
    streamed_bytes: int


def place_layers(layers: Sequence[int], others: int, limit: int) -> Placement:
    """Stream as few layers as the limit allows, evenly between those that stay.

    Args:
        layers: bytes of each that could be streamed.
        others: bytes that have to stay.
        limit: bytes for all weights.

    Raises:
        ConfigError: what has to stay is more than that.
    """
    whole, largest = sum(layers), max(layers)
    if others + whole <= limit:
        return Placement((), others + whole, 0)
    least = others + SLOTS * largest
    if least > limit:
        raise ConfigError(
            f"--weight-memory is {limit / 1e6:.0f} MB; this model needs {least / 1e6:.0f} or more: "
            f"its embedding and its head, and {SLOTS} of its {len(layers)} layers"
        )
    count = SLOTS
    while others + SLOTS * largest + whole - sum(layers[i] for i in _spread(count, layers)) > limit:
        # Whole rounds, so that the first layer of a step can come while the last ones compute.
        count = min(count + SLOTS, len(layers))
    streamed = _spread(count, layers)
    num_bytes = sum(layers[i] for i in streamed)
    return Placement(streamed, others + SLOTS * largest + whole - num_bytes, num_bytes)


def _spread(count: int, layers: Sequence[int]) -> tuple[int, ...]:
    """So many layers at even distances."""
    return tuple((2 * i + 1) * len(layers) // (2 * count) for i in range(count))


class StreamedTensors(StoredTensors):
    """A packed checkpoint, some of whose layers have their place and come when they are needed.

    Args:
        tensors: all of them.
        num_layers: of the model.
        limit: bytes for all weights.

    Attributes:
        stream: what a decoder of these tensors needs, a ``LayerStream``; None where all fit.
        placement: which layers it reads.

    Raises:
        ConfigError: the limit is too small, or this system cannot read so.
    """

    def __init__(self, tensors: StoredTensors, num_layers: int, limit: int) -> None:
        self._tensors, self._where = tensors, dict.fromkeys(tensors)
        self._arrays: dict[str, Array] = {}
        self._arena = Arena()
        self.stream: Any = None
        parts = _streamable(tensors, num_layers)
        self.placement = _placed(tensors, parts, limit)
        if self.placement.streamed:
            streamed = self.placement.streamed
            self._open([part if i in streamed else {} for i, part in enumerate(parts)])
            log.info(
                "%d of %d layers are read from disk in every step, %.2f GB; %.2f GB stay in memory",
                len(self.placement.streamed),
                num_layers,
                self.placement.streamed_bytes / 1e9,
                self.placement.resident_bytes / 1e9,
            )

    def _open(self, parts: Sequence[_Parts]) -> None:
        paths = list(dict.fromkeys(each.path for layer in parts for each in layer.values()))
        extents = [
            [(paths.index(each.path), each.offset, each.num_bytes) for each in layer.values()]
            for layer in parts
        ]
        try:
            stream = native_module().LayerStream(list(map(str, paths)), extents, SLOTS, READERS)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"--weight-memory cannot be kept here: {error}") from error
        self.stream = stream
        for index, layer in enumerate(parts):
            for at, (name, each) in enumerate(layer.items()):
                self._arrays[name] = stream.array(index, at, each.num_bytes)

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


def placement_of(tensors: StoredTensors, num_layers: int, limit: int) -> Placement:
    """As :class:`StreamedTensors` would place a model's layers, without opening anything.

    Raises:
        ConfigError: the limit is too small.
    """
    return _placed(tensors, _streamable(tensors, num_layers), limit)


def _placed(tensors: StoredTensors, parts: Sequence[_Parts], limit: int) -> Placement:
    sizes = [sum(each.num_bytes for each in layer.values()) for layer in parts]
    return place_layers(sizes, tensors.num_bytes() - sum(sizes), limit)


def _streamable(tensors: StoredTensors, num_layers: int) -> list[_Parts]:
    """Of each layer the large tensors of packed bytes, as they lie in files."""
    found: list[_Parts] = [{} for _ in range(num_layers)]
    for name in tensors:
        match = _IN_LAYER.match(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        part = tensors.file_part(name)
        if part is not None and part.num_bytes >= LEAST_BYTES and tensors.type_of(name) == "U8":
            found[int(match[1])][name] = part
    return found
