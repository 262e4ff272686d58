"""Folders of weights that are packed for the native kernels: mapped when loaded, not packed again.

Owns the format: a Hugging Face folder (configuration, tokenizer) whose safetensors files say
``{"format": "paceline-packed", "version": "3", "dtype": ...}`` and hold, per linear of the decoder,
``NAME.INDEX.FORMAT`` of each part, counted from 0, ``NAME.INDEX.order`` and ``NAME.bias`` (where it
has them) as :class:`~paceline.models.backend.PackedLinear` describes them, with stacked linears
under their fused names, the norms under their own names as float32, ``d2t`` of a pruned head
(:mod:`paceline.models.weights`) as it is, and the same of the model's MTP layer
(:mod:`paceline.loading.checkpoint`) under ``mtp``. Tiles begin at whole cache lines of
a file, which is for speed alone. Knows no arithmetic.

A file is not trusted: versions, names, types and sizes are checked when it is opened and adopted.
Values are not, because that would read every page; whatever they are, kernels stay within their
memory.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.backends.resolve import backend_of
from paceline.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from paceline.core.files import whole_folder
from paceline.loading.checkpoint import mtp_head
from paceline.loading.safetensors_files import INDEX_FILE
from paceline.models.backend import PackedLinear
from paceline.models.decoder_reader import DecoderReader
from paceline.models.families.config_json import config_from_hf
from paceline.models.heads import PACKED
from paceline.models.pooling import write_pooling
from paceline.models.tensor_reader import ORDER, PackedFormat, TensorReader, packed_name
from paceline.models.weights import HEAD_TOKENS, Ends
from paceline.tensors.arrays import CACHE_LINE, Array, floats

if TYPE_CHECKING:
    from paceline.backends.native.packing import Packer
    from paceline.loading.checkpoint import Checkpoint


log = logging.getLogger(__name__)
SHARD_BYTES = 512 << 20


def write_packed(checkpoint: Checkpoint, folder: Path, packer: Packer) -> int:
    """Pack a model into a folder that does not exist yet, or is empty.

    The configuration is written last: without it the folder is not taken for a model.

    Returns:
        bytes of weights.

    Raises:
        ConfigError: the folder has something in it or cannot be written, the native kernels cannot
            run the model, or it is packed already.
        ModelLoadError: the model's weights cannot be used.
        UnsupportedModelError: no ``config.json`` says what the model is.
    """
    if checkpoint.packed is not None:
        raise ConfigError(f"{checkpoint.name} is packed already, as {checkpoint.packed.dtype}")
    _check_config(checkpoint)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another one")
    with whole_folder(folder, ConfigError) as place:
        return _write_into(place, checkpoint, packer)


def _write_into(folder: Path, checkpoint: Checkpoint, packer: Packer) -> int:
    shards = _Shards(folder, PackedFormat(packer.dtype))
    reader = _RecordingReader(checkpoint, packer)
    reader.decoder.ends()
    reader.decoder.pruned_head()
    reader.decoder.places(checkpoint.config.max_position)
    reader.decoder.layer_inputs()
    reader.decoder.altup()
    for index in range(checkpoint.config.num_layers):
        reader.decoder.layer(index)
        shards.add(reader.take_recorded())
    reader.norm("model.norm.weight", checkpoint.config.hidden_size)
    reader.check_all_used()
    shards.add(reader.take_recorded())
    shards.add(_mtp_arrays(checkpoint, packer))
    shards.finish()
    reader.log_rounding()
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(folder)
    if checkpoint.pooling:
        write_pooling(folder, checkpoint.pooling)
    generation = {**checkpoint.card, **checkpoint.generation}
    if generation:
        _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", checkpoint.hf_config)
    return shards.num_bytes


def _mtp_arrays(checkpoint: Checkpoint, packer: Packer) -> dict[str, Array]:
    """The packed MTP layer; empty where there is none, or none that can draft: the model runs
    without it."""
    try:
        head = mtp_head(checkpoint)
        if head is None:
            return {}
        reader, shape = _RecordingReader(head, packer), head.config
        reader.decoder.ends_or_lent(Ends(None, None, shape))
        reader.decoder.entry()
        reader.decoder.layer(0)
        reader.norm("model.norm.weight", shape.hidden_size)
        reader.check_all_used()
    except (UnsupportedModelError, ModelLoadError) as error:
        log.warning("the MTP layer is left out: %s", error)
        return {}
    return {PACKED + name: array for name, array in reader.take_recorded().items()}


def _check_config(checkpoint: Checkpoint) -> None:
    """The configuration that will be written is read as the model's own.

    A GGUF file may have biases in places that its family's ``config.json`` has no words for.
    """
    backend_of(checkpoint.config, "native")
    written = config_from_hf(json.loads(json.dumps(checkpoint.hf_config)))
    ends = checkpoint.config.eos_token_ids  # those of generation_config.json too
    if replace(written, eos_token_ids=ends) != checkpoint.config:
        raise UnsupportedModelError(
            f"{checkpoint.name} has biases that no config.json describes, so it cannot be "
            "converted; load it as it is"
        )


class _RecordingReader(TensorReader):
    """Reads tensors as the decoder does, and keeps the packed arrays by their names."""

    def __init__(self, checkpoint: Checkpoint, packer: Packer) -> None:
        super().__init__(checkpoint.tensors, checkpoint.config, packer)
        self.decoder = DecoderReader(self)
        self._recorded: dict[str, Array] = {}

    def take_recorded(self) -> dict[str, Array]:
        recorded, self._recorded = self._recorded, {}
        return recorded

    def vector(self, name: str, *shape: int) -> Array:
        vector: Array = super().vector(name, *shape)
        self._recorded[name] = floats(vector)
        return vector

    def take(self, name: str, *shape: int) -> Array:
        tensor: Array = super().take(name, *shape)
        if name == HEAD_TOKENS:
            self._recorded[name] = tensor.astype(np.int64)
        return tensor

    def linear(self, names: list[str], fused: str, outs: list[int], width: int, bias: bool) -> Any:
        return self._record(fused, super().linear(names, fused, outs, width, bias))

    def float_linear(
        self, names: list[str], fused: str, outs: list[int], width: int, bias: bool
    ) -> Any:
        return self._record(fused, super().float_linear(names, fused, outs, width, bias))

    def end(self, name: str, *args: Any, **options: Any) -> Any:
        return self._record(name, super().end(name, *args, **options))

    def _record(self, name: str, packed: PackedLinear) -> PackedLinear:
        for index, part in enumerate(packed.parts):
            self._recorded[packed_name(name, index, part.format)] = part.data
            if part.order is not None:
                self._recorded[packed_name(name, index, ORDER)] = part.order
        if packed.bias is not None:
            self._recorded[f"{name}.bias"] = packed.bias
        return packed


class _Shards:
    """Files of about :data:`SHARD_BYTES`, so that one of them is in memory at a time."""

    def __init__(self, folder: Path, form: PackedFormat) -> None:
        self._folder = folder
        self._form = form
        self._waiting: dict[str, Array] = {}
        self._places: dict[str, str] = {}
        self._files = 0
        self.num_bytes = 0

    def add(self, arrays: Mapping[str, Array]) -> None:
        self._waiting |= arrays
        if sum(array.nbytes for array in self._waiting.values()) >= SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        self._files += 1
        name = f"packed-{self._files:05}.safetensors"
        save_aligned(self._waiting, self._folder / name, self._form.metadata)
        self._places |= dict.fromkeys(self._waiting, name)
        self.num_bytes += sum(array.nbytes for array in self._waiting.values())
        self._waiting = {}

    def finish(self) -> None:
        if self._waiting:
            self._write()
        index = {"metadata": self._form.metadata, "weight_map": self._places}
        _write_json(self._folder / INDEX_FILE, index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_TYPES = {"uint8": "U8", "int32": "I32", "float32": "F32", "int64": "I64"}


def save_aligned(arrays: Mapping[str, Array], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. What is a whole number of cache lines begins at such a line.

    The format wants its tensors one right after another, and does not say where the first begins.
    The others come last, those of the largest elements first, so that elements are aligned.

    Raises:
        OSError: the file cannot be written.
    """
    names = sorted(arrays, key=lambda name: _place(arrays[name]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        array, begin = arrays[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(np.ascontiguousarray(arrays[name]).data)


def _place(array: Array) -> int:
    return 0 if array.nbytes % CACHE_LINE == 0 else CACHE_LINE - array.itemsize
