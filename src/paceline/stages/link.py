"""How the engine and the stages talk: links, the stages as the engine sees them, and their answers.

A message is a JSON object and arrays, framed by their sizes. Nothing that comes in is executed or
unpickled. There is no password and no encryption: a stage is for a network in which one trusts
everybody. As soon as a stage has answered for a micro-batch, what it said goes to the next stage
(:class:`Journey`). Where there are several stages, a thread for each waits for its answers, so that
the engine's own layers need not wait, and so that a stage can send while the engine sends to it.
Knows neither memory nor rows.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from socket import create_connection
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, StageError
from paceline.tensors.arrays import Array, Floats

Message = dict[str, Any]
KINDS = ("float32", "int32", "int64")
SIZE = struct.Struct("<I")
MOST_BYTES = 1 << 26  # of a message without its arrays
PATIENCE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}
"""Seconds, and milliseconds, until a host that answers nothing counts as gone."""


class Link:
    """One end of a connection; one thread may send while another receives.

    Raises:
        StageError: of every method, once the other end is gone, or sends what is no message.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PATIENCE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection

    def wait(self, seconds: float | None) -> None:
        """For so long at most from now on, in every method; None: until the other end is gone."""
        self._socket.settimeout(seconds)

    def send(self, message: Message, *arrays: Array) -> None:
        parts = [np.ascontiguousarray(each) for each in arrays]
        shapes = [(each.dtype.name, each.shape) for each in parts]
        head = json.dumps({"message": message, "arrays": shapes}).encode()
        try:
            self._socket.sendall(SIZE.pack(len(head)) + head)
            for each in parts:
                self._socket.sendall(each.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise StageError(f"the connection broke ({error.strerror or error})") from error

    def receive(self) -> tuple[Message, Sequence[Array]]:
        (size,) = SIZE.unpack(self._bytes(SIZE.size))
        if size > MOST_BYTES:
            raise StageError("the other end is not a stage")
        try:
            head = json.loads(self._bytes(size))
            shapes = [(kind, tuple(map(int, shape))) for kind, shape in head["arrays"]]
            message = dict(head["message"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StageError("the other end is not a stage") from error
        return message, [self._array(kind, shape) for kind, shape in shapes]

    def _array(self, kind: str, shape: tuple[int, ...]) -> Array:
        if kind not in KINDS:
            raise StageError(f"the other end sent numbers of the type {kind}")
        try:
            found: Array = np.empty(shape, kind)
        except (ValueError, MemoryError) as error:
            raise StageError(f"the other end sent an array of the shape {shape}") from error
        self._into(memoryview(found.reshape(-1).view(np.uint8).data))
        return found

    def _bytes(self, count: int) -> bytes:
        found = bytearray(count)
        self._into(memoryview(found))
        return bytes(found)

    def _into(self, room: memoryview) -> None:
        while len(room):
            try:
                count = self._socket.recv_into(room)
            except OSError as error:
                raise StageError(f"the connection broke ({error.strerror or error})") from error
            if not count:
                raise StageError("the connection was closed")
            room = room[count:]

    def close(self) -> None:
        """Whoever waits for the other end, in whichever thread, learns that it is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def address_of(text: str) -> tuple[str, int]:
    """``HOST:PORT``; raises :class:`ConfigError` for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{text!r} is not the address of a stage; write HOST:PORT")
    return host.strip("[]"), int(port)


def shown_address(host: str, port: int) -> str:
    """What :func:`address_of` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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


Answer = tuple[Message, Sequence[Array]]


class Journey:
    """See the module's docstring.

    Args:
        stages: those after the engine's own, at least one.
        taps: that each of them answers; what goes to the next stage is the last one.
        greedy: the last stage says the arg-max alone.

    Attributes:
        answers: of each stage, by micro-batch.
    """

    def __init__(
        self, stages: Sequence[RemoteStage], taps: Sequence[Sequence[int]], greedy: bool
    ) -> None:
        self._stages, self._taps, self._greedy = stages, taps, greedy
        self._started = [SimpleQueue[int | None]() for _ in stages]
        self._error: Exception | None = None
        self.answers: list[list[Answer]] = [[] for _ in stages]

    def run(self, rows: Iterable[Floats], overlaps: bool) -> None:
        """Take what leaves the engine's own layers through all stages.

        Args:
            rows: ``[rows, hidden_size]`` of each micro-batch, computed when it is asked for.
            overlaps: stages compute meanwhile.

        Raises:
            StageError: a stage is lost or has failed. No stage has anything more to say, then.
        """
        stages = range(len(self._stages))
        threads = [
            threading.Thread(target=self._follow, args=(at,), daemon=True)
            for at in stages
            if overlaps
        ]
        for each in threads:
            each.start()
        try:
            for index, x in enumerate(rows):
                if self._error is not None:
                    break
                self._start(0, index, x)
        finally:
            self._started[0].put(None)
            for each in threads:
                each.join()
            for at in () if threads else stages:
                self._follow(at)
        if self._error is not None:
            raise self._error

    def _start(self, at: int, index: int, x: Floats) -> None:
        self._stages[at].start(x, index, self._taps[at], self._greedy)
        self._started[at].put(index)

    def _follow(self, at: int) -> None:
        """Wait for the answers to all that a stage was sent, whatever has failed."""
        is_last = at + 1 == len(self._stages)
        while (index := self._started[at].get()) is not None:
            try:
                answer = self._stages[at].result()
                self.answers[at].append(answer)
                if not is_last and self._error is None:
                    self._start(at + 1, index, answer[1][-1][:, -1])
            except Exception as error:
                self._error = self._error or error
        if not is_last:
            self._started[at + 1].put(None)
