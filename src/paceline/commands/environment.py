"""Variables of the environment that are named as Paceline's. Warns of those that nothing reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

PREFIX = "PACELINE_"
OTHER_VARIABLES = ("PACELINE_CPU_ISA", "PACELINE_NATIVE_MODULE")
"""Read by no option: the native kernels read the first, their tests the second."""
TEST_PREFIX = "PACELINE_TEST_"


def warn_of_unknown_variables(command: Any) -> None:
    """Say on standard error which ``PACELINE_`` variables nothing reads, and what is near.

    Args:
        command: the root of the command line, whose options know their variables.
    """
    present = [name for name in os.environ if name.startswith(PREFIX)]
    known = {*OTHER_VARIABLES, *option_variables(command)} if present else set()
    for name in sorted(set(present) - known):
        if not name.startswith(TEST_PREFIX):
            print(
                f"warning: nothing reads the variable {name!r}{_hint(name, known)}", file=sys.stderr
            )


def _hint(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    # Without the prefix, which would make all of them similar.
    stems = [each.removeprefix(PREFIX) for each in sorted(known)]
    near = get_close_matches(name.removeprefix(PREFIX), stems, n=1)
    return f"; did you mean {PREFIX}{near[0]}?" if near else ""


def option_variables(command: Any) -> Iterator[str]:
    """The variables that the options of a command and of those below it read."""
    for parameter in command.params:
        if parameter.envvar:
            yield parameter.envvar
    for child in getattr(command, "commands", {}).values():
        yield from option_variables(child)
