"""The command line: its groups, its variables of the environment, its errors and exit codes.

Knows no model, and no command but by the table of them: :mod:`paceline.cli` has the rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from paceline import __version__
from paceline.cli.registry import ENVIRONMENT_NOTE, ROOT, LazyGroup, option_variables
from paceline.core.checks import did_you_mean
from paceline.core.errors import PacelineError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
HELP_WIDTH = 100
PREFIX = "PACELINE_"
OTHER_VARIABLES = ("PACELINE_CPU_ISA", "PACELINE_NATIVE_MODULE")
"""Read by no option: the native kernels read the first, their tests the second."""
TEST_PREFIX = "PACELINE_TEST_"
GREETING = f"""Paceline {__version__}: large language models, faster, without changing a token.

  paceline demo             see drafted tokens light up and the same text arrive faster
  paceline run smollm2      chat with a small model, which is downloaded first (98 MB)
  paceline serve smollm2    an API for OpenAI's clients, and a page, at http://127.0.0.1:8000

All commands: paceline --help"""
"""What a person sees who says no more than ``paceline``, on a terminal."""


def _group(name: str, help: str, **more: Any) -> typer.Typer:
    return typer.Typer(
        name=name,
        help=help,
        cls=LazyGroup,
        context_settings={
            "max_content_width": HELP_WIDTH,
            "help_option_names": ["-h", "--help"],
        },
        rich_markup_mode=None,
        no_args_is_help=True,
        **more,
    )


app = _group(
    ROOT,
    "Run large language models faster, without changing a token of their output.",
    epilog=ENVIRONMENT_NOTE,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(_group("train", "Train a language model, a draft for one, or an n-gram model."))
app.add_typer(_group("bench", "Benchmark a server, or the engine without one."))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-v",
            is_eager=True,
            callback=_print_version,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    warn_of_unknown_variables()


def warn_of_unknown_variables() -> None:
    """Say on standard error which ``PACELINE_`` variables nothing reads, and what is near."""
    present = [name for name in os.environ if name.startswith(PREFIX)]
    known = {*OTHER_VARIABLES, *option_variables()} if present else set()
    for name in sorted(set(present) - known):
        if not name.startswith(TEST_PREFIX):
            hint = did_you_mean(name, sorted(known), PREFIX)
            print(f"warning: nothing reads the variable {name!r}{hint}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what a user or the system can cause is a line on stderr, and code 2."""
    _open_missing_streams()
    if not (sys.argv[1:] if arguments is None else arguments) and sys.stdout.isatty():
        print(GREETING)
        return
    try:
        app(args=arguments, prog_name="paceline")
    except (PacelineError, OSError) as error:  # the system's own: a full disk, an impossible path
        from paceline.cli.terminal import printable

        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            _leave_interrupted()
        raise


def _open_missing_streams() -> None:
    """Whoever started this may have closed standard streams, whose places a file would take."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _leave_interrupted() -> NoReturn:
    """Leave without the interpreter's teardown.

    A model may be computing on its thread, and that would abort when it found no interpreter.
    """
    print("interrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader may be gone
            stream.flush()
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
