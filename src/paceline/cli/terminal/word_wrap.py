"""Lines that end between words at a terminal's edge, though the words come in pieces.

Knows the terminal's width and two of its commands: to go back, and to erase the rest of a line.
"""

from __future__ import annotations

from itertools import groupby

BACK = "\x1b[{}D"
ERASE = "\x1b[K"


class WordWrap:
    """Nothing is held back: a word that meets the edge is erased and begins the next line.

    A word as long as a line is broken, and characters of double width are words by themselves.
    """

    def __init__(self) -> None:
        # Here because the command line must start without it.
        from rich.cells import get_character_cell_size

        self._width_of = get_character_cell_size
        self._column = 0
        self._word: list[tuple[str, str]] = []  # characters of the last word, with their colours

    def begin_line(self) -> None:
        """Something else has ended the line."""
        self._column = 0
        self._word = []

    def wrapped(self, text: str, colour: str, columns: int) -> list[tuple[str, str]]:
        """What to write for a text, each part with its colour.

        Args:
            columns: of the terminal.
        """
        parts: list[tuple[str, str]] = []
        for character in text:
            if character == "\n":
                self.begin_line()
                parts.append((character, ""))
            elif character in " \t":
                parts.append((self._blank(character, columns), colour))
            else:
                parts += self._letter(character, colour, columns)
        groups = groupby(parts, key=lambda part: part[1])
        return [("".join(each for each, _ in group), colour) for colour, group in groups]

    def _blank(self, character: str, columns: int) -> str:
        self._word = []
        width = 1 if character == " " else 8 - self._column % 8
        if self._column >= columns:
            self._column = 0
            return "\n"
        self._column = min(self._column + width, columns)
        return character

    def _letter(self, character: str, colour: str, columns: int) -> list[tuple[str, str]]:
        width = self._width_of(character)
        parts: list[tuple[str, str]] = []
        if self._column + width > columns:
            parts = self._next_line()
        self._column += width
        self._word = [] if width > 1 else [*self._word, (character, colour)]
        return [*parts, (character, colour)]

    def _next_line(self) -> list[tuple[str, str]]:
        """Take the word along, unless it is all of the line."""
        word, width = self._word, sum(self._width_of(each) for each, _ in self._word)
        if not 0 < width < self._column:
            self.begin_line()
            return [("\n", "")]
        self._column = width
        return [(BACK.format(width) + ERASE + "\n", ""), *word]
