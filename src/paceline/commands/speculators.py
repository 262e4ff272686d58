"""Draft models that lie beside a model: the folder ``speculators/`` inside its own.

Owns where they are looked for and which of them can run. A draft's ``config.json`` may carry what
the `speculators` library writes (``speculators_model_type``, ``speculators_config``), as vLLM
reads it. Imports nothing slow.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = "speculators"
_MAX_CONFIG_BYTES = 1 << 20
_PLAIN_TYPES = (None, "independent")
"""Drafts that are language models of their own."""


def bundled_drafts(model: str) -> tuple[SpeculativeConfig, ...]:
    """The drafts of a model's folder, by name; empty for a GGUF file or a hub id.

    A draft that cannot be used is left out, and the log says why.
    """
    folder = Path(model) / FOLDER
    if not folder.is_dir():
        return ()
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = []
    for place in places:
        if (place / "config.json").is_file():
            try:
                found.append(_draft(place))
            except (OSError, ValueError) as error:
                log.warning("the draft in %s is not used: %s", place, error)
    return tuple(found)


def _draft(place: Path) -> SpeculativeConfig:
    """
    Raises:
        OSError, ValueError: the configuration is unreadable, or of a kind that does not run here.
    """
    path = place / "config.json"
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"its config.json has more than {_MAX_CONFIG_BYTES} bytes")
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise ValueError("its config.json is no object")
    kind = config.get("speculators_model_type")
    if kind not in _PLAIN_TYPES:
        raise ConfigError(f"it is of type {kind!r}; only drafts that are language models run here")
    wanted = _proposed_tokens(config)
    draft = SpeculativeConfig(method="draft_model", model=str(place))
    return draft if wanted is None else replace(draft, num_speculative_tokens=wanted)


def _proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """How many tokens the draft was made to propose, where its configuration says so."""
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return count if isinstance(count, int) else None
