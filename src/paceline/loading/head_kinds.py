"""Heads: small decoders that draft from a target's hidden states. Tells them from other models.

Knows a parsed ``config.json`` alone, and imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.speculative import HEAD_METHODS
from paceline.models.config import MASK_TOKEN_KEYS

EAGLE3, PEAGLE, MTP, DFLASH, DSPARK = "eagle3", "peagle", "mtp", "dflash", "dspark"
_ARCHITECTURES = {  # whole names: those of relatives begin or end with the same letters
    "DFlashDraftModel": DFLASH,
    "DSparkDraftModel": DSPARK,
    "Qwen3DSparkModel": DSPARK,
}


def head_kind(raw: Mapping[str, Any]) -> str | None:
    """Which kind of head a configuration describes; None where it describes no head.

    The `speculators` layout says so itself; original checkpoints have an architecture that is named
    after the method. P-EAGLE's is EAGLE-3's, and a mask token tells them apart.
    """
    said = raw.get("speculators_model_type")
    if said in HEAD_METHODS:
        return str(said)
    names = raw.get("architectures")
    if said is not None or not isinstance(names, list):
        return None
    for name in map(str, names):
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        if EAGLE3 in name.lower():
            is_parallel = any(raw.get(key) is not None for key in MASK_TOKEN_KEYS)
            return PEAGLE if is_parallel else EAGLE3
    return None
