"""Man pages, from the command line's own help: ``python -m paceline.cli.manual FOLDER``.

Writes a page for each command, such as ``paceline-run.1``. Knows roff, and no command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.cli.reference import all_commands


def write_manual(folder: Path) -> list[Path]:
    """Write all pages into a folder, which is made; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for words, command in all_commands():
        path = folder / f"{'-'.join(words)}.1"
        path.write_text(page(words, command), encoding="utf-8")
        written.append(path)
    return written


def page(words: tuple[str, ...], command: Any) -> str:
    """The page of a command as roff, with the words that lead to it, ``paceline`` first."""
    name = "-".join(words)
    context = command.make_context(" ".join(words), [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    summary, *more = _paragraphs(command.help or "")
    lines = [
        f'.TH "{name.upper()}" "1" "" "paceline {__version__}" "Paceline"',
        ".SH NAME",
        f"{_plain(name)} \\- {_plain(summary)}",
        ".SH SYNOPSIS",
        f".B {_plain(' '.join(words))}",
        _plain(usage),
        *_section("DESCRIPTION", [line for text in more for line in (".PP", _plain(text))]),
        *_parameters("ARGUMENTS", command, context, is_argument=True),
        *_parameters("OPTIONS", command, context, is_argument=False),
        *_children(name, command),
        *_section("ENVIRONMENT", [_plain(text) for text in _paragraphs(command.epilog or "")]),
    ]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _plain(text: str) -> str:
    """Text in which roff sees no request and no escape."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _section(title: str, lines: list[str]) -> list[str]:
    return [f".SH {title}", *lines] if lines else []


def _parameters(title: str, command: Any, context: Any, *, is_argument: bool) -> list[str]:
    lines: list[str] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and (parameter.param_type_name == "argument") == is_argument:
            lines += [".TP", f".B {_plain(record[0])}", _plain(record[1])]
    return _section(title, lines)


def _children(name: str, command: Any) -> list[str]:
    def told() -> Iterator[str]:
        for word, child in getattr(command, "commands", {}).items():
            summary = _paragraphs(child.help or "")[0]
            yield from (".TP", f".BR {_plain(f'{name}-{word}')} (1)", _plain(summary))

    return _section("COMMANDS", list(told()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m paceline.cli.manual FOLDER")
    for written in write_manual(Path(sys.argv[1])):
        print(written)
