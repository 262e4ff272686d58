"""A model in GGUF files: configuration, tensors and tokenizer. Owns only how they fit together.

Weights come out under their Hugging Face names and in their layout, unpacked when they are looked
up: 16- and 32-bit floats as they are, every quantised type as float32. The blocks of the formats
that :mod:`paceline.tensors.quantised_blocks` knows can be had as they are, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from paceline.core.installation import install_command
from paceline.loading.gguf.config import ROPE_TENSORS, config_from_gguf, hf_config_from_gguf
from paceline.loading.gguf.container import MAGIC, TensorInfo, read_shards
from paceline.loading.gguf.metadata import architecture_of
from paceline.loading.gguf.names import GgufPlace, layout_of, place_of
from paceline.models.config import ModelConfig
from paceline.models.families.family import Layout
from paceline.models.pooling import gguf_pooling
from paceline.request.sampling_params import LLAMA_CPP
from paceline.tensors.arrays import STORED_FLOATS, Array, floats
from paceline.tensors.quantised_blocks import FLOAT_BYTES, FORMATS
from paceline.tensors.stored import StoredRows, StoredTensors, drop_pages
from paceline.text.gguf_tokenizer import tokenizer_from_gguf
from paceline.text.tokenizer import Tokenizer

__all__ = ["MAGIC", "load_gguf"]
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
}
_PLAIN = {**STORED_FLOATS, "I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}


class GgufModel(NamedTuple):
    """What a GGUF file holds.

    Attributes:
        layout: of its tensors.
        hf_config: its metadata as a ``config.json`` would tell them.
        sampling: what its makers wrote into it, told as a ``generation_config.json``.
        pooling: how it was trained to make one vector of a text; empty where it does not say.
    """

    config: ModelConfig
    tensors: GgufTensors
    layout: Layout
    tokenizer: Tokenizer | None
    hf_config: Mapping[str, Any]
    sampling: Mapping[str, float]
    pooling: str


def load_gguf(path: Path, *, in_memory: bool = False, with_tokenizer: bool = True) -> GgufModel:
    """Open a GGUF file, or all shards of the model of which it is one.

    Raises:
        ConfigError: the ``gguf`` package is not installed.
        ModelLoadError: a file is truncated, corrupt, or missing, or lacks something.
        UnsupportedModelError: the architecture or the tokenizer is not supported.
    """
    container = read_shards(path, in_memory=in_memory)
    stored = {name: _Stored(info) for name, info in container.tensors.items()}
    hf_config = hf_config_from_gguf(container, lambda name: stored[name].read())
    config = config_from_gguf(container, hf_config)
    tokenizer = tokenizer_from_gguf(container.metadata, str(path)) if with_tokenizer else None
    architecture = architecture_of(container)
    _take_scales(stored, architecture)
    places = {
        name: place_of(architecture, name)
        for name in stored
        if name not in ROPE_TENSORS  # told as a part of the configuration
    }
    where = {place.name: (stored[name], place) for name, place in places.items()}
    return GgufModel(
        config,
        GgufTensors(path, where),
        layout_of(architecture),
        tokenizer,
        hf_config,
        _sampling(container.metadata),
        gguf_pooling(container.metadata, architecture),
    )


def _take_scales(stored: dict[str, _Stored], architecture: str) -> None:
    """Join tensors called ``scale`` to the weights that they multiply, such as NVFP4's.

    An ``input_scale`` is left unread: it serves arithmetic on inputs of 4 bits, and llama.cpp
    (b11549) computes the same on the CPU with any.
    """
    for name in [
        stored_name for stored_name in stored if stored_name.endswith((".scale", ".input_scale"))
    ]:
        part, _, kind = name.rpartition(".")
        weight = stored.get(f"{part}.weight")
        if weight is not None and place_of(architecture, name).name == name:
            scale = stored.pop(name)
            if kind == "scale":
                weight.multiply_by(scale)


def _sampling(metadata: Mapping[str, Any]) -> dict[str, float]:
    """What ``general.sampling`` says, above llama.cpp's defaults; empty where it says nothing."""
    keys = {f"general.sampling.{key}": name for key, name in _SAMPLING.items()}
    said = {name: metadata[key] for key, name in keys.items() if key in metadata}
    return {**LLAMA_CPP, **said} if said else {}


class _Stored:
    """One tensor as it lies in the file, unpacked by means of the ``gguf`` package.

    Attributes:
        kind: its type's name.
        packed: its bytes, uint8 ``[..., bytes of a row]``, without a copy.
        scale: what its numbers are multiplied by, float32: one number, or one for each of a stack
            of matrices, in the shape that broadcasts; None where there is none.
    """

    def __init__(self, info: TensorInfo) -> None:
        try:
            import gguf
            import gguf.quants
        except ImportError as error:
            raise ConfigError(
                f"reading a GGUF file needs the package gguf: {install_command()}"
            ) from error
        try:
            self._type = gguf.GGMLQuantizationType(info.type_code)
        except ValueError as error:
            raise UnsupportedModelError(
                f"tensor {info.name[:80]!r} is of GGML type {info.type_code}, which the installed "
                "gguf package does not know; a newer one may"
            ) from error
        block, size = gguf.GGML_QUANT_SIZES[self._type]
        if not info.shape or info.shape[-1] % block:
            raise ModelLoadError(
                f"tensor {info.name[:80]!r} has shape {info.shape}; its rows must be multiples of "
                f"{block}"
            )
        shape = (*info.shape[:-1], info.shape[-1] // block * size)
        self._span = info.offset, info.offset + math.prod(shape)
        data = info.file.data
        if self._span[1] > len(data):
            raise ModelLoadError(
                f"{info.file.path} is truncated: tensor {info.name[:80]!r} ends at byte "
                f"{self._span[1]} of {len(data)}; download it again"
            )
        self.info, self.kind = info, str(self._type.name)
        self._dequantize: Any = gguf.quants.dequantize
        self._map = getattr(data, "_mmap", None)  # not where the file was read
        self.packed = data[slice(*self._span)].reshape(shape)
        self.scale: Array | None = None

    def multiply_by(self, scale: _Stored) -> None:
        """Multiply what is read by a number, or each matrix of a stack by its own."""
        shape, factors = self.info.shape, floats(scale.read()).reshape(-1)
        if len(factors) != 1 and (len(shape) != 3 or len(factors) != shape[0]):
            raise ModelLoadError(
                f"tensor {scale.info.name[:80]!r} has {len(factors)} numbers; it must have one, or "
                f"one for each of the matrices in {self.info.name[:80]!r}"
            )
        self.scale = factors.reshape(-1, *[1] * (len(shape) - 1))

    def release(self) -> None:
        """Let go of the mapped pages that hold the tensor."""
        if self._map is not None:
            drop_pages(self._map, *self._span)

    def read(self, rows: slice = slice(None)) -> Array:
        """The tensor, plain numbers without a copy, the rest as float32."""
        if self.scale is not None:
            factors = self.scale if len(self.scale) == 1 else self.scale[rows]
            scaled: Array = floats(self._unscaled(rows)) * factors
            return scaled
        return self._unscaled(rows)

    def _unscaled(self, rows: slice) -> Array:
        if self.kind in _PLAIN:
            return self.packed.view(_PLAIN[self.kind])[rows]
        try:
            plain = self._dequantize(self.packed[rows], self._type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {self.info.name[:80]!r} is of type {self.kind}, which the gguf package "
                "cannot unpack"
            ) from error
        shape = self.info.shape[1:]
        return np.ascontiguousarray(plain, np.float32).reshape(-1, *shape)


class GgufTensors(StoredTensors):
    """Lazy mapping from Hugging Face names to tensors, whose rows are in the file's order."""

    _where: dict[str, tuple[_Stored, GgufPlace]]

    def __init__(self, path: Path, where: dict[str, tuple[_Stored, GgufPlace]]) -> None:
        self.source, self._where = str(path), where

    def __getitem__(self, name: str) -> Array:
        stored, place = self._at(name)
        tensor: Array = stored.read()
        if place.minus_row:
            rows = np.arange(len(tensor), dtype=tensor.dtype)
            distances: Array = tensor - rows.reshape(-1, *[1] * (tensor.ndim - 1))
            return distances
        if place.minus_one:
            return floats(tensor) - np.float32(1.0)
        return tensor.reshape(-1) if place.flat else tensor

    def type_of(self, name: str) -> str:
        return str(self._at(name)[0].kind)

    def num_bytes(self) -> int:
        return sum(stored.packed.nbytes for stored, _ in self._where.values())

    def shape_of(self, name: str) -> tuple[int, ...]:
        stored, place = self._at(name)
        return (stored.info.num_elements,) if place.flat else stored.info.shape

    def rows(self, name: str, first: int, last: int) -> Array:
        stored, place = self._at(name)
        assert not place.minus_one
        rows: Array = stored.read(slice(first, last))
        return rows

    def as_stored(self, name: str) -> StoredRows | None:
        stored, _ = self._at(name)
        if stored.kind not in (*FORMATS, *FLOAT_BYTES) or stored.scale is not None:
            return None
        return StoredRows(stored.kind, stored.packed)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return tuple(dict.fromkeys(stored.info.file.path for stored, _ in self._where.values()))

    @property
    def is_quantised(self) -> bool:
        """Whether most of the weights of the linears are stored in a quantised format."""
        sizes = self._sizes()
        return 2 * sum(sizes[kind] for kind in sizes if kind not in FLOAT_BYTES) > sizes.total()

    @property
    def main_format(self) -> str:
        """The format that holds most of the weights of the linears; empty without any."""
        return str(max(sizes, key=sizes.__getitem__)) if (sizes := self._sizes()) else ""

    def _sizes(self) -> Counter[str]:
        """How many weights of the layers are stored in each format."""
        sizes: Counter[str] = Counter()
        for name, (stored, _) in self._where.items():
            if name.startswith("model.layers."):
                sizes[stored.kind] += stored.info.num_elements
        return sizes

    def release(self, name: str) -> None:
        if name in self._where:
            self._where[name][0].release()
