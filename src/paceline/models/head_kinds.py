"""Heads: small decoders that draft from a target's hidden states. Tells them from other models.

Knows a parsed ``config.json`` alone, and imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.methods import HEAD_METHODS

EAGLE3, MTP = "eagle3", "mtp"


def head_kind(raw: Mapping[str, Any]) -> str | None:
    """Which kind of head a configuration describes; None where it describes no head.

    The `speculators` layout says so itself; original EAGLE-3 checkpoints have an architecture that
    is named after the method.
    """
    said = raw.get("speculators_model_type")
    if said in HEAD_METHODS:
        return str(said)
    names = raw.get("architectures")
    is_original = isinstance(names, list) and any(EAGLE3 in str(name).lower() for name in names)
    return EAGLE3 if said is None and is_original else None
