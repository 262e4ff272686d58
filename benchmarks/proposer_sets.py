"""The speculative configurations that benchmarks compare, under the names that tables give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.config import parse_speculative_config
from paceline.engine.default_drafts import default_speculative_config
from paceline.llm import embedded_model
from paceline.models.embedded import embedded_ngram_model

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


TRAINED = "trained on the answers to the other prompts"
"""What tables say in place of the file of an n-gram model that a benchmark trains."""
SINGLE = ("prompt_lookup", "suffix", "suffix of the request", "ngram_model", "draft_model")
MERGED = "suffix + ngram_model + draft_model"
EVERY = "prompt_lookup + suffix + ngram_model + draft_model"
MERGERS = ("suffix + ngram_model", "suffix + draft_model", "ngram_model + draft_model")
NODES = 16
"""At which all of them are compared."""
SIZES = (4, 8, 16, 32)
"""At which :data:`SIZED` are compared."""
SIZED = ("ngram_model", "draft_model")
DRAFT_DEPTH = 8
"""Forwards of a draft model for one tree."""


def trees_of(nodes: int, ngram: str = TRAINED) -> dict[str, dict[str, Any]]:
    """Every proposer by itself with trees of so many nodes, left for the planner to cut."""
    size = {"max_tree_nodes": nodes, "max_branching": 4, "min_accept_prob": 0.001}
    deep = {"num_speculative_tokens": nodes, **size}
    forwards = min(nodes, DRAFT_DEPTH)
    return {
        "prompt_lookup": {"method": "prompt_lookup", **deep},
        "suffix": suffix(**deep),
        "suffix of the request": suffix(suffix_decoding_max_cached_requests=0, **deep),
        "ngram_model": {"method": "ngram_model", "model": ngram, **deep},
        "draft_model": {**draft_model(forwards), **size},
    }


def for_acceptance(nodes: int = NODES, ngram: str = TRAINED) -> dict[str, list[dict[str, Any]]]:
    """Every proposer by itself, pairs, and all at once; no name has a comma."""
    single = trees_of(nodes, ngram)
    names = (*SINGLE, *MERGERS, MERGED, EVERY)
    return {name: [single[part] for part in name.split(" + ")] for name in names}


def for_speedup() -> dict[str, Any]:
    """Proposers alone, and the default configuration."""
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
        elif config.model == embedded_ngram_model():
            values["model"] = "embedded n-gram model"
        elif config.method == "ngram_model":
            values["model"] = TRAINED
        elif config.model:
            values["model"] = Path(config.model).name
        found.append(values)
    return found
