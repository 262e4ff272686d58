"""Lines on a terminal end between words, however the text was cut."""

from __future__ import annotations

import random
import re

import pytest

from paceline.cli.terminal import WordWrap
from tests.cli.pseudo_terminal import at_a_terminal

COMMAND = re.compile(r"\x1b\[(\d*)([DK])")


class Paper:
    """A terminal of some columns, which stays in the last one until the next character comes."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self._at = columns, [""], 0

    def write(self, text: str) -> None:
        while text:
            found = COMMAND.match(text)
            if found is None:
                self._put(text[0])
                text = text[1:]
                continue
            text = text[found.end() :]
            if found[2] == "D":
                self._at = max(min(self._at, self.columns - 1) - int(found[1]), 0)
            else:
                self.lines[-1] = self.lines[-1][: self._at]

    def _put(self, character: str) -> None:
        assert character == "\n" or self._at < self.columns, "the terminal broke the line itself"
        if character == "\n":
            self.lines.append("")
            self._at = 0
            return
        assert self._at == len(self.lines[-1])
        self.lines[-1] += character
        self._at += 1


def shown(pieces: list[str], columns: int) -> list[str]:
    wrap, paper = WordWrap(), Paper(columns)
    for piece in pieces:
        for part, _ in wrap.wrapped(piece, "", columns):
            paper.write(part)
    return [line.rstrip() for line in paper.lines]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a word and another", ["a word and", "another"]),
        ("just fits1 and more", ["just fits1", "and more"]),
        ("0123456789", ["0123456789"]),
        ("0123456789 x", ["0123456789", "x"]),
        ("one 0123456789abc x", ["one", "0123456789", "abc x"]),
        ("a\n  indented code", ["a", "  indented", "code"]),
        ("ends here\nnext", ["ends here", "next"]),
        ("", [""]),
    ],
)
def test_lines_end_between_words(text: str, lines: list[str]) -> None:
    assert shown([text], 10) == lines
    assert shown(list(text), 10) == lines


def test_cuts_change_nothing() -> None:
    chance = random.Random(3)
    for _ in range(200):
        text = "".join(chance.choice("abcdefgh    \n") for _ in range(120))
        columns = chance.randrange(3, 30)
        cuts = sorted(chance.sample(range(1, 120), 6))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert shown(pieces, columns) == shown([text], columns)
        kept = "".join(" ".join(shown([text], columns)).split())
        assert kept == "".join(text.split())


def test_colours_stay_with_their_letters() -> None:
    wrap = WordWrap()
    assert wrap.wrapped("one tw", "red", 6) == [("one tw", "red")]
    assert wrap.wrapped("o!", "", 6) == [("\x1b[2D\x1b[K\n", ""), ("tw", "red"), ("o!", "")]


def test_wide_characters_take_two_columns() -> None:
    assert WordWrap().wrapped("日本語", "", 5) == [("日本\n語", "")]


def test_a_line_that_something_else_ended() -> None:
    wrap = WordWrap()
    wrap.wrapped("12345", "", 6)
    wrap.begin_line()
    assert wrap.wrapped("12345", "", 6) == [("12345", "")]


SAY = """
from paceline.cli.terminal import Screen
screen = Screen()
for each in ("It is mean", "ingful", " where", " lines end,", " and ", "words", " are whole."):
    screen.write([(each, "target")])
screen.note("It is done in two lines.")
"""


def test_answers_at_a_terminal() -> None:
    with at_a_terminal(["-c", SAY], {}, columns=14) as terminal:
        text = terminal.to_the_end().replace("\r", "")
    paper = Paper(14)
    paper.write(text)
    told = [
        "It is",
        "meaningful",
        "where lines",
        "end, and words",
        "are whole.",
        "It is done in",
        "two lines.",
        "",
    ]
    assert [line.rstrip() for line in paper.lines] == told
