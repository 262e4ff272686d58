"""A model in one GGUF file: configuration, tensors and tokenizer. Owns only how they fit together.

Weights come out under their Hugging Face names and in their layout, unpacked when they are looked
up: 16- and 32-bit floats as they are, every quantised type as float32. The blocks of the formats
that :mod:`paceline.models.blocks` knows can be had as they are, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import ConfigError, ModelLoadError, UnsupportedModelError
from paceline.models.blocks import FLOAT_BYTES, FORMATS
from paceline.models.config import ModelConfig
from paceline.models.gguf_config import (
    ROPE_TENSORS,
    architecture_of,
    config_from_gguf,
    hf_config_from_gguf,
)
from paceline.models.gguf_container import MAGIC, GgufContainer, TensorInfo, read_container
from paceline.models.gguf_names import Place, place_of
from paceline.models.gguf_tokenizer import tokenizer_from_gguf
from paceline.models.stored import StoredRows, StoredTensors, drop_pages
from paceline.models.tokenizer import Tokenizer

__all__ = ["MAGIC", "GgufModel", "GgufTensors", "load_gguf"]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What :func:`load_gguf` found; ``hf_config`` is the metadata told as a ``config.json``."""

    config: ModelConfig
    tensors: GgufTensors
    tokenizer: Tokenizer | None
    hf_config: Mapping[str, Any]


def load_gguf(path: Path, *, in_memory: bool = False, with_tokenizer: bool = True) -> GgufModel:
    """Open a GGUF file.

    Raises:
        ConfigError: the ``gguf`` package is not installed.
        ModelLoadError: the file is truncated, corrupt, or lacks something.
        UnsupportedModelError: the architecture or the tokenizer is not supported.
    """
    container = read_container(path, in_memory=in_memory)
    reader = TensorReader(container)
    told = hf_config_from_gguf(container, reader.read)
    config = config_from_gguf(container, told)
    tokenizer = tokenizer_from_gguf(container.metadata, str(path)) if with_tokenizer else None
    return GgufModel(config, GgufTensors(container, config, reader), tokenizer, told)


class TensorReader:
    """Unpacks stored tensors by means of the ``gguf`` package."""

    def __init__(self, container: GgufContainer) -> None:
        try:
            import gguf
            import gguf.quants
        except ImportError as error:
            raise ConfigError(
                "reading a GGUF file needs the extra: pip install 'paceline[gguf]'"
            ) from error
        # The lists of a large vocabulary take more memory than the tokenizer that is made of them.
        self._container = replace(container, metadata={})
        self._types: Any = gguf.GGMLQuantizationType
        self._dequantize: Any = gguf.quants.dequantize
        self._sizes: Mapping[Any, tuple[int, int]] = gguf.GGML_QUANT_SIZES
        for info in container.tensors.values():
            self._check(info)

    def _type(self, info: TensorInfo) -> Any:
        try:
            return self._types(info.type_code)
        except ValueError as error:
            raise UnsupportedModelError(
                f"tensor {info.name[:80]!r} is of GGML type {info.type_code}, which the installed "
                "gguf package does not know; a newer one may"
            ) from error

    def _packed_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """The shape in bytes: quantised rows are whole blocks."""
        block, size = self._sizes[self._type(info)]
        if not info.shape or info.shape[-1] % block:
            raise ModelLoadError(
                f"tensor {info.name[:80]!r} has shape {info.shape}; its rows must be multiples of "
                f"{block}"
            )
        return (*info.shape[:-1], info.shape[-1] // block * size)

    def _check(self, info: TensorInfo) -> None:
        """The tensor's bytes lie in the file."""
        end = self._end(info)
        if end > len(self._container.data):
            raise ModelLoadError(
                f"{self._container.path} is truncated: tensor {info.name[:80]!r} ends at byte "
                f"{end} of {len(self._container.data)}; download it again"
            )

    def type_of(self, stored: str) -> str:
        return str(self._type(self._container.tensors[stored]).name)

    def shape_of(self, stored: str) -> tuple[int, ...]:
        return self._container.tensors[stored].shape

    def size_of(self, stored: str) -> int:
        return self._container.tensors[stored].num_elements

    def packed(self, stored: str) -> torch.Tensor:
        """The tensor's bytes, uint8 ``[..., bytes of a row]``, without a copy."""
        info = self._container.tensors[stored]
        shape = self._packed_shape(info)
        return torch.from_numpy(self._bytes(info).reshape(shape))

    def _bytes(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._container.data[info.offset : self._end(info)]

    def _end(self, info: TensorInfo) -> int:
        return info.offset + math.prod(self._packed_shape(info))

    def release(self, stored: str) -> None:
        """Let go of the mapped pages that hold the tensor."""
        info = self._container.tensors[stored]
        source = getattr(self._container.data, "_mmap", None)  # not where the file was read
        if source is not None:
            drop_pages(source, info.offset, self._end(info))

    def read(self, stored: str, rows: slice = slice(None)) -> torch.Tensor:
        """The tensor as stored, 16- and 32-bit floats without a copy, the rest as float32."""
        info = self._container.tensors[stored]
        kind = self._type(info)
        shape = self._packed_shape(info)
        packed = self._bytes(info)
        floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if kind.name in floats:
            return torch.from_numpy(packed).view(floats[kind.name]).view(info.shape)[rows]
        try:
            plain = self._dequantize(packed.reshape(shape)[rows], kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {stored[:80]!r} is of type {kind.name}, which the gguf package cannot "
                "unpack"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(plain, np.float32)).view(-1, *info.shape[1:])


class GgufTensors(StoredTensors):
    """Lazy mapping from Hugging Face names to tensors in their Hugging Face layout."""

    def __init__(self, container: GgufContainer, config: ModelConfig, reader: TensorReader) -> None:
        self._path = container.path
        self._config = config
        self._reader = reader
        architecture = architecture_of(container)
        self._where = {}  # name -> (its name in the file, Place)
        for stored in container.tensors:
            if stored not in ROPE_TENSORS:  # told as a part of the configuration
                place = place_of(architecture, stored)
                self._where[place.name] = (stored, place)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._where:
            raise ModelLoadError(f"{self._path} has no tensor {name}")
        stored, place = self._where[name]
        tensor = self._reader.read(stored)
        return tensor.float() - 1.0 if place.minus_one else self._placed(name, place, tensor)

    def _placed(self, name: str, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place.unpermute:
            heads = self._config.num_heads if place.unpermute == "q" else self._config.num_kv_heads
            return self._unpermuted(name, tensor, heads)
        return tensor

    def _unpermuted(self, name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows (pair, half) of each head back to (half, pair)."""
        half = self._config.head_dim // 2
        if tensor.shape[0] != heads * half * 2:
            raise ModelLoadError(
                f"tensor {name} has {tensor.shape[0]} rows; the configuration needs {heads} heads "
                f"of {half * 2}"
            )
        # By numpy: torch's threads would hold the cores that packing needs.
        raw = tensor.view(heads, half, 2, -1).view(torch.uint8).numpy()
        rows = torch.from_numpy(np.ascontiguousarray(raw.swapaxes(1, 2)))
        return rows.view(tensor.dtype).reshape(tensor.shape)

    def type_of(self, name: str) -> str:
        return self._reader.type_of(self._where[name][0])

    def num_bytes(self) -> int:
        return sum(self._reader.packed(stored).nbytes for stored, _ in self._where.values())

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name not in self._where:
            return super().shape_of(name)  # which says so
        return self._reader.shape_of(self._where[name][0])

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        stored, place = self._where[name]
        assert not place.unpermute
        assert not place.minus_one
        return self._reader.read(stored, slice(first, last))

    def as_stored(self, name: str) -> StoredRows | None:
        if name not in self._where or self.type_of(name) not in (*FORMATS, *FLOAT_BYTES):
            return None
        stored, place = self._where[name]
        return StoredRows(
            self.type_of(name), self._placed(name, place, self._reader.packed(stored))
        )

    @property
    def is_quantised(self) -> bool:
        """Whether most of the weights of the linears are stored in a quantised format."""
        sizes: Counter[bool] = Counter()
        for name, (stored, _) in self._where.items():
            if name.startswith("model.layers."):
                sizes[self.type_of(name) not in FLOAT_BYTES] += self._reader.size_of(stored)
        return sizes[True] > sizes[False]

    def release(self, name: str) -> None:
        if name in self._where:
            self._reader.release(self._where[name][0])
