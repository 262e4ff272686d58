"""A place in the text of a GBNF grammar: what is next there, and where it is for an error."""

from __future__ import annotations

import re

from paceline.core.errors import RequestError

NEWLINE = re.compile(r"\r\n|\r|\n")
DIGITS = re.compile(r"[0-9]+")
_HEX = {kind: re.compile(f"[0-9a-fA-F]{{{n}}}") for kind, n in {"x": 2, "u": 4, "U": 8}.items()}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{each: each for each in '\\"[]-'}}


class Scanner:
    """Attributes:
    text: the whole grammar.
    at: the place in it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, text: str) -> bool:
        """Whether this text is next; then it is passed."""
        is_next = self.text.startswith(text, self.at)
        self.at += len(text) * is_next
        return is_next

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.refusal(f"Expected {text!r}")

    def found(self, pattern: re.Pattern[str], what: str) -> str:
        """What the pattern finds at this place, which is passed."""
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.refusal(f"Expected {what}")
        self.at = match.end()
        return match[0]

    def number(self, what: str, largest: int) -> int:
        at = self.at
        digits = self.found(DIGITS, what).lstrip("0") or "0"
        if len(digits) > len(str(largest)) or int(digits) > largest:
            raise self.refusal(f"Larger than {largest}: {what}", at)
        return int(digits)

    def character(self) -> int:
        """The code point of a character that may be escaped."""
        at = self.at
        if at >= len(self.text):
            raise self.refusal("Expected a character")
        self.at += 1
        if self.text[at] != "\\":
            return ord(self.text[at])
        kind = self.text[at + 1 : at + 2]
        self.at += 1
        if kind in _HEX:
            return int(self.found(_HEX[kind], f"the hexadecimal digits of \\{kind}"), 16)
        if kind not in _ESCAPES:
            raise self.refusal(
                f'\\{kind} is not an escape; allowed: \\n \\r \\t \\\\ \\" \\[ \\] \\- \\x41 '
                "\\u0041 \\U00000041",
                at,
            )
        return ord(_ESCAPES[kind])

    def refusal(self, problem: str, at: int | None = None) -> RequestError:
        """What is wrong at a place, by default at this one."""
        at = self.at if at is None else at
        lines = NEWLINE.split(self.text[:at])
        ahead = self.text[at : at + 20]
        found = f"where {ahead!r} is" if ahead else "where it ends"
        return RequestError(
            f"{problem} at line {len(lines)}, column {len(lines[-1]) + 1} of the GBNF, {found}"
        )
