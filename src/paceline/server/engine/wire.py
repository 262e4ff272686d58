"""Messages over a socket between the two processes of a server: their framing and their entries.

A message is a pickled tuple behind its length. Tuples of plain values, because a dataclass costs
about ten times as much to pickle, and a message is sent with every step. The thread that steps the
engine sends it: waking the other process is most of the cost, and waking a thread that does the
sending costs as much. Both ends are processes of one user, and one started the other: nothing that
strangers wrote is unpickled.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paceline.errors import PacelineError
from paceline.metrics import SpeculationCounters

LogprobTuple = tuple[int, float, int, tuple[tuple[int, float], ...]]
"""A ``TokenLogprobs`` as it travels."""
EngineFactory = Callable[[], Any]
"""Makes the engine in its own process. It travels there pickled: a function that can be imported,
or a ``functools.partial`` of one."""
Message = tuple[Any, ...]
_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 18


class Rest(NamedTuple):
    """What a step's entry has beyond new tokens: with a sample's first and last, or log-probs.

    The rest of an :data:`Entry` is mostly None.
    """

    logprobs: list[LogprobTuple]
    finish_reason: str | None
    stop_reason: str | int | None
    counters: SpeculationCounters | None
    num_cached_tokens: int
    prompt_logprobs: list[LogprobTuple | None]
    error: Exception | None


Entry = tuple[int, int, list[int], list[str], str, Rest | None]
"""What a step brought to a sample: ``(handle, index, token_ids, origins, text, rest)``."""


def packed(message: Message) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take what was read; yield the messages that are complete."""
        buffer, start = self._buffer, 0
        buffer += data
        while len(buffer) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            message: Message = pickle.loads(buffer[begin:end])
            start = end
            yield message
        del buffer[:start]


class Channel:
    """The engine's end: blocking, read by one thread and written by several."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._writing = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises: OSError: the other end is gone."""
        data = packed(message)
        with self._writing:
            self._socket.sendall(data)

    def is_spoken_to(self) -> bool:
        """Wait for a message, which stays to be read; False when the other end is gone."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            return False

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is closed, however it ended."""
        unpacker = Unpacker()
        while data := self._read():
            yield from unpacker.feed(data)

    def _read(self) -> bytes:
        try:
            return self._socket.recv(_CHUNK)
        except ConnectionError:
            return b""


def portable(error: BaseException) -> Exception:
    """The error as it can travel: itself, or its description when pickling would change it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if isinstance(error, Exception) and type(copy) is type(error) and str(copy) == str(error):
        return error
    return PacelineError(f"{type(error).__name__}: {error}")
