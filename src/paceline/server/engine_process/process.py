"""The process in which a server's engine lives. Owns the engine; knows no HTTP and no asyncio.

Four kinds of threads: one reads commands, a few submit prompts (which compiles grammars) and wait
for answers of the engine, the engine's own thread steps it and hands what each step brought to all
prompts to the outbox, and one sends heartbeats. None of them waits for the other process to read
what was asked for, so the two processes cannot block each other. The process ends when the other
one does.

A command is ``(name, number, arguments..)``; it is answered by ``(reply, number, error, value)``,
apart from ``(abort, number)``, which ends the ``generate`` with that number.

Other messages: ``(hello, info, tokenizer)``, ``(failed, error)``, ``(step, entries)``,
``(beat, stats)`` and ``(dead, reason)``.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paceline.core.errors import EngineClosedError
from paceline.request.engine_stats import EngineStats
from paceline.request.request import Request, StepOutput
from paceline.request.sampling_params import SamplingParams
from paceline.server.engine_process.messages import (
    Channel,
    EngineFactory,
    Piece,
    ServedEngine,
    SubmittedPrompt,
    portable,
)

log = logging.getLogger(__name__)
NAME = "paceline-engine"
NUM_SUBMITTERS = 16
NUM_GRAMMAR_SUBMITTERS = 2
"""Of prompts with a grammar, whose compiler can take long; other prompts do not wait for it."""


def run_engine(
    sock: socket.socket,
    factory: EngineFactory,
    configure_logging: Callable[[], None] | None,
    stream_interval: float,
    beat_interval: float,
) -> NoReturn:
    """What the process does from its start to its end."""
    # Whoever stops the server tells the other process, which lets requests end first.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    if configure_logging is not None:
        configure_logging()
    channel = Channel(sock)
    threading.Thread(target=_end_without, args=(channel,), daemon=True).start()
    try:
        engine = factory()
        hello = ("hello", engine.info(), engine.checkpoint.tokenizer)
    except Exception as error:
        channel.send(("failed", portable(error)))
        os._exit(1)
    channel.send(hello)
    # While the other process reads the tokenizer; streams would stand still if it were done later.
    engine.prepare_grammars()
    gc.collect()
    gc.freeze()  # what lives from here to the end need not be looked at again and again
    server = EngineServer(channel, engine, stream_interval)
    start_beating(lambda stats: server.tell(("beat", stats)), engine.stats, beat_interval)
    server.serve()
    os._exit(0)  # not through the exit of threads that may be in the middle of a long step


def _end_without(channel: Channel) -> None:
    """End when the other process does, also while a model loads."""
    if not channel.is_spoken_to():
        os._exit(1)


@dataclass(slots=True)
class _Route:
    """Where a sample's outputs go, and what they will need of it."""

    handle: int
    sample: int
    request: Request
    trace_id: str
    is_whole: bool
    is_fresh: bool = True


class EngineServer:
    """Serves the commands of one channel with one engine."""

    def __init__(
        self, channel: Channel, engine: ServedEngine, stream_interval: float = 0.0
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._commands: dict[str, Callable[..., object]] = {
            "stats": engine.stats,
            "flush_prefix_cache": engine.flush_prefix_cache,
            "load_lora": engine.load_lora,
            "unload_lora": engine.unload_lora,
        }
        self._pool = ThreadPoolExecutor(NUM_SUBMITTERS, thread_name_prefix="paceline-submit")
        self._grammar_pool = ThreadPoolExecutor(
            NUM_GRAMMAR_SUBMITTERS, thread_name_prefix="paceline-grammar"
        )
        self._lock = threading.Lock()
        # Request ids of each handle that still run; None while they are being submitted.
        self._jobs: dict[int, set[int] | None] = {}
        self._routes: dict[int, _Route] = {}  # of the engine's thread alone
        self._outbox = Outbox(self._send_entries, stream_interval)

    def serve(self) -> None:
        """Until the other process closes the channel or dies."""
        self._outbox.start()
        for name, number, *arguments in self._channel:
            if name == "generate":
                with self._lock:
                    self._jobs[number] = None
                is_shaped = any(wish.structured_outputs is not None for wish in arguments[1])
                pool = self._grammar_pool if is_shaped else self._pool
                pool.submit(self._answer, number, self._generate, number, *arguments)
            elif name == "abort":
                self._abort(number)
            else:
                self._pool.submit(self._answer, number, self._commands[name], *arguments)

    # --- commands ------------------------------------------------------------------------------

    def _generate(
        self,
        handle: int,
        prompts: list[list[int]],
        params: list[SamplingParams],
        cache_salt: str,
        trace_id: str,
        adapter: str | None,
        is_whole: bool,
    ) -> None:
        def on_added(taken: Sequence[SubmittedPrompt]) -> None:
            requests = [request for prompt in taken for request in prompt.requests]
            ids = [request.request_id for request in requests]
            with self._lock:
                is_wanted = handle in self._jobs
                if is_wanted:
                    self._jobs[handle] = set(ids)
            if not is_wanted:  # it was aborted while it was being submitted
                self._engine.abort(ids)
                return
            for sample, request in enumerate(requests):
                route = _Route(handle, sample, request, trace_id, is_whole)
                self._routes[request.request_id] = route

        with self._lock:
            if handle not in self._jobs:  # it was aborted while it waited for this thread
                return
        extra = {"trace_id": trace_id}
        try:
            adapters = [adapter] * len(prompts)
            self._engine.submit(prompts, params, self._send_step, cache_salt, on_added, adapters)
        except Exception as error:
            log.info("request %d is refused: %s", handle, error, extra=extra)
            with self._lock:
                self._jobs.pop(handle, None)
            raise
        count = sum(map(len, prompts))
        log.info("request %d: %d prompt tokens", handle, count, extra=extra)

    def _abort(self, handle: int) -> None:
        with self._lock:
            ids = self._jobs.pop(handle, None)
        if ids:
            self._engine.abort(sorted(ids))

    def _answer(self, number: int, command: Callable[..., object], *arguments: Any) -> None:
        try:
            value = command(*arguments)
        except Exception as error:
            self.tell(("reply", number, portable(error), None))
        else:
            self.tell(("reply", number, None, value))

    def tell(self, message: tuple[Any, ...]) -> None:
        with suppress(OSError):  # the other process is gone, which ends this one
            self._channel.send(message)

    # --- steps ---------------------------------------------------------------------------------

    def _send_step(self, outputs: Sequence[StepOutput]) -> None:
        """Send what one step brought to all prompts, on the engine's thread."""
        death = next((o.error for o in outputs if isinstance(o.error, EngineClosedError)), None)
        if death is not None:
            self._outbox.flush()
            self.tell(("dead", str(death)))
            os._exit(1)
        entries, edges, unread = list[Entry](), set[Sample](), set[Sample]()
        for output in outputs:
            route = self._routes.get(output.request_id)
            has_ended = output.finish_reason is not None
            if route is None or not (output.token_ids or output.text or has_ended):
                continue
            entries.append((route.handle, self._piece(route, output)))
            if has_ended or route.is_fresh:
                edges.add((route.handle, route.sample))
                route.is_fresh = False
            if route.is_whole:
                unread.add((route.handle, route.sample))
            if has_ended:
                self._forget(route)
        if entries:
            self._outbox.put(entries, edges, unread)

    @staticmethod
    def _piece(route: _Route, output: StepOutput) -> Piece:
        request, reason = route.request, output.finish_reason
        # The first sample's piece has what all samples share: no other one comes before it.
        tells_prompt = route.is_fresh and not request.sample_index
        return Piece(
            route.sample,
            list(output.token_ids),
            list(output.origins),
            output.text,
            list(output.logprobs),
            finish_reason=None if reason is None else reason.value,
            stop_reason=output.stop_reason,
            counters=None if reason is None else request.counters,
            num_cached_tokens=request.num_cached_tokens if tells_prompt else 0,
            prompt_logprobs=request.prompt_logprobs if tells_prompt else (),
            error=None if output.error is None else portable(output.error),
            embedding=request.embedding if tells_prompt else b"",
        )

    def _send_entries(self, entries: Sequence[Entry]) -> None:
        # Plain values: see paceline.server.engine_process.messages.
        self.tell(("step", [(handle, *piece) for handle, piece in entries]))

    def _forget(self, route: _Route) -> None:
        request_id = route.request.request_id
        del self._routes[request_id]
        with self._lock:
            ids = self._jobs.get(route.handle)
            if ids is not None:
                ids.remove(request_id)
                if not ids:
                    del self._jobs[route.handle]
        if route.request.error is not None:
            extra = {"trace_id": route.trace_id}
            log.warning("request %d failed: %s", route.handle, route.request.error, extra=extra)


Entry = tuple[int, Piece]
"""What a step brought to a sample of the request with this number."""
Sample = tuple[int, int]
"""A request's number, and which of its samples."""
BODY_INTERVAL = 0.5
"""Seconds within which the pieces of answers in one body come as one."""
PATIENCE = 2.0
"""Intervals after which what waits is sent although the next step has not ended."""


class Outbox:
    """Pieces that the engine's thread puts in, and that leave together to save messages.

    The first piece of an answer and the last go at once; those between are sent for all answers
    together, at most once in an interval. Steps that take longer than the interval are sent as they
    end. Pieces of an answer in one body go in a longer interval, :data:`BODY_INTERVAL`.

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
        self._streams = _Waiting(interval)
        self._bodies = _Waiting(max(interval, BODY_INTERVAL) if interval else 0.0)
        self._has_waiting = threading.Event()

    def start(self) -> None:
        """Let a thread send what one long step would hold up."""
        if self._interval:
            threading.Thread(target=self._watch, name="paceline-outbox", daemon=True).start()

    def put(
        self, entries: Iterable[Entry], edges: Collection[Sample], unread: Collection[Sample] = ()
    ) -> None:
        """Take what one step brought: at most an entry per sample.

        ``edges`` has the samples whose first or last piece is among them, ``unread`` those of
        answers in one body.
        """
        with self._lock:
            at = self._clock()
            for entry in entries:
                waiting = self._bodies if unread and _sample(entry) in unread else self._streams
                waiting.entries.append(entry)
            self._send_due(self._streams.due(at, edges) + self._bodies.due(at, edges))
            if self._streams.entries or self._bodies.entries:
                self._has_waiting.set()

    def flush(self) -> None:
        """Send everything that waits."""
        with self._lock:
            at = self._clock()
            self._send_due(self._streams.taken(at) + self._bodies.taken(at))

    def remind(self) -> float | None:
        """Send what has waited too long; returns the seconds until more will have."""
        with self._lock:
            at = self._clock()
            both = self._streams, self._bodies
            self._send_due([e for each in both if at >= each.overdue_at for e in each.taken(at)])
            overdue_at = [each.overdue_at for each in both if each.entries]
            if not overdue_at:
                self._has_waiting.clear()
                return None
            return min(overdue_at) - at

    def _send_due(self, entries: list[Entry]) -> None:
        if entries:
            self._send(grouped(entries))

    def _watch(self) -> None:
        while True:
            seconds = self.remind()
            if seconds is None:
                self._has_waiting.wait()
            else:
                time.sleep(seconds)


class _Waiting:
    """Entries that go together, at most once in an interval."""

    def __init__(self, interval: float) -> None:
        self.entries: list[Entry] = []
        self._interval = interval
        self._sent_at = -math.inf

    @property
    def overdue_at(self) -> float:
        return self._sent_at + PATIENCE * self._interval

    def due(self, at: float, edges: Collection[Sample]) -> list[Entry]:
        """Take out what is to be sent at this time."""
        if not self.entries or at - self._sent_at >= self._interval:
            return self.taken(at)
        due = [entry for entry in self.entries if _sample(entry) in edges] if edges else []
        if due:
            self.entries = [entry for entry in self.entries if _sample(entry) not in edges]
        return due

    def taken(self, at: float) -> list[Entry]:
        """Take out everything."""
        taken, self.entries = self.entries, []
        if taken:
            self._sent_at = at
        return taken


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


def start_beating(
    send: Callable[[EngineStats | None], None],
    stats: Callable[[], EngineStats],
    interval: float,
) -> None:
    """Send beats from a thread of their own until the process ends, whatever the engine computes.

    Args:
        send: takes the engine's counters where it has told them since the last beat, or None.
        stats: the engine's counters, which it tells between two steps.
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
            counters = None if told.empty() else told.get()
            if counters is not None:
                is_wanted.release()
            send(counters)

    for name, target in (("counters", ask), ("heartbeat", beat)):
        threading.Thread(target=target, name=f"paceline-{name}", daemon=True).start()
