"""What a person sees while the kernels are compiled, and what a log has of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builds import ROOT

PROGRAM = [sys.executable, str(ROOT / "csrc" / "progress.py")]
# As ninja 1.11 prints them to a pipe, with a compiler's warning between.
BUILD = """
print("[1/3] Building CXX object a.o", flush=True)
print("a.cpp:1: warning: unused", flush=True)
print("[2/3] Building CXX object b.o", flush=True)
print("[3/3] Linking CXX shared module", flush=True)
raise SystemExit(%d)
"""


def in_terminal(command: list[str]) -> tuple[int, str]:
    """The status of a program whose standard output is a terminal, and what the terminal got."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.STDOUT) as program:
        os.close(theirs)
        parts: list[bytes] = []
        try:
            while part := os.read(ours, 1024):
                parts.append(part)
        except OSError:  # so a terminal ends on Linux
            pass
        os.close(ours)
    return program.returncode, b"".join(parts).decode()


@pytest.mark.parametrize("status", [0, 3])
def test_a_terminal_counts_the_steps_in_one_line(tmp_path: Path, status: int) -> None:
    log = tmp_path / "log"
    log.write_text("configured\n")
    command = [*PROGRAM, str(log), sys.executable, "-c", BUILD % status]
    returned, shown = in_terminal(command)
    assert returned == status
    assert shown.count("\n") == 1
    assert shown.endswith("\rcompiling the kernels: 3 of 3\r\n")
    assert re.findall(r"\d of 3", shown) == ["1 of 3", "2 of 3", "3 of 3"]
    assert log.read_text().startswith("configured\n[1/3] Building CXX object a.o\na.cpp:1: warning")


def test_a_log_has_one_line_of_it(tmp_path: Path) -> None:
    command = [*PROGRAM, str(tmp_path / "log"), sys.executable, "-c", BUILD % 0]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "compiling the kernels in 3 steps ...\n"
    assert done.stderr == ""
    command[-1] = "print('ninja: no work to do.')"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_make_compiles_with_it() -> None:
    dry = subprocess.run(
        ["make", "--dry-run", "--directory", str(ROOT), "native"], capture_output=True, text=True
    )
    assert "csrc/progress.py build-native.log .venv/bin/cmake --build build/native" in dry.stdout
