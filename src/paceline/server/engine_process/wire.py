"""What passes between the two processes of a server: messages, pieces that wait, heartbeats.

A message is a pickled tuple behind its length. Tuples of plain values, because a class of our own
costs about ten times as much to pickle, and a message is sent with every step. The thread that
steps the engine sends it: waking the other process is most of the cost, and waking a thread that
does the sending costs as much. Both ends are processes of one user, and one started the other:
nothing that strangers wrote is unpickled.

Owns no process, no engine and no request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from paceline.core.errors import EngineClosedError, PacelineError
from paceline.request.metrics import EngineStats
from paceline.server.engine_process.messages import Piece

log = logging.getLogger(__name__)
Message = tuple[Any, ...]
Entry = tuple[int, Piece]
"""What a step brought to a sample of the request with this number."""
Sample = tuple[int, int]
"""A request's number, and which of its samples."""
_LENGTH = struct.Struct("<Q")
PATIENCE = 2.0
"""Intervals after the last message when what waits is sent although the next step has not ended."""
INTERVAL = 1.0
"""Seconds between two beats, and between two looks for them."""
SILENT_TICKS = 3
"""Looks without a beat after which an engine does not count as ready."""


def packed(message: Message) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


async def received(reader: asyncio.StreamReader) -> Message:
    """The next message at the HTTP process's end; ``EOFError`` or ``OSError`` without the other."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    message: Message = pickle.loads(await reader.readexactly(size))
    return message


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
        with self._socket.makefile("rb") as file:
            try:
                while head := file.read(_LENGTH.size):
                    yield pickle.loads(file.read(*_LENGTH.unpack(head)))
            except (ConnectionError, EOFError, struct.error, pickle.UnpicklingError):
                return


def portable(error: BaseException) -> Exception:
    """The error as it can travel: itself, or its description when pickling would change it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if isinstance(error, Exception) and type(copy) is type(error) and str(copy) == str(error):
        return error
    return PacelineError(f"{type(error).__name__}: {error}")


# --- pieces that wait -----------------------------------------------------------------------------


class Outbox:
    """What steps brought, on its way out; the thread that steps the engine puts it in.

    Every message costs both processes: that thread while it sends, and the other process a write
    per answer to its client. The first piece of an answer and the last go at once; those between
    are sent for all answers together, at most once in an interval. Steps that take longer than the
    interval are sent as they end.

    Args:
        send: takes entries, at most one of each sample.
    """

    def __init__(
        self,
        send: Callable[[list[Entry]], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()  # held while sending too: pieces keep their order
        self._waiting: list[Entry] = []
        self._sent_at = -float("inf")
        self._has_waiting = threading.Event()

    def start(self) -> None:
        """Let a thread send what one long step would hold up."""
        if self._interval:
            threading.Thread(target=self._watch, name="paceline-outbox", daemon=True).start()

    def put(self, entries: Iterable[Entry], edges: Collection[Sample]) -> None:
        """Take what one step brought: at most an entry per sample.

        Args:
            edges: the samples whose first or last piece is among them.
        """
        with self._lock:
            at = self._clock()
            self._waiting += entries
            if at - self._sent_at >= self._interval:
                self._send_waiting(at)
            elif edges:
                self._send(grouped(entry for entry in self._waiting if _sample(entry) in edges))
                self._waiting = [each for each in self._waiting if _sample(each) not in edges]
            if self._waiting:
                self._has_waiting.set()

    def flush(self) -> None:
        """Send everything that waits."""
        with self._lock:
            self._send_waiting(self._clock())

    def remind(self) -> float | None:
        """Send what has waited too long.

        Returns:
            seconds after which to ask again; None when nothing waits.
        """
        with self._lock:
            at = self._clock()
            overdue_at = self._sent_at + PATIENCE * self._interval
            if at >= overdue_at:
                self._send_waiting(at)
            if not self._waiting:
                self._has_waiting.clear()
                return None
            return overdue_at - at

    def _send_waiting(self, at: float) -> None:
        if self._waiting:
            self._send(grouped(self._waiting))
            self._waiting = []
            self._sent_at = at

    def _watch(self) -> None:
        while True:
            seconds = self.remind()
            if seconds is None:
                self._has_waiting.wait()
            else:
                time.sleep(seconds)


def _sample(entry: Entry) -> Sample:
    return entry[0], entry[1].sample


def grouped(entries: Iterable[Entry]) -> list[Entry]:
    """Entries of several samples in their order, as one of each."""
    samples: dict[Sample, list[Piece]] = {}
    for entry in entries:
        samples.setdefault(_sample(entry), []).append(entry[1])
    return [(handle, joined(pieces)) for (handle, _), pieces in samples.items()]


def joined(pieces: list[Piece]) -> Piece:
    """Pieces of one sample that follow its first one and each other; only the last can end it."""
    if len(pieces) == 1:
        return pieces[0]
    return pieces[-1]._replace(
        token_ids=[token for piece in pieces for token in piece.token_ids],
        origins=[origin for piece in pieces for origin in piece.origins],
        text="".join([piece.text for piece in pieces]),
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
    )


# --- heartbeats -----------------------------------------------------------------------------------


def start_beating(
    send: Callable[[EngineStats | None], None],
    stats: Callable[[], EngineStats],
    interval: float,
) -> None:
    """Send beats from a thread of their own until the process ends, whatever the engine computes.

    A beat carries the engine's counters when the engine has come to tell them since the last one,
    which it does between two steps, and None otherwise.

    Args:
        send: takes a beat's counters, or None.
        stats: the engine's counters; it may take as long as a step. Where it fails, the last
            ones count.
    """
    told: queue.SimpleQueue[EngineStats] = queue.SimpleQueue()
    is_wanted = threading.Semaphore()

    def ask() -> None:
        last, has_failed = EngineStats(), False
        while is_wanted.acquire():
            try:
                last = stats()
            except EngineClosedError:  # it says so itself
                return
            except Exception:
                if not has_failed:
                    log.exception("the engine's counters cannot be told; the last ones are kept")
                has_failed = True
            told.put(last)  # the engine came to answer, whatever it said

    def beat() -> None:
        while True:
            time.sleep(interval)
            found = None if told.empty() else told.get()
            if found is not None:
                is_wanted.release()
            send(found)

    for name, target in (("counters", ask), ("heartbeat", beat)):
        threading.Thread(target=target, name=f"paceline-{name}", daemon=True).start()


class Pulse:
    """What beats say of one life of an engine; the caller tells it of beats and of ticks.

    Detected: beats that stop, which means that the process is stopped, is given no processor, or
    keeps Python's lock to itself. A long step does none of that: models compute without the lock.
    And a step that does not end, though beats go on; it cannot be told from a long one, and counts
    as hung when it has taken longer than any request may. Not detected: a model that takes for ever
    to load, an engine that steps and brings nothing forth, and one request that is forgotten.

    Time is counted in beats and in ticks of the HTTP process's own loop, not in seconds of a clock,
    so that a machine which sleeps, or stops both processes, raises no alarm when it goes on.

    Args:
        hang_timeout: seconds without a beat after which the engine is to be ended.
        step_timeout: seconds that a step may take; None is no limit.
        interval: seconds between two beats and between two ticks.
    """

    def __init__(
        self,
        hang_timeout: float = 60.0,
        step_timeout: float | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self.hang_timeout = hang_timeout
        self.step_timeout = math.inf if step_timeout is None else step_timeout
        self.interval = interval
        self.restart()

    def restart(self) -> None:
        """Another engine lives."""
        self._num_silent = 0  # ticks since the last beat
        self._num_busy = 0  # beats since the engine last came to tell its counters

    def tick(self) -> None:
        """An interval of the HTTP process's own has passed."""
        self._num_silent += 1

    def beat(self, is_between_steps: bool) -> None:
        """A beat has come."""
        self._num_silent = 0
        self._num_busy = 0 if is_between_steps else self._num_busy + 1

    @property
    def is_silent(self) -> bool:
        """Whether beats are missing."""
        return self._num_silent >= SILENT_TICKS

    @property
    def verdict(self) -> str:
        """Why the engine is to be ended; empty while it is not."""
        if self._num_silent * self.interval >= max(self.hang_timeout, self.interval):
            return f"it gave no sign of life for {self.hang_timeout:g} s"
        if self._num_busy * self.interval > self.step_timeout:
            return f"a step took longer than {self.step_timeout:g} s"
        return ""
