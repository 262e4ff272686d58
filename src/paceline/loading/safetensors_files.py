"""Tensors out of the safetensors files of one folder, lazily, and the names of any model's tensors.

Nothing but safetensors is ever read: other weight formats run code when they are opened.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from paceline.core.errors import ModelLoadError
from paceline.core.files import HEAD_BYTES, check_fetched, read_json
from paceline.loading.gguf.container import read_shards
from paceline.loading.gguf.names import place_of
from paceline.models.families.layouts import plain_expert_name
from paceline.tensors.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, Arena, Array, as_bytes
from paceline.tensors.quantised_blocks import FLOAT_BYTES
from paceline.tensors.stored import FilePart, StoredRows, StoredTensors, drop_pages

_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8_E4M3,
    "F8_E5M2": FLOAT8_E5M2,
    "F8_E8M0": np.dtype(np.uint8),  # exponents alone
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool),
}


class SafetensorsFolder(StoredTensors):
    """Lazy mapping from Hugging Face tensor names to tensors.

    Looking up maps the tensor into memory without copying; with ``in_memory`` all are read at once.
    Of a tensor that several files hold, the one in the file that the index names is taken.

    Attributes:
        metadata: that of each file.
        paths: of the files.

    Raises:
        ModelLoadError: no weights, a shard that is missing, corrupt or outside the folder; on
            lookup: there is no such tensor.
    """

    def __init__(self, folder: Path, *, in_memory: bool = False) -> None:
        self.source = f"the checkpoint in {folder}"
        self._where = {}  # name -> (file, its name there)
        weight_map = shards_by_tensor(folder / INDEX_FILE)
        files = {path.name: MappedFile(path) for path in _weight_files(folder, weight_map)}
        self.metadata = [file.metadata for file in files.values()]
        self.paths = tuple(file.path for file in files.values())
        for file in files.values():
            for stored in file.entries:
                named = files.get(weight_map.get(stored, ""), file)
                if named is file or stored not in named.entries:
                    self._add(plain_name(stored), file, stored)
        self._read: dict[str, Array] = {}
        if in_memory:
            arena = Arena()
            for name in self._where:
                found = self[name]
                held = arena.zeros(found.nbytes, np.uint8).view(found.dtype).reshape(found.shape)
                held[...] = found
                self._read[name] = held
                self.release(name)

    def _add(self, name: str, file: MappedFile, stored: str) -> None:
        if name in self._where:
            other, stored_there = self._where[name]
            raise ModelLoadError(
                f"{name} appears twice: {stored_there} in {other.path} and {stored} in {file.path}"
            )
        self._where[name] = (file, stored)

    def rename(self, stored_as: str, name: str) -> None:
        """Call what is stored under one name by another, where nothing is stored under that."""
        if name not in self._where and stored_as in self._where:
            self._where[name] = self._where.pop(stored_as)
            if stored_as in self._read:
                self._read[name] = self._read.pop(stored_as)

    def __getitem__(self, name: str) -> Array:
        if name in self._read:
            return self._read[name]
        file, stored = self._at(name)
        tensor: Array = file.tensor(stored)
        return tensor

    def as_stored(self, name: str) -> StoredRows | None:
        if self.type_of(name) not in FLOAT_BYTES:
            return None
        return StoredRows(self.type_of(name), as_bytes(self[name]))

    def type_of(self, name: str) -> str:
        file, stored = self._at(name)
        return str(file.entries[stored]["dtype"])

    def file_part(self, name: str) -> FilePart | None:
        if name in self._read:
            return None
        file, stored = self._at(name)
        part: FilePart = file.part(stored)
        return part

    def release(self, name: str) -> None:
        file, stored = self._at(name)
        file.release(stored)


class MappedFile:
    """One file, mapped as a whole, whose pages can be let go tensor by tensor."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                check_fetched(path, file.read(HEAD_BYTES))
            # The library checks the header: names, types, and that the offsets tile the file.
            with safe_open(str(path), framework="numpy") as checked:
                self.metadata: Mapping[str, str] = checked.metadata() or {}
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                self.entries: dict[str, Any] = json.loads(file.read(size))
                # Private and writable: torch insists on memory that may be written.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (SafetensorError, OSError, RuntimeError, ValueError, struct.error) as error:
            raise ModelLoadError(f"{path} is not a complete safetensors file: {error}") from error
        self.path = path
        self._start = 8 + size
        self.entries.pop("__metadata__", None)

    def tensor(self, stored: str) -> Array:
        entry = self.entries[stored]
        kind, shape = _TYPES.get(entry["dtype"]), entry["shape"]
        if kind is None:
            raise ModelLoadError(
                f"tensor {stored} in {self.path} is of type {entry['dtype']}, which is not "
                "supported; use another form of the model"
            )
        count, (first, last) = math.prod(shape), self._bytes(stored)
        if count == 0:
            return np.empty(shape, kind)
        if first % kind.itemsize:  # a file may have been packed more tightly than memory allows
            return np.frombuffer(bytearray(self._map[first:last]), kind).reshape(shape)
        return np.frombuffer(self._map, kind, count, first).reshape(shape)

    def part(self, stored: str) -> FilePart:
        first, last = self._bytes(stored)
        return FilePart(self.path, first, last - first)

    def _bytes(self, stored: str) -> tuple[int, int]:
        first, last = self.entries[stored]["data_offsets"]
        return self._start + first, self._start + last

    def release(self, stored: str) -> None:
        drop_pages(self._map, *self._bytes(stored))


def _weight_files(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    if weight_map:
        return [folder / name for name in _shard_names(folder, weight_map)]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    found = sorted(
        path.name for kind in ("*.bin", "*.pth", "*.pt", "*.gguf") for path in folder.glob(kind)
    )
    hint = f" (there is {found[0]}; pickled weights are never read)" if found else ""
    if found and found[0].endswith(".gguf"):
        hint = f" (to load {found[0]}, give the path of that file)"
    raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def shards_by_tensor(index: Path) -> Mapping[str, str]:
    """In which file each tensor is, by the index; empty without one.

    Each must be a file right inside the folder.
    """
    if not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    for name in weight_map.values():
        plain = isinstance(name, str) and name == Path(name).name and "\\" not in name
        if not plain or not name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{index} names the shard {str(name)[:80]!r}; shards must be .safetensors files "
                "in the same folder"
            )
    return weight_map


def _shard_names(folder: Path, weight_map: Mapping[str, str]) -> list[str]:
    names = list(dict.fromkeys(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {shown}; download the "
            "model again"
        )
    return names


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Multimodal checkpoints keep their language model under a prefix, of two generations.
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
_BASE_EMBEDDINGS = {"embed_tokens.weight", "embeddings.weight", "embed_in.weight"}


def plain_name(stored: str) -> str:
    """What a tensor would be called in a checkpoint that is of text alone."""
    name = stored
    for prefix, plain in _PREFIXES.items():
        if stored.startswith(prefix):
            name = plain + stored[len(prefix) :]
            break
    return plain_expert_name(name)


def base_names(names: Iterable[str]) -> dict[str, str]:
    """What a whole model's checkpoint calls the tensors of one that was saved without its head.

    ``AutoModel`` and sentence-transformers save such; empty for a whole model's checkpoint.
    """
    known = list(names)
    if _BASE_EMBEDDINGS.isdisjoint(known):
        return {}
    below = [name for name in known if not name.startswith(("model.", "lm_head."))]
    return {name: plain_expert_name(f"model.{name}") for name in below}


def stored_names(model: Path) -> list[str]:
    """As Hugging Face names; empty for a folder without safetensors.

    Raises:
        ModelLoadError, OSError: a file is damaged.
    """
    if model.is_file():
        container = read_shards(model)
        architecture = str(container.metadata.get("general.architecture"))
        return [place_of(architecture, name).name for name in container.tensors]
    names: Iterable[str] = shards_by_tensor(model / INDEX_FILE)
    if not names and (model / SINGLE_FILE).is_file():
        names = MappedFile(model / SINGLE_FILE).entries
    return [plain_name(name) for name in names]
