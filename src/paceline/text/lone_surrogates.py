"""What is said of a text that no encoding can write. Knows no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.core.errors import RequestError

_HALF = re.compile("[\ud800-\udfff]")


def not_encodable(texts: Sequence[str], error: Exception) -> RequestError:
    """The error of texts that an encoder did not take; it names the half of a surrogate pair."""
    halves = (match for text in texts if isinstance(text, str) for match in _HALF.finditer(text))
    half = next(halves, None)
    if half is None:
        return RequestError(f"the text cannot be encoded: {error}")
    return RequestError(
        f"the text cannot be encoded: its character {half.start()} is U+{ord(half[0]):04X}, half "
        "of a surrogate pair; leave it out"
    )
