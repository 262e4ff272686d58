"""Values out of an untrusted ``quantization_config``. Knows no method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelLoadError


def as_object(value: object) -> Mapping[str, Any]:
    """The value where it is an object, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def block_size(said: object, key: str) -> tuple[int, int]:
    """Rows and inputs of a block, from two whole numbers in a list or written as ``128x128``."""
    values = said.split("x") if isinstance(said, str) else said
    if isinstance(values, list | tuple) and len(values) == 2:
        high, wide = (int(v) if str(v).isdecimal() and len(str(v)) < 8 else 0 for v in values)
        if high and wide:
            return high, wide
    raise ModelLoadError(
        f"the model configuration says {key} = {str(said)[:40]}; it must be two whole numbers, "
        "both at least 1"
    )
