"""The speculative configurations that benchmarks compare, under the names that tables give them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.api.llm import embedded_model
from paceline.build.default_drafts import default_speculative_config
from paceline.config import parse_speculative_config
from paceline.loading.catalogue import embedded_ngram_model

DEPTH = 4
"""Tokens along a path."""


def chain(depth: int = DEPTH) -> dict[str, Any]:
    """Prompt lookup that proposes one continuation."""
    return {"method": "prompt_lookup", "num_speculative_tokens": depth}


def draft_model(depth: int = DEPTH) -> dict[str, Any]:
    """The embedded draft model, which proposes one continuation."""
    draft = embedded_model("draft")
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": depth}


DEFAULT = "default"
"""What the command line takes when nothing is said."""


def for_speedup() -> dict[str, Any]:
    """Proposers alone, and the default configuration."""
    return {
        "prompt_lookup": chain(),
        "draft_model": draft_model(),
        DEFAULT: default_speculative_config("embedded"),
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
        elif config.model:
            values["model"] = Path(config.model).name
        found.append(values)
    return found
