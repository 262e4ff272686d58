"""Ids of calls that name the tool, as Kimi K2 writes them: which tool is meant.

Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_CANONICAL = re.compile(r"functions\.(.+):\d+", re.DOTALL)
_PREFIX = r"(?:[\w-]*functions[._:-]|tools?[.:])*"
_OPAQUE = re.compile(r"(?:call|toolu|chatcmpl-tool)[_-][A-Za-z0-9]+")
"""Ids of other APIs, which say nothing of the tool."""


def tool_of_id(call_id: str, names: Collection[str]) -> str:
    """The name of the offered tool that an id means; "" for none.

    Models are taught ``functions.NAME:INDEX``, but they imitate the ids of earlier messages:
    without prefix or index, with another prefix, or with only letters, digits and ``_-``. An id
    that says nothing means the only tool that was offered.

    >>> [tool_of_id(i, ["get", "set"]) for i in ("functions.get:0", "functions_set_1", "put:0")]
    ['get', 'set', '']
    """
    canonical = _CANONICAL.fullmatch(call_id)
    if canonical and canonical[1] in names:
        return canonical[1]
    for name in sorted(names, key=len, reverse=True):
        written = "[._-]".join(map(re.escape, re.split("[._-]", name)))
        if re.fullmatch(rf"{_PREFIX}{written}(?::\w*|[._-]\d+)?", call_id):
            return name
    if len(names) == 1 and _OPAQUE.fullmatch(call_id):
        return next(iter(names))
    return ""
