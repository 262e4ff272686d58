"""A quantised checkpoint's tensors as if its linears were plain, by any method of quantisation.

Owns the list of methods that a ``quantization_config`` may speak of. A linear is under its Hugging
Face name, ``NAME.weight``, unpacked when it is looked up. The tensors that it is made of are not
listed, and neither are the scales of activations, keys and values, which are computed with
unquantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.core.files import read_json
from paceline.loading.quantised import bitsandbytes, compressed_tensors, gptq
from paceline.loading.quantised.floats import Fp8Weight, Mxfp4Weight, Nvfp4Weight
from paceline.loading.quantised.weight import Parts, QuantisedWeight, Scheme, as_object, block_size
from paceline.models.families.fields import supported
from paceline.models.tensor_reader import is_harmless
from paceline.tensors.arrays import Array
from paceline.tensors.stored import StoredRows, StoredTensors

_KEYS = ("quantization_config", "compression_config")  # the second is a former name
_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}  # where the first checkpoints of a method said it
_ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")

Config = Mapping[str, Any]


def _fp8(config: Config) -> tuple[Scheme, ...]:
    said = config.get("weight_block_size")
    block = None if said is None else block_size(said, "weight_block_size")
    return tuple(
        Scheme(scale, (".weight", scale), partial(Fp8Weight, scale=scale, block=block))
        for scale in (".weight_scale_inv", ".weight_scale")
    )


def _mxfp4(config: Config) -> tuple[Scheme, ...]:
    del config
    return tuple(
        Scheme(
            prefix + "_blocks",
            (prefix + "_blocks", prefix + "_scales"),
            partial(Mxfp4Weight, codes=prefix + "_blocks", scale=prefix + "_scales"),
        )
        for prefix in (".weight", "")
    )


def _modelopt(config: Config) -> tuple[Scheme, ...]:
    inner = as_object(config.get("quantization"))
    said = config.get("quant_algo") or inner.get("quant_algo")
    if said is None:  # only the cache of keys and values
        return ()
    supported("the modelopt algorithm", str(said), dict.fromkeys(_ALGORITHMS))
    parts = tuple(".weight" + end for end in ("", "_scale", "_scale_2"))
    return (Scheme(".weight_scale", parts, _modelopt_weight),)


def _modelopt_weight(parts: Parts) -> QuantisedWeight:
    if parts[".weight"].dtype == np.uint8:
        return Nvfp4Weight(parts, ".weight", ".weight_scale_2", divides=False)
    return Fp8Weight(parts, ".weight_scale", None)


METHODS: Mapping[str, Callable[[Config], tuple[Scheme, ...]]] = {
    "gptq": gptq.schemes,
    "awq": gptq.awq_schemes,
    "compressed-tensors": compressed_tensors.schemes,
    "fp8": _fp8,
    "bitsandbytes": bitsandbytes.schemes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
"""By ``quant_method``; of its schemes the first whose marker is there counts for a linear."""


def schemes_of(config: Config) -> tuple[Scheme, ...]:
    """The schemes of a ``quantization_config``.

    Raises:
        UnsupportedModelError: the method, or the variant of it, is not supported.
        ModelLoadError: a setting is damaged.
    """
    method = str(config.get("quant_method") or "unknown")
    if method == "unknown" and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # the first ones did not say
    if method not in METHODS:
        raise UnsupportedModelError(
            f"the checkpoint is quantised by {method[:40]!r}, which is not supported; "
            f"supported: {', '.join(METHODS)}. Use its unquantised form with --dtype int8, or "
            "a GGUF file"
        )
    return METHODS[method](config)


def split_quantisation(raw: Config, folder: Path) -> tuple[dict[str, Any], Config | None]:
    """A ``config.json`` of the same model as if it were not quantised, and how it is.

    Raises:
        ModelLoadError: what is said about it is not an object.
    """
    text = raw.get("text_config")
    parts = [raw, text] if isinstance(text, Mapping) else [raw]
    said = [part[key] for part in parts for key in _KEYS if part.get(key)]
    for file, method in _FILES.items():
        if not said and (folder / file).is_file():
            said = [{"quant_method": method, **read_json(folder / file)}]
    if any(not isinstance(config, Mapping) for config in said):
        raise ModelLoadError(f"the model configuration's {_KEYS[0]} must be an object")
    plain = {key: value for key, value in raw.items() if key not in _KEYS}
    if isinstance(text, Mapping):
        plain["text_config"] = {key: text[key] for key in text if key not in _KEYS}
    return plain, said[0] if said else None


_WEIGHT = ".weight"
AT_ONCE = 1 << 22  # weights that are unpacked in one go
_OF_ACTIVATIONS = re.compile(
    r".*\.(((input|output|activation|prob|[qkv])_(scale|zero_point|global_scale))|input_scale_ub)"
)


class QuantisedTensors(StoredTensors):
    """Lazy mapping from Hugging Face names to tensors, quantised weights as float32.

    Attributes:
        stored: the checkpoint as it lies in its files.
        schemes: of its linears.

    Raises:
        ModelLoadError: the tensors of a linear do not fit together; on lookup: there is no such
            tensor, or its scales are no numbers.
    """

    def __init__(self, stored: StoredTensors, schemes: Sequence[Scheme]) -> None:
        self.stored, self.source, self.schemes = stored, stored.source, schemes
        weights: dict[str, QuantisedWeight] = {}
        hidden: set[str] = set()
        self._parts: dict[str, list[str]] = {}  # of each quantised weight
        needed = [name for name in stored if not is_harmless(name)]
        for scheme in schemes:
            for name in needed:
                if name.endswith(scheme.marker) and name not in hidden:
                    linear = name.removesuffix(scheme.marker)
                    weights[linear + _WEIGHT] = scheme.open(Parts(stored, linear))
                    names = [linear + part for part in scheme.parts]
                    self._parts[linear + _WEIGHT] = [part for part in names if part in stored]
                    hidden.update(names)
        plain = [n for n in stored if n not in hidden and not _OF_ACTIVATIONS.fullmatch(n)]
        twice = weights.keys() & set(plain)
        if twice:
            raise ModelLoadError(f"{min(twice)} appears twice: plain and quantised")
        self._where = {**dict.fromkeys(plain), **weights}

    def _weight(self, name: str) -> QuantisedWeight | None:
        """The weight, where it is quantised."""
        weight: QuantisedWeight | None = self._at(name)
        return weight

    def __getitem__(self, name: str) -> Array:
        weight = self._weight(name)
        return self.stored[name] if weight is None else _unpacked(weight, 0, weight.shape[0])

    def rows(self, name: str, first: int, last: int) -> Array:
        weight = self._weight(name)
        if weight is None:
            return self.stored.rows(name, first, last)
        last = min(last, weight.shape[0])
        return _unpacked(weight, min(first, last), last)

    def as_stored(self, name: str) -> StoredRows | None:
        weight = self._weight(name)
        return self.stored.as_stored(name) if weight is None else weight.as_stored()

    def num_bytes(self) -> int:
        return self.stored.num_bytes()

    def type_of(self, name: str) -> str:
        weight = self._weight(name)
        return self.stored.type_of(name) if weight is None else weight.kind

    def shape_of(self, name: str) -> tuple[int, ...]:
        weight = self._weight(name)
        return self.stored.shape_of(name) if weight is None else weight.shape

    def release(self, name: str) -> None:
        for part in self._parts.get(name, [name]):
            self.stored.release(part)


def _unpacked(weight: QuantisedWeight, first: int, last: int) -> Array:
    """Rows ``first:last`` as floats, in slices: what they are unpacked from is larger."""
    k = weight.shape[1]
    unpacked = np.empty((last - first, k), np.float32)
    step = max(1, AT_ONCE // k)
    for start in range(first, last, step):
        end = min(start + step, last)
        unpacked[start - first : end - first] = weight.floats(start, end)
    return unpacked
