"""Messages between the engine and a stage: a JSON object and arrays, framed by their sizes.

Nothing that comes in is executed or unpickled. There is no password and no encryption: a stage is
for a network in which one trusts everybody.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, StageError
from paceline.tensors.arrays import Array

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
        StageError: of every method, once the other end is gone or says what nobody understands.
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
