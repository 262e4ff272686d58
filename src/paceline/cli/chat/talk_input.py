"""What a person types in a conversation: a message, which may have several lines, or a command."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

PROMPT = "> "
NEXT_LINE = "... "
QUOTES = '"""'
LEAVING = {"exit", "quit"}
"""Words that leave, as ``/bye`` does, where they are all that is typed."""
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
_OPENED = re.compile(r'(\s*(?:/set\s+system\s+|/system\s+)?)"""')

Read = Callable[[str], str]
"""Asks for a line, behind a prompt; raises EOFError or KeyboardInterrupt where there is none."""


@dataclass(frozen=True, slots=True)
class Command:
    """``/name argument``."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


def typed(read: Read) -> str | Command:
    """The next message, which is never a command where it is quoted or has several lines.

    As in Ollama, a text between triple quotes may have several lines; so may a paste.

    Raises:
        EOFError: nothing more comes.
        KeyboardInterrupt: what was typed is given up.
    """
    line = read(PROMPT).rstrip("\n")
    opened = _OPENED.match(line)
    if opened is None or ("\n" in line and not line.rstrip().endswith(QUOTES)):
        return line if "\n" in line.strip() else _single(line)
    text = _quoted(line[opened.end() :], read)
    return _single(opened[1].strip() + " " + text) if opened[1].strip() else text


def _quoted(begun: str, read: Read) -> str:
    """What stands between quotes, of which the first are passed."""
    lines = [begun]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read(NEXT_LINE))
    return "\n".join(lines).rstrip().removesuffix(QUOTES)


def _single(line: str) -> str | Command:
    words = line.strip()
    if words in LEAVING:
        return Command("bye")
    found = _COMMAND.fullmatch(words)
    return Command(found[1], (found[2] or "").strip()) if found else line
