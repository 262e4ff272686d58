"""The HTTP process's hold on the engine: prompts go in, pieces come out.

Owns who waits for what, the engine's process from its start to its end, when it is replaced because
it died or hangs, and the state that the server shows. Knows no HTTP, and no engine beyond its
messages.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import logging
import multiprocessing
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.core.errors import EngineClosedError, EngineDeadError, PacelineError
from paceline.request.engine_stats import EngineInfo, EngineStats
from paceline.request.request import TokenLogprobs
from paceline.request.sampling_params import SamplingParams
from paceline.server.engine_process.backlog import Share
from paceline.server.engine_process.life import OutputHistory, Pulse, Restarts
from paceline.server.engine_process.messages import (
    LENGTH,
    EngineFactory,
    EngineState,
    Message,
    Piece,
    encoded,
)
from paceline.server.engine_process.process import NAME, run_engine
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
ENDING_SECONDS = 5.0
"""How long a process that was told to end is given before it is killed."""

STATS_SECONDS = 1.0
"""Seconds for an engine to answer, which it does between two steps."""


class EngineClient:
    """An engine in a process of its own; one that dies or hangs is replaced.

    That goes on as often as ``restarts`` allows; then the state is ``failed``.

    Args:
        factory: makes the engine, a :class:`~paceline.api.llm.LLM`; it must be picklable.
        configure_logging: picklable too; what the process runs first.
        stream_interval: seconds within which an answer's pieces come as one; 0: each by itself.
        restarts: how often; by default five times in a row.
        pulse: when an engine counts as hung; by default after a minute without a sign of life.
        adapters: folders of adapters that the engine has from the start, by their names.

    Attributes:
        adapters: those that requests can ask for, likewise, also of a replacement.
        info: valid after :meth:`start`; replaced when the engine is started again.
        tokenizer: None where the model has none.
        failure: why the state is ``failed``.
        num_restarts: engines that were started, or tried to, after the first.
        last_stats: the newest counters that the living engine told, or None.
        output_history: the output tokens that its beats told.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

    def __init__(
        self,
        factory: EngineFactory,
        *,
        configure_logging: Callable[[], None] | None = None,
        stream_interval: float = 0.0,
        restarts: Restarts | None = None,
        pulse: Pulse | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.state: EngineState = "starting"
        self.failure = ""
        self.num_restarts = 0
        self.last_stats: EngineStats | None = None
        self.output_history = OutputHistory()
        self._restarts = restarts or Restarts()
        self._pulse = pulse or Pulse()
        self.adapters = dict(adapters or {})
        self._factory = factory
        self._opening = (configure_logging, stream_interval, self._pulse.interval)
        self._life: EngineLife | None = None
        self._lives: asyncio.Task[None] | None = None
        self._reason = ""
        self._is_draining = self._has_begun = False
        self._numbers = itertools.count()
        self._generations: dict[int, Answers] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}

    @property
    def pid(self) -> int | None:
        """The engine's process; None where there is none."""
        process = None if self._life is None else self._life.process
        return None if process is None else process.pid

    @property
    def num_generating(self) -> int:
        """Requests that were sent and of which the engine owes something."""
        return len(self._generations)

    async def start(self) -> None:
        """Start the engine's process and wait until it serves; again after :meth:`close`.

        Raises:
            ModelLoadError, ConfigError: or whatever else building the engine raised.
            EngineDeadError: the process died meanwhile.
        """
        self.state, self.failure = "starting", ""
        self._restarts.num_used = 0
        try:
            life = await self._begin()
        except BaseException:
            if self.state == "starting":
                self.state = "failed"
            raise
        self._lives = asyncio.create_task(self._live_on(life))

    def drain(self) -> None:
        """Say by the state that no new requests are to be taken on; those that were go on."""
        self._is_draining = True
        if self.state in ("ready", "hung"):
            self.state = "draining"

    async def close(self) -> None:
        """End the engine; prompts in flight raise ``EngineClosedError``. Twice is allowed."""
        self.state = "closed"
        self._fail_all(EngineClosedError, "the engine was closed")
        lives, self._lives = self._lives, None
        if lives is not None:
            lives.cancel()
            with suppress(asyncio.CancelledError):
                await lives
        self._forget_life()

    # --- prompts -------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        cache_salt: str = "",
        trace_id: str = "",
        adapter: str | None = None,
        share: Share | None = None,
    ) -> AsyncIterator[Answers]:
        """The answers to the prompts of a request; leaving the block aborts what still runs.

        Args:
            share: of what may wait for clients; when it is dropped, what runs is aborted.

        Raises (when the block is entered):
            RequestError: the engine refuses a prompt, and so the request.
            EngineDeadError: the engine is dead, or being started again.
            EngineClosedError: it was closed.
        """
        life, is_whole = self._living(), share is not None and share.is_whole
        handle, accepted = self._sent(
            life, "generate", prompts, params, cache_salt, trace_id, adapter, is_whole
        )
        generation = self._generations[handle] = Answers(params, share)
        if share is not None:
            share.when_dropped(lambda _: self._abort(life, handle))
        try:
            await accepted
            yield generation
        finally:
            self._replies.pop(handle, None)
            self._abort(life, handle)
            if share is not None:
                share.close()

    def _abort(self, life: EngineLife, handle: int) -> None:
        if self._generations.pop(handle, None) is not None:
            with suppress(EngineDeadError):
                life.send(("abort", handle))

    async def stats(self) -> EngineStats:
        """The engine's counters; ``EngineDeadError`` or ``EngineClosedError`` without one."""
        stats: EngineStats = await self._ask("stats")
        self.last_stats = stats
        return stats

    async def flush_prefix_cache(self) -> None:
        await self._ask("flush_prefix_cache")

    async def load_adapter(self, name: str, folder: str, replaces: bool = False) -> None:
        """Load an adapter, or another one in its place where it ``replaces`` what has its name.

        Raises:
            ConfigError: there is an adapter of that name.
            ModelLoadError: it cannot be read, or not be used.
        """
        await self._ask("load_lora", name, folder, replaces)
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, also for engines to come; requests that have it go on.

        Raises:
            UnknownAdapterError: it was forgotten meanwhile.
            EngineDeadError, EngineClosedError: the engine ended meanwhile, and it is kept.
        """
        if self._life is not None and self.state != "closed":
            await self._ask("unload_lora", name)
        self.adapters.pop(name, None)

    async def _ask(self, name: str, *arguments: Any) -> Any:
        number, reply = self._sent(self._living(), name, *arguments)
        try:
            return await reply
        finally:
            self._replies.pop(number, None)

    def _sent(
        self, life: EngineLife, name: str, *arguments: Any
    ) -> tuple[int, asyncio.Future[Any]]:
        """Send a command. Returns its number, and its reply, which the caller drops at the end."""
        number = next(self._numbers)
        life.send((name, number, *arguments))
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        return number, reply

    def _living(self) -> EngineLife:
        """An engine that serves; raises what says that there is none."""
        if self.state == "closed":
            raise EngineClosedError("the engine is closed")
        if self._life is None or self.state not in ("ready", "hung", "draining"):
            raise EngineDeadError(f"the engine is not running; its state is {self.state!r}")
        return self._life

    # --- messages ------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        match message:
            case ("step", entries):
                self._on_step(entries)
            case ("reply", number, error, value):
                self._on_reply(number, error, value)
            case ("beat", stats):
                self._on_beat(stats)
            case ("dead", reason):
                self._reason = reason
            case _:
                raise ValueError(f"unknown message {message[0]!r}")

    def _on_step(self, entries: Sequence[Sequence[Any]]) -> None:
        for handle, *fields in entries:
            if handle in self._replies:  # a piece says as well that the prompts were taken on
                self._on_reply(handle, None, None)
            generation = self._generations.get(handle)
            if generation is not None and generation.take(Piece(*fields)):
                self._generations.pop(handle, None)  # it may have been aborted meanwhile

    def _on_reply(self, number: int, error: Exception | None, value: Any) -> None:
        reply = self._replies.pop(number, None)
        if reply is None or reply.done():  # the caller has left
            return
        if error is None:
            reply.set_result(value)
        else:
            reply.set_exception(error)

    def _on_beat(self, stats: EngineStats | None) -> None:
        if stats is not None:
            self.last_stats = stats
            self.output_history.note(stats)
        self._pulse.beat(stats is not None)
        self._judge()

    def _fail_all(self, kind: type[EngineClosedError], reason: str) -> None:
        """Give each request and question that waits an error of its own, which is raised there."""
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(kind(reason))
        for number in list(self._replies):
            self._on_reply(number, kind(reason), None)

    # --- lives and deaths ----------------------------------------------------------------------

    async def _begin(self) -> EngineLife:
        """Start an engine; raises as :meth:`start`."""
        if self._has_begun:
            self._forget_missing()
        life, adapters = EngineLife(), dict(self.adapters)
        try:
            factory = partial(self._factory, lora=adapters) if adapters else self._factory
            self.info, self.tokenizer = await life.open(factory, *self._opening)
        except BaseException:
            await life.close()
            raise
        for name in adapters.keys() - self.adapters.keys():  # they were unloaded meanwhile
            with suppress(EngineDeadError):
                life.send(("unload_lora", next(self._numbers), name))
        self._life, self._has_begun = life, True
        self._restarts.note_serving()
        self._pulse.restart()
        self.state = "draining" if self._is_draining else "ready"
        return life

    async def _live_on(self, first: EngineLife) -> None:
        """Replace the engine whenever it has died, until the budget is spent."""
        life: EngineLife | None = first
        while life is not None:
            try:
                await self._listen(life)
                reason = f"the engine died: {self._reason or 'its process was ended'}"
                pause = self._lose(reason)
            finally:
                code = await life.close()
            log.error("%s (exit code %s)", reason, code)
            life = await self._successor(pause)

    async def _successor(self, pause: float | None) -> EngineLife | None:
        while pause is not None:
            log.warning("the engine will be restarted in %g s", pause)
            await asyncio.sleep(pause)
            self.num_restarts += 1
            try:
                life = await self._begin()
            except Exception as failure:
                log.error("the engine cannot be started: %r", failure)
                pause = self._pause_after(f"the engine cannot be started: {failure}")
            else:
                log.warning("the engine was restarted (%d times so far)", self.num_restarts)
                return life
        return None

    def _forget_missing(self) -> None:
        """Drop adapters whose folders are gone, lest the next engine cannot start for them."""
        for name, folder in list(self.adapters.items()):
            if not os.path.isdir(folder):
                log.error("adapter %s is not loaded again: %s is gone", name, folder)
                del self.adapters[name]

    async def _listen(self, life: EngineLife) -> None:
        """Take an engine's messages until its process is gone, or about to be."""
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                self._take(await received(life.reader))
        except (EOFError, OSError):  # it is gone
            return
        except Exception:  # our mistake; another engine may get further
            log.exception("a message of the engine's process cannot be taken")
        finally:
            ticking.cancel()

    def _lose(self, reason: str) -> float | None:
        """Fail what waits for a dead engine; returns as :meth:`_pause_after`."""
        self._reason = ""
        self._forget_life()
        self._fail_all(EngineDeadError, reason)
        return self._pause_after(reason)

    def _forget_life(self) -> None:
        self._life = self.last_stats = None
        self.output_history.clear()

    def _pause_after(self, reason: str) -> float | None:
        """Seconds until the next start; None when there is to be none."""
        pause = self._restarts.next_pause()
        self.state = "failed" if pause is None else "starting"
        if pause is None:
            count = self._restarts.num_used
            self.failure = f"{reason}; after {count} restarts in a row it is not started again"
        return pause

    async def _tick(self) -> None:
        """Count time without beats."""
        while True:
            await asyncio.sleep(self._pulse.interval)
            self._pulse.tick()
            self._judge()

    def _judge(self) -> None:
        """Note in the state whether the engine is silent, and end it if it hangs."""
        if self.state == "ready" and self._pulse.is_silent:
            self.state = "hung"
            log.warning("the engine does not answer; its process is stopped, or very busy")
        elif self.state == "hung" and not self._pulse.is_silent:
            self.state = "ready"
            log.warning("the engine answers again")
        process = None if self._life is None else self._life.process
        if self._pulse.verdict and process is not None and not self._reason:
            self._reason = self._pulse.verdict
            process.kill()


@functools.cache
def _context() -> Any:
    """What starts processes: on Linux a server process that has imported what engines need.

    It has no threads, so it can be forked, and a replacement starts as fast as weights are read.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.api.llm"])
    return context


class EngineLife:
    """One life of the engine's process: started, talked to, ended."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._has_spoken = False

    async def open(self, *arguments: Any) -> tuple[EngineInfo, Tokenizer | None]:
        """Start the process and wait until it serves.

        Raises:
            Exception: whatever building the engine raised.
            EngineDeadError: the process died meanwhile.
        """
        ours, theirs = socket.socketpair()
        with theirs:  # held open here, it would hide that the process died
            self.process = process = _context().Process(
                target=run_engine, args=(theirs, *arguments), name=NAME, daemon=True
            )
            try:
                await asyncio.to_thread(process.start)
            except BaseException:
                ours.close()
                self.process = None
                raise
        # multiprocessing would send SIGTERM at exit, which the process ignores.
        atexit.register(process.kill)
        self.reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            kind, *values = await received(self.reader)
        except (EOFError, OSError) as error:
            raise EngineDeadError("the engine died: its process was ended") from error
        self._has_spoken = True
        if kind == "failed":
            raise values[0]
        info, tokenizer = values
        return info, tokenizer

    def send(self, message: Message) -> None:
        """Never waits; ``EngineDeadError`` where the other end is gone."""
        if self._writer is None or self._writer.is_closing() or self.reader.at_eof():
            raise EngineDeadError("the process of the engine is gone")
        self._writer.write(encoded(message))

    async def close(self) -> int | None:
        """End the process, whatever it is doing; its exit code. Twice is allowed."""
        if self._writer is not None:
            self._writer.transport.abort()
        process, self.process = self.process, None
        if process is None:
            return None
        if not self._has_spoken:  # it is still building the engine, and does not listen
            process.kill()
        await asyncio.to_thread(process.join, ENDING_SECONDS)
        if process.exitcode is None:
            process.kill()
            await asyncio.to_thread(process.join)
        atexit.unregister(process.kill)
        code = process.exitcode
        process.close()
        return code


async def received(reader: asyncio.StreamReader) -> Message:
    """The next message at the HTTP process's end; ``EOFError`` or ``OSError`` without the other."""
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    message: Message = pickle.loads(await reader.readexactly(size))
    return message


class Answers:
    """The answers to the prompts of one request: iterate over their pieces until all have ended.

    Pieces wait here for their one reader, as many as its share of the backlog may have. Beyond that
    they are dropped, and the reader gets an error.

    Args:
        share: counts what waits.

    Attributes:
        prompt_logprobs: by prompt, one per token (None for the first) where they were asked for;
            complete when the first piece of the prompt has been read.
        on_read: told of each piece that is read.

    Raises (from the iteration):
        RequestFailedError: the forward or the sampler failed for a prompt.
        SlowReaderError, AnswerTooLargeError, BusyError: too much waited.
        EngineDeadError, EngineClosedError: the engine died, or was closed.
    """

    def __init__(self, params: Sequence[SamplingParams], share: Share | None = None) -> None:
        self.prompt_logprobs: list[Sequence[TokenLogprobs | None]] = [()] * len(params)
        self.on_read: Callable[[Piece], None] = lambda _: None
        self._num_samples = params[0].n
        self._num_open = self._num_samples * len(params)
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._share = share
        if share is not None:
            share.when_dropped(self._drop)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        if self._share is not None and not self._share.is_whole:
            self._share.take(piece)
        self.on_read(piece)
        return piece

    def fail(self, error: Exception) -> None:
        """What the reader will meet after the pieces that came before."""
        self._error = self._error or error
        self._changed.set()

    def take(self, piece: Piece) -> bool:
        """Add a piece; True when all samples have ended."""
        if piece.prompt_logprobs:
            self.prompt_logprobs[piece.sample // self._num_samples] = piece.prompt_logprobs
        if piece.finish_reason is not None:
            self._num_open -= 1
        if piece.error is not None:
            self.fail(piece.error)
        if self._error is None:
            self._pieces.append(piece)
            if self._share is not None:
                self._share.put(piece)
        self._changed.set()
        return not self._num_open

    def _drop(self, error: PacelineError) -> None:
        self._pieces.clear()
        self._error = None  # that of a sample comes too late
        self.fail(error)


async def engine_stats(client: EngineClient) -> EngineStats | None:
    """The engine's counters: the last known while it does not answer, None while it is down."""
    if client.state == "hung":
        return client.last_stats
    try:
        return await asyncio.wait_for(client.stats(), STATS_SECONDS)
    except TimeoutError:
        return client.last_stats
    except EngineClosedError:
        return None
