"""Which schemes a checkpoint's ``quantization_config`` speaks of. Owns the list of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.core.json_file import read_json
from paceline.loading.quantised import bitsandbytes, compressed_tensors, gptq
from paceline.loading.quantised.eight_bit_floats import Fp8Weight
from paceline.loading.quantised.four_bit_floats import Mxfp4Weight, Nvfp4Weight
from paceline.loading.quantised.parts import Parts, as_object, block_size
from paceline.loading.quantised.weight import QuantisedWeight, Scheme

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
    if said not in _ALGORITHMS:
        raise UnsupportedModelError(
            f"modelopt checkpoints of the algorithm {str(said)[:40]!r} are not supported; "
            f"supported: {', '.join(_ALGORITHMS)}"
        )
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
