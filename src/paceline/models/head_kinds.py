"""Heads: small decoders that draft from a target's hidden states. Tells them from other models.

Knows a parsed ``config.json`` alone, and imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.methods import HEAD_METHODS

EAGLE3, DFLASH, MTP = "eagle3", "dflash", "mtp"
_DFLASH_ARCHITECTURE = "DFlashDraftModel"  # its successors begin with the same letters


def head_kind(raw: Mapping[str, Any]) -> str | None:
    """Which kind of head a configuration describes; None where it describes no head.

    The `speculators` layout says so itself; original checkpoints have an architecture that is named
    after the method.
    """
    said = raw.get("speculators_model_type")
    if said in HEAD_METHODS:
        return str(said)
    names = raw.get("architectures")
    if said is not None or not isinstance(names, list):
        return None
    if _DFLASH_ARCHITECTURE in names:
        return DFLASH
    return EAGLE3 if any(EAGLE3 in str(name).lower() for name in names) else None
