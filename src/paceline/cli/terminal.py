"""What a person sees and types: text coloured by origin, lines that fit, tables, and a line editor.

Text goes to standard output exactly as it was generated; everything about it goes to standard
error. Knows no engine.
"""

from __future__ import annotations

import json as json_format
import os
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from paceline.request.request import TARGET_ORIGIN

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer


RESET = "\x1b[0m"
DIM = "\x1b[2m"
PALETTE = ("\x1b[32m", "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[34m")
# On a terminal, control characters in generated text would be commands to it, and those that turn
# the direction of writing would make it read as something else.
_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
    **dict.fromkeys((0x200B, *range(0x200E, 0x2010), *range(0x2028, 0x202F)), 0xFFFD),
    **dict.fromkeys(range(0x2066, 0x206A), 0xFFFD),
}


def printable(text: str) -> str:
    """Text that came out of a model or its files, without power over the terminal."""
    return text.translate(_CONTROLS)


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose owner has not asked for plain text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


class OriginSplitter:
    """Cuts the text of one output into pieces by who drafted them.

    A step's text is not its tokens' text: characters can be unfinished and stop strings held back.
    So each token's share is counted apart, and the text that arrives is dealt out by these counts.

    Args:
        tokenizer: None shows token ids.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        # Here because the command line must start without torch and tokenizers.
        from paceline.text.detokenizer import IncrementalDecoder

        self._decoder = (
            None if tokenizer is None else IncrementalDecoder(tokenizer, prompt_token_ids)
        )
        self._shares: deque[tuple[int, str]] = deque()

    def split(
        self, token_ids: Sequence[int], origins: Sequence[str], text: str
    ) -> list[tuple[str, str]]:
        """Pieces as (text, origin); together they are exactly ``text``, where there is any."""
        if self._decoder is None:
            ids = zip(token_ids, origins, strict=True)
            return [(f"{token_id} ", origin) for token_id, origin in ids]
        for token_id, origin in zip(token_ids, origins, strict=True):
            self._shares.append((len(self._decoder.push(token_id)), origin))
        pieces = []
        while text and self._shares:
            length, origin = self._shares.popleft()
            if length > len(text):
                self._shares.appendleft((length - len(text), origin))
            if length:
                pieces.append((text[:length], origin))
            text = text[length:]
        return [*pieces, (text, TARGET_ORIGIN)] if text else pieces


class Screen:
    """Where generated text and remarks about it go.

    Args:
        json: standard output is for one document: what people read goes to standard error.

    Attributes:
        wraps: whether lines on a terminal end between words.
    """

    def __init__(
        self,
        origins: Sequence[str] = (),
        out: TextIO | None = None,
        err: TextIO | None = None,
        json: bool = False,
    ) -> None:
        self.err = err or sys.stderr
        self.out = self.err if json else out or sys.stdout
        self._document_out = out or sys.stdout
        self._colours = dict(zip(origins, PALETTE, strict=False))
        self._coloured = wants_colour(self.out)
        self._at_line_start = True
        self.wraps = True
        can_wrap = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self._wrap = WordWrap() if can_wrap else None

    def write(self, pieces: Sequence[tuple[str, str]]) -> None:
        """Generated text, each piece with its origin."""
        for text, origin in pieces:
            shown = printable(text) if self.out.isatty() else text
            colour = self._colours.get(origin, "") if self._coloured else ""
            for part, hue in self._wrapped(shown, colour):
                self.out.write(f"{hue}{part}{RESET}" if hue else part)
            if text:
                self._at_line_start = text.endswith("\n")
        self.out.flush()

    def _wrapped(self, text: str, colour: str) -> list[tuple[str, str]]:
        columns = _columns(self.out) if self._wrap is not None and self.wraps else 0
        if self._wrap is None or not columns:
            return [(text, colour)]
        return self._wrap.wrapped(text, colour, columns)

    def end_line(self) -> None:
        """End the line of generated text, if it has not ended."""
        if not self._at_line_start:
            self.out.write("\n")
            self.out.flush()
            self._at_line_start = True
        if self._wrap is not None:
            self._wrap.begin_line()

    def say(self, line: str, *, dim: bool = False) -> None:
        """A line of results, on standard output."""
        self.end_line()
        print(_dimmed(line) if dim and self._coloured else line, file=self.out, flush=True)

    def document(self, document: Mapping[str, Any]) -> None:
        """A JSON document in one line, on standard output."""
        self.end_line()
        print(json_format.dumps(document), file=self._document_out, flush=True)

    def note(self, line: str) -> None:
        """A remark, on standard error."""
        self.end_line()
        text = _fitted(line, _columns(self.err)) if self.wraps else line
        print(_dimmed(text) if wants_colour(self.err) else text, file=self.err, flush=True)

    def legend(self) -> None:
        """Which colour stands for which proposer; nothing without colours."""
        if self._coloured and self._colours:
            named = [f"{colour}{origin}{RESET}" for origin, colour in self._colours.items()]
            self.note(f"drafted by {', '.join(named)}; the rest by the target model")

    @contextmanager
    def progress(
        self, title: str, total: int, wanted: bool = True
    ) -> Iterator[Callable[[int], None]]:
        """A bar on a terminal, if wanted; yields what to call with the number done."""
        if not wanted or not self.err.isatty():
            yield lambda done: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=self.err), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=done)


def _columns(stream: TextIO) -> int:
    """Of the terminal, which may change meanwhile; 0 where that is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # it has no descriptor, or none of a terminal
        return 0


def _fitted(text: str, columns: int) -> str:
    """The same, broken between words where it is too long."""
    lines = [
        textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False)
        if 0 < columns < len(line)
        else [line]
        for line in text.split("\n")
    ]
    return "\n".join(part for parts in lines for part in parts)


def _dimmed(text: str) -> str:
    return f"{DIM}{text}{RESET}"


def table(rows: Sequence[Mapping[str, str]], num_texts: int = 1) -> str:
    """Rows, at least one, under their keys; the first ``num_texts`` columns are flush left."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        sized = list(zip(cells, widths, strict=True))
        left, right = sized[:num_texts], sized[num_texts:]
        return "  ".join([*(c.ljust(w) for c, w in left), *(c.rjust(w) for c, w in right)]).rstrip()

    headers, *others = map(line, lines)
    return "\n".join([headers, "  ".join("-" * width for width in widths), *others])


BACK = "\x1b[{}D"
ERASE = "\x1b[K"


class WordWrap:
    """Breaks streamed lines between words: a word that meets the edge is erased and written below.

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
        """What to write for a text on a terminal of so many columns, each part with its colour."""
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


class Terminal:
    """Reads lines by readline.

    A paste comes as one text, whatever lines it has, where the terminal tells where it begins and
    ends: GNU readline asks it to, which Python switches off; libedit, in its place on some systems,
    does not know how.

    Args:
        earlier: texts that the arrows bring back, the oldest first.

    Raises:
        ImportError: this build of Python has no readline.
    """

    def __init__(self, earlier: Iterable[str] = ()) -> None:
        import readline  # which takes the terminal for itself

        self._readline = readline
        readline.set_auto_history(False)
        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.clear_history()
        for text in earlier:
            self.remember(text)

    def read(self, prompt: str) -> str:
        """
        Raises:
            EOFError, KeyboardInterrupt: as ``input`` does.
        """
        return input(prompt)

    def remember(self, text: str) -> None:
        """Let the arrows bring a text back."""
        self._readline.add_history(text)
