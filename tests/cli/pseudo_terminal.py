"""Programs at a terminal, by a person who types when they are asked."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tests.builds import ROOT


class Terminal:
    """Attributes:
    shown: everything that has appeared.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = 0
        self.shown = ""

    def until(self, text: str) -> str:
        """Wait until this appears; returns what has come since the last time."""
        while text not in self.shown[self._seen :]:
            if not self._read():
                raise EOFError(f"the program ended before {text!r} came: {self.shown!r}")
        end = self.shown.index(text, self._seen) + len(text)
        found, self._seen = self.shown[self._seen : end], end
        return found

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def to_the_end(self) -> str:
        """Wait until the program ends; returns what has come since the last time."""
        while self._read():
            pass
        found, self._seen = self.shown[self._seen :], len(self.shown)
        return found

    def _read(self) -> bool:
        with suppress(OSError):  # where the other end is closed
            if data := os.read(self._descriptor, 65536):
                self.shown += data.decode(errors="replace")
                return True
        return False


@contextmanager
def at_a_terminal(
    arguments: Sequence[str], environment: Mapping[str, str], columns: int = 80
) -> Iterator[Terminal]:
    """Python at a terminal of its own, with this project to import."""
    child, descriptor = pty.fork()
    if not child:
        found = {**environment, "TERM": "xterm", "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")}
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **found})
    try:
        yield Terminal(descriptor)
    finally:
        os.close(descriptor)  # which hangs up
        os.waitpid(child, 0)
