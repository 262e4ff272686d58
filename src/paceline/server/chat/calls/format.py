"""What there is to know of a model's format of tool calls. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.server.chat.calls.kind import CallKind


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: alone, or several of them between ``before`` and ``after``.

    Attributes:
        name: as users choose it.
        call: what one call is written like.
        opening: strings that calls begin with, wherever they stand.
        inner: more of them, which the call itself is read with.
        closing: strings dropped directly after a call.
        start: the character that begins a call at the start of the answer; "" if none does.
        again: characters that begin a call directly after another one.
        separator: what stands between two calls.
    """

    name: str
    call: CallKind
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    inner: tuple[str, ...] = ()
    start: str = ""
    again: str = ""
    before: str = ""
    after: str = ""
    separator: str = ""


LIST_END = (",", "]")
"""What may stand behind a call in a list."""
