"""Text by origin, colours, tables and closing lines."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.llm import embedded_model
from paceline.api.outputs import Completion
from paceline.cli.report import Figures, answer_line, closing_line, cut_line
from paceline.cli.terminal import OriginSplitter, Screen, table
from paceline.request.sampling_params import SamplingParams
from paceline.text.detokenizer import TextStream
from paceline.text.tokenizer import Tokenizer

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
