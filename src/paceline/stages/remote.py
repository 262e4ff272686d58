"""A stage as the engine sees it: where it is, whether it is there, and what it is told.

Knows neither memory nor batches.
"""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from socket import create_connection
from typing import Any

from paceline.core.errors import StageError
from paceline.stages.link import Link, Message, address_of
from paceline.tensors.arrays import Array, Floats

CONNECT_SECONDS = 10.0
RETRY_SECONDS = 2.0


class RemoteStage:
    """See the module's docstring.

    Args:
        address: ``HOST:PORT``; empty starts a process on this machine.
    """

    def __init__(self, address: str, layers: range, greeting: Message) -> None:
        self._address, self.layers, self._greeting = address, layers, greeting
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None  # of the process
        self._why, self._wait_until = "", 0.0
        self.connect()

    @property
    def is_lost(self) -> bool:
        return self._link is None

    def __str__(self) -> str:
        at = self._address or "this machine"
        return f"the stage at {at}, with layers {self.layers.start} to {self.layers.stop - 1},"

    def connect(self) -> None:
        """Be ready for forwards, with an empty memory; raises :class:`StageError`."""
        if time.monotonic() < self._wait_until:
            raise StageError(f"{self} is lost: {self._why}; it is asked again in a moment")
        try:
            host, port = self._place()
            self._link = Link(create_connection((host, port), CONNECT_SECONDS))
            self._link.wait(None)
            self._link.send({**self._greeting, "layers": [self.layers.start, self.layers.stop]})
            reply, _ = self._link.receive()
        except (OSError, StageError) as error:
            self._give_up(str(error))
            raise StageError(
                f"{self} is not there: {error}; `paceline stage --listen HOST:PORT` starts one"
            ) from error
        if "error" in reply:
            self._give_up(reply["error"])
            raise StageError(f"{self} cannot serve: {reply['error']}")
        self._why = ""

    def _give_up(self, why: str) -> None:
        """For a moment, in which every other request would ask again."""
        self.close()
        self._why, self._wait_until = why, time.monotonic() + RETRY_SECONDS

    def _place(self) -> tuple[str, int]:
        if self._address:
            return address_of(self._address)
        if self._process is None:
            self._port = None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.stages.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            weakref.finalize(self, self._process.kill)
        assert self._process.stdout is not None
        if self._port is None:
            said = self._process.stdout.readline()
            if not said:
                raise StageError("its process ended before it listened")
            self._port = int(said.split()[-1])
        return "127.0.0.1", self._port

    def lose(self, error: Exception) -> StageError:
        """Give the connection up; returns what to raise."""
        self.close()
        self._why = str(error)
        return StageError(f"{self} is lost: {error}")

    def close(self) -> None:
        link, self._link = self._link, None
        process, self._process = self._process, None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.wait()

    def tell(self, what: str, *arrays: Array, more: Sequence[Any] = ()) -> None:
        """What is not answered; of a lost stage the next forward says so."""
        if self._link is not None:
            try:
                self._link.send({"do": what, "with": more}, *arrays)
            except StageError as error:
                self.lose(error)

    def start(self, x: Floats, index: int, taps: Sequence[int], greedy: bool) -> None:
        """Compute one of the micro-batches that were packed."""
        link = self._connected()
        try:
            link.send({"do": "run", "index": index, "taps": taps, "greedy": greedy}, x)
        except StageError as error:
            raise self.lose(error) from error

    def result(self) -> tuple[Message, Sequence[Array]]:
        """Of what was started first and not yet answered. One thread may wait for it while another
        one starts more."""
        link = self._connected()
        try:
            reply, arrays = link.receive()
        except Exception as error:  # half an answer may be left in the line
            raise self.lose(error) from error
        if "error" in reply:
            raise StageError(f"{self} failed: {reply['error']}")
        return reply, arrays

    def _connected(self) -> Link:
        link = self._link
        if link is None:
            raise StageError(f"{self} is lost: {self._why}")
        return link
