"""Text by origin, colours, lines that end between words, tables and closing lines."""

from __future__ import annotations

import io
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.llm import embedded_model
from paceline.api.outputs import Completion
from paceline.cli.report import Figures, answer_line, closing_line, cut_line
from paceline.cli.terminal import OriginSplitter, Screen, WordWrap, table
from paceline.request.sampling_params import SamplingParams
from paceline.text.detokenizer import TextStream
from paceline.text.tokenizer import Tokenizer
from tests.cli.pseudo_terminal import at_a_terminal

TOKENIZER = Tokenizer.from_folder(embedded_model("target"))
PROMPT = TOKENIZER.encode("Once")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps(ids: list[int], size: int, stop: tuple[str, ...] = ()) -> list[tuple[list[int], str]]:
    """Tokens and text step by step, as an engine would emit them."""
    stream = TextStream(TOKENIZER, PROMPT, stop)
    found = []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        for token_id in chunk:
            stream.push(token_id)
        found.append((chunk, stream.take_text(final=start + size >= len(ids))))
    return found


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=20),
    st.integers(1, 5),
    st.sampled_from([(), ("and then",)]),
)
def test_pieces_are_the_text(ids: list[int], size: int, stop: tuple[str, ...]) -> None:
    splitter = OriginSplitter(TOKENIZER, PROMPT)
    for chunk, text in steps(ids, size, stop):
        pieces = splitter.split(chunk, ["target"] * len(chunk), text)
        assert "".join(piece for piece, _ in pieces) == text


def test_pieces_go_by_token() -> None:
    ids = TOKENIZER.encode(" upon a time")
    origins = ["target", "draft_model", "prompt_lookup"]
    assert len(ids) == 3
    text = "".join(text for _, text in steps(ids, 3))
    assert OriginSplitter(TOKENIZER, PROMPT).split(ids, origins, text) == [
        (" upon", "target"),
        (" a", "draft_model"),
        (" time", "prompt_lookup"),
    ]


def test_text_that_comes_late_keeps_its_origin() -> None:
    ids = TOKENIZER.encode(" upon a time")
    splitter = OriginSplitter(TOKENIZER, PROMPT)
    assert splitter.split(ids[:2], ["draft_model", "target"], " up") == [(" up", "draft_model")]
    assert splitter.split(ids[2:], ["target"], "on a time") == [
        ("on", "draft_model"),
        (" a", "target"),
        (" time", "target"),
    ]


PIECES = [("plain", "target"), (" first", "one"), (" second", "two")]


def test_a_pipe_gets_the_text_alone() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(["one", "two"], out, err)
    screen.legend()
    screen.write([*PIECES, ("\x1b[2J", "target")])
    screen.note("done")
    assert out.getvalue() == "plain first second\x1b[2J\n"
    assert err.getvalue() == "done\n"


def test_a_terminal_gets_a_colour_per_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), Terminal()
    screen = Screen(["one", "two"], out, err)
    screen.legend()
    screen.write(PIECES)
    assert out.getvalue() == "plain\x1b[32m first\x1b[0m\x1b[36m second\x1b[0m"
    assert "\x1b[32mone\x1b[0m" in err.getvalue()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_plain_terminals(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    out, err = Terminal(), Terminal()
    screen = Screen(["one", "two"], out, err)
    screen.legend()
    screen.write(PIECES)
    screen.note("done")
    assert "\x1b" not in out.getvalue() + err.getvalue()


def test_generated_text_does_not_command_a_terminal() -> None:
    out = Terminal()
    Screen([], out, io.StringIO()).write([("a\x1b[2J\x9b\r\tb\n", "target")])
    assert out.getvalue() == "a\u241b[2J\ufffd\u240d\tb\n"


def test_closing_line() -> None:
    figures = Figures(2.0, 100, 40, 30, 120, 60)
    expected = "100 tokens, 50.0 tok/s, acceptance rate 50.0%, mean acceptance length 2.50"
    assert closing_line(figures) == expected
    assert closing_line(Figures(2.0, 100, 100)) == "100 tokens, 50.0 tok/s"
    assert closing_line(Figures()) == "0 tokens, 0.0 tok/s"


def test_table() -> None:
    assert table([{"a": "first", "long": "1"}, {"a": "b", "long": "22.5"}]) == (
        "a      long\n-----  ----\nfirst     1\nb      22.5"
    )


def test_answer_line() -> None:
    figures = Figures(2.0, 100, num_steps=70, num_draft_tokens=60, num_accepted_tokens=30)
    told = "100 tokens, 50.0 tok/s, first token after 0.25 s, guessed 30 of 100"
    assert answer_line(figures, 0.25) == told
    assert answer_line(Figures(2.0, 100), None) == "100 tokens, 50.0 tok/s"


def test_where_an_answer_was_cut() -> None:
    whole = Completion(0, token_ids=[1, 2, 3], finish_reason="length")
    assert cut_line(whole, SamplingParams(max_tokens=3), 9) == "cut at the limit of 3 tokens"
    at_the_end = cut_line(whole, SamplingParams(max_tokens=None), 9)
    assert at_the_end == "cut at the end of the context of 9 tokens"
    assert cut_line(Completion(0, finish_reason="stop"), SamplingParams(), 9) is None


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
