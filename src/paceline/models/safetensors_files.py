"""Tensors out of the safetensors files of one folder, lazily. Knows no model.

Nothing but safetensors is ever read: other weight formats run code when they are opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import ModelLoadError
from paceline.models.json_file import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Multimodal checkpoints keep their language model under a prefix, of two generations.
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}


class SafetensorsFolder(Mapping[str, torch.Tensor]):
    """Lazy mapping from Hugging Face tensor names to tensors.

    Looking up maps the tensor into memory without copying; with ``in_memory`` all are read at once.

    Raises:
        ModelLoadError: no weights, a shard that is missing, corrupt or outside the folder; on
            lookup: there is no such tensor.
    """

    def __init__(self, folder: Path, *, in_memory: bool = False) -> None:
        self._folder = folder
        self._where: dict[str, tuple[Any, str]] = {}  # name -> (open file, its name there)
        for path in _weight_files(folder):
            file = _open(path)
            for stored in file.keys():  # noqa: SIM118 (not a mapping)
                self._where[_plain_name(stored)] = (file, stored)
        self._read: dict[str, torch.Tensor] = {}
        if in_memory:
            self._read = {name: self[name].clone() for name in self._where}
            self._where = dict.fromkeys(self._where, (None, ""))

    def alias(self, name: str, stored_as: str) -> None:
        """Let ``name``, where it is not stored, mean what is stored under another name."""
        if name not in self._where and stored_as in self._where:
            self._where[name] = self._where[stored_as]
            if stored_as in self._read:
                self._read[name] = self._read[stored_as]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._read:
            return self._read[name]
        if name not in self._where:
            raise ModelLoadError(f"the checkpoint in {self._folder} has no tensor {name}")
        file, stored = self._where[name]
        try:
            tensor: torch.Tensor = file.get_tensor(stored)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelLoadError(f"tensor {name} in {self._folder} is corrupt: {error}") from error
        return tensor

    # Mapping's own versions of these two wait for a KeyError.
    def __contains__(self, name: object) -> bool:
        return name in self._where

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._where else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _plain_name(stored: str) -> str:
    for prefix, plain in _PREFIXES.items():
        if stored.startswith(prefix):
            return plain + stored[len(prefix) :]
    return stored


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{path} is not a complete safetensors file: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / name for name in _shard_names(index)]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    found = sorted(
        path.name for kind in ("*.bin", "*.pth", "*.pt", "*.gguf") for path in folder.glob(kind)
    )
    hint = f" (there is {found[0]}; pickled weights are never read)" if found else ""
    if found and found[0].endswith(".gguf"):
        hint = f" (to load {found[0]}, give the path of that file)"
    raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _shard_names(index: Path) -> list[str]:
    """File names of the shards; each must be a file right inside the folder."""
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
    names = list(dict.fromkeys(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelLoadError(
            f"{index.parent} lacks {len(missing)} of {len(names)} shards: {shown}; download the "
            "model again"
        )
    return names
