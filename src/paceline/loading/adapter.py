"""Adapters out of the folders that PEFT writes, as low-rank additions. Knows no arithmetic.

An adapter (LoRA: Hu et al., 2021) adds ``scale * up @ down`` to some weights. It is never merged
into them: each row of a batch has its own or none.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import ModelLoadError, NoAdapterError, UnsupportedModelError
from paceline.core.files import checked_path, read_as, read_json
from paceline.loading.safetensors_files import MappedFile, plain_name
from paceline.models.backend import AdaptedLayers, LowRank
from paceline.models.config import ModelConfig
from paceline.models.families.config_json import layout_from_hf
from paceline.models.families.family import PLAIN, Layout
from paceline.models.families.layouts import row_order
from paceline.tensors.arrays import STORED_FLOATS, Array, floats

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK, MAX_ALPHA = 1024, 1e6
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.(.+)\.weight")
_ENDS = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b")
_LEFT_OUT = {
    "use_dora": (False, "DoRA also learns the length of weights"),
    "modules_to_save": (None, "whole modules would replace the model's own"),
    "bias": ("none", "biases would replace the model's own"),
    "lora_bias": (False, "biases would be added to the model's own"),
    "trainable_token_indices": (None, "embeddings are the same for all requests"),
    "target_parameters": (None, "additions to single parameters are not read"),
    "layer_replication": (None, "the model's layers stay as they are"),
    "alora_invocation_tokens": (None, "an adapter is there from a prompt's first token on"),
}
"""Settings that would be something else than additions to linears: what is allowed, and why."""


_STARTS = ("gaussian", "eva", "orthogonal")
"""Ways to begin training that leave the model's own weights alone."""


class _AdaptedPart(NamedTuple):
    """Where a module of a checkpoint is among a layer's linears."""

    linear: str
    first: int
    outputs: int
    inputs: int


def load_adapter(
    folder: str | Path, config: ModelConfig, hf_config: Mapping[str, Any]
) -> AdaptedLayers:
    """Read an adapter of a model.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        config, hf_config: the model's.

    Raises:
        NoAdapterError: nothing is there.
        ModelLoadError: what is there is damaged, or of another model.
        UnsupportedModelError: the adapter is more than additions to linears of attention and dense
            feed-forwards.
    """
    folder, _ = checked_path(folder, ModelLoadError)
    with read_as(ModelLoadError, folder):
        return _read(folder, config, hf_config)


def _read(folder: Path, config: ModelConfig, hf_config: Mapping[str, Any]) -> AdaptedLayers:
    if not (folder / CONFIG).is_file():
        raise NoAdapterError(
            f"there is no adapter at {folder}: give a folder with {CONFIG} and {WEIGHTS}, as "
            "PEFT's save_pretrained writes it"
        )
    settings = _Settings(read_json(folder / CONFIG), folder)
    if config.attention.latent or config.altup or config.attention.gate:
        raise UnsupportedModelError(
            f"adapters of {config.architecture} models are not supported: their attention is not "
            "of plain queries, keys and values"
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelLoadError(f"{folder} has no {WEIGHTS}; pickled weights are never read")
    return _Reader(MappedFile(folder / WEIGHTS), settings, config, hf_config).layers()


class _Settings:
    """What ``adapter_config.json`` says; raises as :func:`load_adapter`."""

    def __init__(self, raw: Mapping[str, Any], folder: Path) -> None:
        self._raw, self._folder = raw, folder
        kind = raw.get("peft_type", "LORA")
        if kind != "LORA":
            raise UnsupportedModelError(f"{folder} is an adapter of type {kind!r}; LORA is read")
        for name, (allowed, why) in _LEFT_OUT.items():
            if raw.get(name) and raw[name] != allowed:
                raise UnsupportedModelError(
                    f"{folder / CONFIG} says {name} = {str(raw[name])[:80]}, and {why}; train the "
                    f"adapter with {name} = {allowed}"
                )
        start = raw.get("init_lora_weights", True)
        if isinstance(start, str) and start not in _STARTS:
            raise UnsupportedModelError(
                f"{folder / CONFIG} says init_lora_weights = {start[:80]!r}, which changes the "
                "model's own weights too; save the adapter converted to plain LoRA, as PEFT's "
                "path_initial_model_for_weight_conversion does"
            )
        self._has_root = bool(raw.get("use_rslora"))
        self._ranks = self._pattern("rank_pattern")
        self._alphas = self._pattern("alpha_pattern")
        self._rank, self._alpha = self._number("r", 8), self._number("lora_alpha", 8)

    def _number(self, name: str, default: float) -> float:
        return self._checked(name, self._raw.get(name, default))

    def _checked(self, name: str, value: object) -> float:
        least, most = (1.0, MAX_RANK) if name == "r" else (-MAX_ALPHA, MAX_ALPHA)
        is_number = isinstance(value, int if name == "r" else int | float)
        if isinstance(value, int | float) and is_number and least <= value <= most:
            return value
        raise ModelLoadError(
            f"{self._folder / CONFIG} says {name} = {str(value)[:80]}; allowed: numbers from "
            f"{least:g} to {most:g}"
        )

    def _pattern(self, name: str) -> dict[str, float]:
        found = self._raw.get(name) or {}
        if not isinstance(found, dict):
            raise ModelLoadError(f"{self._folder / CONFIG} says {name} = {str(found)[:80]}")
        one = "r" if name == "rank_pattern" else "lora_alpha"
        return {str(key): self._checked(one, value) for key, value in found.items()}

    def rank(self, module: str) -> int:
        return int(_of_module(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        alpha = _of_module(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._has_root else rank)


def _of_module(pattern: Mapping[str, float], module: str, default: float) -> float:
    """As PEFT looks a module up: its name ends as a key does, or as one matches it."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise ModelLoadError(f"{key[:80]!r} is not a pattern of modules: {error}") from error
    return default


class _Reader:
    """Takes an adapter out of its file."""

    def __init__(
        self,
        file: MappedFile,
        settings: _Settings,
        config: ModelConfig,
        hf_config: Mapping[str, Any],
    ) -> None:
        self._file, self._settings, self._config = file, settings, config
        self._layout: Layout = layout_from_hf(hf_config) if hf_config else PLAIN

    def layers(self) -> AdaptedLayers:
        found: list[dict[str, list[LowRank]]] = [
            defaultdict(list) for _ in range(self._config.num_layers)
        ]
        for module, (down, up) in self._pairs().items():
            weight = self._layout.plain(plain_name(f"{module}.weight"))
            match = _LAYER.fullmatch(weight)
            if match is None or int(match[1]) >= self._config.num_layers:
                raise UnsupportedModelError(self._not_for(module))
            index = int(match[1])
            place = places(self._config, index).get(match[2])
            if place is None:
                raise UnsupportedModelError(self._not_for(module))
            order = row_order(self._layout, self._config, weight)
            read = self._low_rank(module, down, up, place)
            if order is not None:
                read = read._replace(up=read.up[order])
            found[index][place.linear].append(read)
        if not any(found):
            raise ModelLoadError(f"{self._file.path} has no tensors of an adapter")
        return [{name: self._in_order(parts) for name, parts in layer.items()} for layer in found]

    def _in_order(self, parts: list[LowRank]) -> list[LowRank]:
        """By their outputs, of which each has one addition."""
        parts.sort(key=lambda part: part.first)
        if any(a.first + len(a.up) > b.first for a, b in pairwise(parts)):
            raise ModelLoadError(f"{self._file.path} adds to some outputs of a linear twice")
        return parts

    def _not_for(self, module: str) -> str:
        what = "embeddings and heads are the same for all requests"
        if not _ENDS.search(module):
            what = f"{self._config.architecture} models have no such linear that can be adapted"
        layers = range(self._config.num_layers)
        names = sorted({name.split(".")[1] for i in layers for name in places(self._config, i)})
        return (
            f"{self._file.path} is for {module[:100]}, and {what}; target_modules can be "
            f"{', '.join(names)}"
        )

    def _pairs(self) -> dict[str, tuple[str, str]]:
        """Of each module the names of its two tensors, down and up."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for stored in self._file.entries:
            match = _TENSOR.fullmatch(stored)
            if match is None and _ENDS.search(stored):
                raise UnsupportedModelError(self._not_for(stored))
            if match is None:
                raise UnsupportedModelError(
                    f"{self._file.path} has the tensor {stored[:100]}; only lora_A.weight "
                    "and lora_B.weight of linears are read"
                )
            found[match[1]][match[2]] = stored
        for module, pair in found.items():
            if len(pair) < 2:
                raise ModelLoadError(f"{self._file.path} has one of two tensors of {module}")
        return {module: (pair["A"], pair["B"]) for module, pair in found.items()}

    def _low_rank(self, module: str, down: str, up: str, place: _AdaptedPart) -> LowRank:
        rank = self._settings.rank(module)
        read = self._weight(down, rank, place.inputs), self._weight(up, place.outputs, rank)
        return LowRank(place.first, *read, self._settings.scale(module))

    def _weight(self, name: str, *shape: int) -> Array:
        array = self._file.tensor(name)
        if tuple(array.shape) != shape:
            raise ModelLoadError(
                f"tensor {name} in {self._file.path} has shape {tuple(array.shape)}; of this model "
                f"and the configured rank it would be {shape}"
            )
        if array.dtype not in STORED_FLOATS.values():
            raise UnsupportedModelError(
                f"tensor {name} in {self._file.path} is of {array.dtype}; allowed: float32, "
                "bfloat16 and float16"
            )
        if not np.isfinite(floats(array)).all():
            raise ModelLoadError(f"tensor {name} in {self._file.path} has NaN or infinite weights")
        return np.array(array)  # the file may change


def places(config: ModelConfig, index: int) -> dict[str, _AdaptedPart]:
    """The modules of a layer that can be adapted, by their names in it."""
    c, hidden = config, config.hidden_size
    found: dict[str, _AdaptedPart] = {}
    if c.has_attention(index):
        dim, kv_heads, has_values = c.heads_of(index)
        q, kv = c.num_heads * dim, kv_heads * dim if c.owns_kv(index) else 0
        outs = {"q": q, "k": kv, "v": kv if has_values else 0}
        found = _stacked("qkv", "self_attn", outs, hidden, "qkv")
        found["self_attn.o_proj"] = _AdaptedPart("o", 0, hidden, q)
    if c.has_mlp(index) and c.mlp.experts_of(index) is None:
        width = c.mlp_width(index)
        outs = {"gate": width, "up": width} if c.mlp.gated else {"up": width}
        found |= _stacked("gate_up", "mlp", outs, hidden, "gate_up")
        found["mlp.down_proj"] = _AdaptedPart("down", 0, hidden, width)
    return found


def _stacked(
    linear: str, part: str, outs: Mapping[str, int], inputs: int, fused: str
) -> dict[str, _AdaptedPart]:
    """Linears on top of each other, and the name of all together."""
    found = {f"{part}.{fused}_proj": _AdaptedPart(linear, 0, sum(outs.values()), inputs)}
    first = 0
    for name, outputs in outs.items():
        if outputs:
            found[f"{part}.{name}_proj"] = _AdaptedPart(linear, first, outputs, inputs)
        first += outputs
    return found
