"""Run a build of Ninja's: its output goes into a log, and the terminal shows how far it is.

``python csrc/progress.py LOG COMMAND...`` ends with the command's status. Where standard output is
no terminal, such as in the log of a CI job, one line says what begins. Knows no compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

STATUS = "[%f/%t] "
"""In $NINJA_STATUS: of the steps of a build, those that are done."""
_STEP = re.compile(r"\[(\d+)/(\d+)\] ")


def run(log: Path, command: Sequence[str]) -> int:
    """Append what the command prints to the log, and show each step that it ends."""
    with (
        log.open("a", encoding="utf-8") as kept,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"NINJA_STATUS": STATUS},
        ) as build,
    ):
        assert build.stdout is not None
        is_terminal, shown = sys.stdout.isatty(), False
        for line in build.stdout:
            kept.write(line)
            if step := _STEP.match(line):
                _show(int(step[1]), int(step[2]), is_terminal, first=not shown)
                shown = True
    if shown and is_terminal:
        print(flush=True)
    return build.returncode


def _show(done: int, steps: int, is_terminal: bool, first: bool) -> None:
    if is_terminal:
        print(f"\rcompiling the kernels: {done} of {steps}", end="", flush=True)
    elif first:
        print(f"compiling the kernels in {steps} steps ...", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
