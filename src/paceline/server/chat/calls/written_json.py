"""JSON that a model wrote, as values that can be told as JSON again.

A model writes numbers that JSON allows and no double holds, and words that JSON does not allow.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

_LARGEST = sys.float_info.max
_MOST_DIGITS = sys.float_info.max_10_exp


def values_of(text: str) -> Any:
    """What the text says; numbers beyond a double's range are its largest one, and NaN is None.

    Raises:
        ValueError, RecursionError: it says nothing that is complete.

    >>> values_of('{"a": 1e505, "b": -Infinity, "c": NaN}')
    {'a': 1.7976931348623157e+308, 'b': -1.7976931348623157e+308, 'c': None}
    """
    return json.loads(text, parse_float=_float, parse_int=_integer, parse_constant=_float)


def _float(text: str) -> float | None:
    value = float(text)
    return None if math.isnan(value) else min(max(value, -_LARGEST), _LARGEST)


def _integer(text: str) -> float | None:
    return int(text) if len(text) <= _MOST_DIGITS else _float(text)
