"""What the engine's steps have for the HTTP process, and when it is sent.

Owns the waiting of pieces. Every message costs both processes: the thread that steps the engine
while it sends, and the other one a write per answer to its client. The first piece of an answer
and the last go at once; those between are sent for all answers together, at most once in an
interval. Steps that take longer than the interval are sent as they end. Knows no engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from paceline.server.engine.wire import Entry, Rest

PATIENCE = 2.0
"""Intervals after the last message when what waits is sent although the next step has not ended."""


class Outbox:
    """Entries of steps on their way out; the thread that steps the engine puts them in.

    Args:
        send: takes entries, at most one of each sample.
        interval: in seconds; with 0 every step is sent by itself.
        clock: seconds.
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
        self._begun: set[tuple[int, int]] = set()
        self._waiting: list[Entry] = []
        self._sent_at = -float("inf")
        self._has_waiting = threading.Event()

    def start(self) -> None:
        """Let a thread send what one long step would hold up."""
        if self._interval:
            threading.Thread(target=self._watch, name="paceline-outbox", daemon=True).start()

    def put(self, entries: Sequence[Entry]) -> None:
        """Take what one step brought: an entry per sample, whose first and last have a rest."""
        with self._lock:
            at = self._clock()
            self._waiting += entries
            edges = [e[:2] for e in entries if e[5] is not None and self._is_edge(e, e[5])]
            if at - self._sent_at >= self._interval:
                self._send_waiting(at)
            elif edges:
                self._send(grouped([entry for entry in self._waiting if entry[:2] in edges]))
                self._waiting = [entry for entry in self._waiting if entry[:2] not in edges]
            if self._waiting and not self._has_waiting.is_set():
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

    def _is_edge(self, entry: Entry, rest: Rest) -> bool:
        """Whether it is the first or the last of its sample."""
        key = entry[:2]
        if rest.finish_reason is not None:
            self._begun.discard(key)
            return True
        is_first = key not in self._begun
        self._begun.add(key)
        return is_first

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


def grouped(entries: Sequence[Entry]) -> list[Entry]:
    """Entries of several samples in their order, as one of each."""
    samples: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        samples.setdefault(entry[:2], []).append(entry)
    return [joined(each) for each in samples.values()]


def joined(entries: Sequence[Entry]) -> Entry:
    """Entries of one sample that follow each other, as one; only the last can end it."""
    if len(entries) == 1:
        return entries[0]
    handle, index = entries[0][:2]
    token_ids, origins, rests = list[int](), list[str](), list[Rest]()
    for _, _, more_ids, more_origins, _, rest in entries:
        token_ids += more_ids
        origins += more_origins
        if rest is not None:
            rests.append(rest)
    text = "".join([entry[4] for entry in entries])
    if not rests:
        return handle, index, token_ids, origins, text, None
    logprobs = [each for rest in rests for each in rest.logprobs]
    return handle, index, token_ids, origins, text, rests[-1]._replace(logprobs=logprobs)
