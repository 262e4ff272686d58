"""The speculative configurations that benchmarks compare, under the names that tables give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline.commands.resolve import default_speculative_config
from paceline.config import parse_speculative_config
from paceline.llm import embedded_model

DEPTH = 4
"""Tokens along a path, of chains and of the smaller trees."""


def chain(depth: int = DEPTH) -> dict[str, Any]:
    """Prompt lookup that proposes one continuation."""
    return {"method": "prompt_lookup", "num_speculative_tokens": depth}


def draft_model(depth: int = DEPTH) -> dict[str, Any]:
    """The embedded draft model, which proposes one continuation."""
    draft = embedded_model("draft")
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": depth}


def suffix(**options: Any) -> dict[str, Any]:
    """Suffix automata over the request and over those before it, as trees."""
    return {"method": "suffix", **options}


def tree(config: Mapping[str, Any], nodes: int, branching: int) -> dict[str, Any]:
    """The same proposer with alternatives."""
    return {**config, "max_tree_nodes": nodes, "max_branching": branching}


DEFAULT = "default"
"""What the command line takes when nothing is said."""


def for_acceptance() -> dict[str, Any]:
    """Every proposer by itself, chains and trees, and both at once."""
    return {
        "prompt_lookup": chain(),
        "prompt_lookup, tree of 8": tree(chain(), 8, 3),
        "prompt_lookup, tree of 16": tree(chain(16), 16, 4),
        "suffix, tree of 16": suffix(),
        "suffix, tree of 16, request alone": suffix(suffix_decoding_max_cached_requests=0),
        "draft_model": draft_model(),
        "draft_model, tree of 8": tree(draft_model(), 8, 3),
        "draft_model, tree of 16": tree(draft_model(6), 16, 4),
        "both": [draft_model(), chain()],
        "both, trees of 8": [tree(draft_model(), 8, 3), tree(chain(), 8, 3)],
    }


def for_speedup() -> dict[str, Any]:
    """The proposers alone, and the default configuration, which has both."""
    return {
        "prompt_lookup": chain(),
        "draft_model": draft_model(),
        DEFAULT: default_speculative_config(None),
    }


def described(source: Any) -> list[dict[str, Any]]:
    """The resolved configuration without the folder in which a model lies on this machine."""
    found = []
    for config in parse_speculative_config(source):
        values = asdict(config)
        if config.model == embedded_model("draft"):
            values["model"] = "embedded draft"
        found.append(values)
    return found
