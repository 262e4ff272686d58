"""The marks of a call that is written between tags: its name, keys and values.

Owns where keys and values stand. Knows no schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.server.chat.calls.kind import LONGEST_HEAD

_ROOM = 16
"""Characters of white space and longer marks of types that the head of a value may have besides."""


@dataclass(frozen=True, slots=True)
class XmlMarks:
    """A call is a tag with its name, and tags with keys and values.

    Attributes:
        head: the pattern of what comes before the first parameter.
        begin: what a forced call is written with before the first parameter, see
            :func:`~paceline.server.chat.calls.forms.call_tag`.
        end: what ends a call.
        after: what a forced call is written with behind that.
        key: what stands before and behind a key.
        value: what stands before and behind a value.
        gap: white space between tags.
        padding: white space at both ends of a value, which is no part of it.
        types: what stands behind a key's tag where the value is a string, and where it is JSON; of
            formats that say so. ``%s`` is the name of another type.
        section: what a text may stand between as well, and does where it has characters that mean
            something in XML, or line feeds; of formats that have such sections.
        last: the text whose first appearance ends the head.
        escapes_keys: keys have entities for quotation marks and ampersands.
    """

    head: str
    begin: str
    end: str
    after: str
    key: tuple[str, str]
    value: tuple[str, str]
    gap: str = "\n"
    padding: str = ""
    types: tuple[str, str] = ("", "")
    section: tuple[str, str] = ("", "")
    last: str = ">"
    escapes_keys: bool = False

    @property
    def opening(self) -> str:
        """The pattern of what comes before a value."""
        before, behind = map(re.escape, self.key)
        value = rf"\s*{re.escape(self.value[0])}" if self.value[0] else ""
        text, other = map(re.escape, self.types)
        other = other.replace("%s", "[a-z]+")
        kind = rf"(?:(?P<text>{text})|(?P<json>{other})|>)" if text else "(?P<text>)(?P<json>)"
        return rf"{before}(?P<key>[^<\n{re.escape(self.key[1][0])}]+){behind}{kind}{value}"

    def key_of(self, written: str) -> str:
        """A key by what stands between its marks."""
        key = written.strip()
        return key.replace("&quot;", '"').replace("&amp;", "&") if self.escapes_keys else key

    def before_value(self, key: str) -> str:
        """A key between its marks."""
        if self.escapes_keys:
            key = key.replace("&", "&amp;").replace('"', "&quot;")
        return self.key[0] + key + self.key[1]

    def is_read(self, key: str) -> bool:
        """Whether a key is read as what it is."""
        written = self.before_value(key) + self.types[0] + self.value[0]
        found = re.match(self.opening, written)
        is_whole = found is not None and found.end() == len(written) < LONGEST_HEAD - _ROOM
        return is_whole and self.key_of(found["key"]) == key if found else False
