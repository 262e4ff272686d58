"""Speculative configurations as users write them: JSON, mappings, and other programs' keys.

Owns which keys are taken, by what names, and which are refused; knows no proposer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from paceline.config.speculative import (
    METHODS,
    PluginConfig,
    PromptLookupConfig,
    SpeculativeConfig,
    check_method,
    config_class,
)
from paceline.core.errors import ConfigError

log = logging.getLogger(__name__)

BITS = {8: "int8", 4: "int4", 3: "int3", 2: "int2"}
"""What ``bits`` is short for, as a ``dtype``."""
LOOSENING_KEYS = (
    "acceptance_threshold",
    "min_acceptance_ratio",
    "typical_acceptance",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha",
    "assistant_ensemble_weight",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)
DEFAULT = "prompt_lookup"
"""The method where neither that nor a model is named."""
_KEY_ALIASES = {"max_tree_depth": "num_speculative_tokens"}
_PARALLEL_FLAG = "parallel_drafting"
_PARALLEL = {"draft_model": "parallel_draft", "eagle3": "peagle"}
"""What vLLM's flag makes of a method."""


def parse_speculative_config(
    source: str | Mapping[str, Any] | SpeculativeConfig | Sequence[Any],
) -> tuple[SpeculativeConfig, ...]:
    """Read a speculative configuration: JSON text, one mapping, or a list of mappings.

    An empty list is plain decoding.

    Raises:
        ConfigError: not JSON, an unknown key (the allowed ones are listed), a key that would
            loosen acceptance, or a value out of range.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:  # numbers and nesting have limits, too
            raise ConfigError(f"the speculative configuration is not JSON: {error}") from error
    items = [source] if isinstance(source, Mapping | SpeculativeConfig) else source
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ConfigError("the speculative configuration must be an object or a list of objects")
    return tuple(_parse_one(item) for item in items)


def _parse_one(item: object) -> SpeculativeConfig:
    if isinstance(item, SpeculativeConfig):
        return item
    if not isinstance(item, Mapping):
        raise ConfigError(f"a speculative configuration must be an object, not {item!r}")
    item = _without_flag(item)
    method = check_method(item.get("method", "draft_model" if "model" in item else DEFAULT))
    config = config_class(method)
    values = _known_values(item, method) | {"method": method}
    if "bits" in values:
        values["dtype"] = _dtype_of(values.pop("bits"), values.get("dtype"))
    for name in [name for name in values if name not in _own_keys(config)]:
        _check_foreign(name, values.pop(name), method)
    if config is PromptLookupConfig:
        _widen_lookup(values)
    return config(**values)


def _known_values(item: Mapping[str, Any], method: str) -> dict[str, Any]:
    """What is said, by the names that keys have here; an error names those of the method."""
    settings, own = _settings(), _own_keys(config_class(method))
    values: dict[str, Any] = {}
    for key, value in item.items():
        if key in LOOSENING_KEYS:
            raise ConfigError(
                f"{key!r} is refused: it would accept tokens that the target did not choose. "
                "Outputs here are always those of plain decoding"
            )
        name = _KEY_ALIASES.get(key, key)
        if name not in settings and name != "bits":
            known = [*own, *(["bits"] if "dtype" in own else []), *_KEY_ALIASES]
            raise ConfigError(
                f"unknown speculative key {key!r}; allowed: {', '.join(known)} (method {method})"
            )
        if name in values:
            raise ConfigError(f"{key!r} is given twice, under two names")
        values[name] = value
    return values


def _own_keys(config: type[SpeculativeConfig]) -> dict[str, Field[Any]]:
    return {each.name: each for each in fields(config)}


def _settings() -> dict[str, Field[Any]]:
    """The keys of all methods."""
    classes = [*(method.config for method in METHODS.values()), PluginConfig]
    return {name: key for config in reversed(classes) for name, key in _own_keys(config).items()}


def _check_foreign(name: str, value: object, method: str) -> None:
    """A key of other methods changes nothing; what would have changed most is refused.

    Raises:
        ConfigError: its value is not allowed, or it asks for what the method cannot do.
    """
    key = _settings()[name]
    key.metadata["check"](name, value)
    if not value or value == key.default:
        return
    owners = [one for one in METHODS if name in _own_keys(METHODS[one].config)]
    whom = f"method {' and '.join(map(json.dumps, owners))}" if owners else "plugins"
    message = f"{name} is for {whom}; {method} has no such key"
    if name in ("options", "use_heterogeneous_vocab", "vocab_replacements"):
        raise ConfigError(message)
    log.warning("%s, and drafts without it", message)


def _without_flag(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM asks for drafts of several tokens at once by a flag of other methods."""
    if _PARALLEL_FLAG not in item:
        return item
    flag, rest = item[_PARALLEL_FLAG], {k: v for k, v in item.items() if k != _PARALLEL_FLAG}
    method = rest.get("method", "draft_model")
    if not isinstance(flag, bool) or (flag and method not in _PARALLEL):
        allowed = " and ".join(f'"{one}", which it makes "{_PARALLEL[one]}",' for one in _PARALLEL)
        raise ConfigError(
            f"{_PARALLEL_FLAG} is {flag!r} for method {method!r}; it is true or false, and true "
            f"for {allowed} alone"
        )
    return {**rest, "method": _PARALLEL[method]} if flag else rest


def _dtype_of(bits: object, dtype: object) -> str:
    if dtype is not None:
        raise ConfigError(f"bits is {bits!r} and dtype {dtype!r}: give one of them")
    if type(bits) is not int or bits not in BITS:
        raise ConfigError(f"bits is {bits!r}; allowed: {', '.join(map(str, BITS))}")
    return BITS[bits]


def _widen_lookup(values: dict[str, Any]) -> None:
    """Let one bound of the match length, given alone, move the other's default."""
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if low is None and isinstance(high, int) and high >= 1:
        values["prompt_lookup_min"] = min(high, PromptLookupConfig().prompt_lookup_min)
    elif high is None and isinstance(low, int):
        values["prompt_lookup_max"] = max(low, PromptLookupConfig().prompt_lookup_max)
