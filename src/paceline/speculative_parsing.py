"""From what a user writes to speculative configurations. Owns the drafts of methods by default.

Knows which keys there are, and not what their values mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from paceline.errors import ConfigError
from paceline.speculative_config import SpeculativeConfig

GRAMMAR_DRAFTS: dict[str, Any] = {"num_speculative_tokens": 16, "max_tree_nodes": 24}
"""What a grammar is sure of goes further than what others guess."""
SUFFIX_DRAFTS: dict[str, Any] = {
    "num_speculative_tokens": 16,
    "max_tree_nodes": 16,
    "max_branching": 4,
}
"""Trees that go on for as long as their match lets hope."""
NGRAM_DRAFTS: dict[str, Any] = {
    "num_speculative_tokens": 8,
    "max_tree_nodes": 16,
    "max_branching": 4,
}
"""Look-ups cost nothing worth mentioning, and the planner verifies no more than pays."""
PARALLEL_DRAFTS: dict[str, Any] = {"num_speculative_tokens": 8}
"""Further tokens of a forward that is made anyway."""
PARALLEL_FLAG = "parallel_drafting"
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
_DRAFTS = {
    "grammar": GRAMMAR_DRAFTS,
    "suffix": SUFFIX_DRAFTS,
    "ngram_model": NGRAM_DRAFTS,
    "parallel_draft": PARALLEL_DRAFTS,
}
_KEY_ALIASES = {"max_tree_depth": "num_speculative_tokens"}


def parse_speculative_config(
    source: str | Mapping[str, Any] | SpeculativeConfig | Sequence[Any] | None,
) -> tuple[SpeculativeConfig, ...]:
    """Read a speculative configuration: JSON text, one mapping, or a list of mappings.

    Raises:
        ConfigError: not JSON, an unknown key (the allowed ones are listed), a key that would
            loosen acceptance, or a value out of range.
    """
    if source is None:
        return ()
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
    allowed = [f.name for f in fields(SpeculativeConfig)]
    values: dict[str, Any] = {}
    for key, value in _without_flag(item).items():
        if key in LOOSENING_KEYS:
            raise ConfigError(
                f"{key!r} is refused: it would accept tokens that the target did not choose. "
                "Outputs here are always those of plain decoding"
            )
        name = _KEY_ALIASES.get(key, key)
        if name not in allowed:
            known = ", ".join([*allowed, *_KEY_ALIASES])
            raise ConfigError(f"unknown speculative key {key!r}; allowed are {known}")
        if name in values:
            raise ConfigError(f"{key!r} is given twice, under two names")
        values[name] = value
    if "model" in values:
        values.setdefault("method", "draft_model")
    values = _DRAFTS.get(str(values.get("method")), {}) | values
    _widen_lookup(values)
    return SpeculativeConfig(**values)


def _without_flag(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM asks for a parallel draft by a flag of its method for draft models."""
    if PARALLEL_FLAG not in item:
        return item
    flag, rest = item[PARALLEL_FLAG], {k: v for k, v in item.items() if k != PARALLEL_FLAG}
    method = rest.get("method", "draft_model")
    if not isinstance(flag, bool) or (flag and method != "draft_model"):
        raise ConfigError(
            f"{PARALLEL_FLAG} is {flag!r} for method {method!r}; it is true or false, and true for "
            '"draft_model" alone, which it makes "parallel_draft"'
        )
    return {**rest, "method": "parallel_draft"} if flag else rest


def _widen_lookup(values: dict[str, Any]) -> None:
    """Let one bound of the match length, given alone, move the other's default."""
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if low is None and isinstance(high, int) and high >= 1:
        values["prompt_lookup_min"] = min(high, SpeculativeConfig().prompt_lookup_min)
    elif high is None and isinstance(low, int):
        values["prompt_lookup_max"] = max(low, SpeculativeConfig().prompt_lookup_max)
