"""The HTTP process's hold on the engine: prompts go in, pieces come out.

Owns who waits for what, the lives of the engine's process, which is started, watched, and replaced
when it dies or hangs, and the state that the server shows. Knows no HTTP, and no engine beyond its
messages.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import logging
import multiprocessing
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.errors import EngineClosedError, EngineDeadError
from paceline.metrics import EngineStats
from paceline.models.tokenizer import Tokenizer
from paceline.request import TokenLogprobs
from paceline.sampling_params import SamplingParams
from paceline.server.engine.process import NAME, run_engine
from paceline.server.engine.wire import EngineFactory, Message, Pulse, packed, received
from paceline.server.messages import EngineInfo, EngineState, Piece

log = logging.getLogger(__name__)
ENDING_SECONDS = 5.0
"""How long a process that was told to end is given before it is killed."""
STEADY_SECONDS = 300.0
"""An engine that has served so long has not died of its start: what came before is forgotten."""
SETTLED_SECONDS = 10.0
"""An engine that has served so long is replaced at once, since the next one will serve as well."""
LONGEST_PAUSE = 30.0


class Restarts:
    """The budget of restarts of one server.

    The first restart is at once, the second after a second, and each further one after twice the
    pause; an engine that has served for ten seconds is replaced at once. One that serves for five
    minutes gives the whole budget back; time in which a model loads does not count, so that a slow
    start cannot hide that it dies again and again.

    Args:
        budget: most restarts in a row; 0 is none.
        clock: seconds.
    """

    def __init__(self, budget: int = 5, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.num_used = 0
        self._num_hasty = 0  # deaths in a row after less than SETTLED_SECONDS
        self._clock = clock
        self._serves_since: float | None = None

    def note_serving(self) -> None:
        """An engine has started."""
        self._serves_since = self._clock()

    def next_pause(self) -> float | None:
        """An engine has died, or could not be started.

        Returns:
            seconds after which the next is to be started; None when the budget is spent.
        """
        since, self._serves_since = self._serves_since, None
        served = 0.0 if since is None else self._clock() - since
        if served >= STEADY_SECONDS:
            self.num_used = 0
        if served >= SETTLED_SECONDS:
            self._num_hasty = 0
        if self.num_used >= self.budget:
            return None
        self.num_used, self._num_hasty = self.num_used + 1, self._num_hasty + 1
        return 0.0 if self._num_hasty == 1 else min(2.0 ** (self._num_hasty - 2), LONGEST_PAUSE)


class EngineGeneration:
    """The answers to the prompts of one request: iterate over their pieces until all have ended.

    One reader at a time. A slow one holds up nobody: pieces wait here, which are bounded by the
    prompts' ``max_tokens``.

    Args:
        params: of each prompt.

    Attributes:
        prompt_logprobs: by prompt, one per token (None for the first) where they were asked for;
            complete when the first piece of the prompt has been read.

    Raises:
        RequestFailedError: from the iteration: the forward or the sampler failed for a prompt.
        EngineDeadError: from the iteration: the engine died.
        EngineClosedError: from the iteration: the engine was closed.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.prompt_logprobs: list[Sequence[TokenLogprobs | None]] = [() for _ in params]
        self._num_samples = params[0].n
        self._num_open = sum(each.n for each in params)
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None
        self._is_accepted = False
        self._changed = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            await self._change()
        return self._pieces.popleft()

    async def accepted(self) -> None:
        """Wait until the engine has taken the prompts on.

        Raises:
            RequestError: it refused.
            EngineClosedError: it is gone.
        """
        while not self._is_accepted:
            if self._error is not None:
                raise self._error
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def accept(self) -> None:
        self._is_accepted = True
        self._changed.set()

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
        self.accept()
        return not self._num_open


@functools.cache
def _context() -> Any:
    """What starts processes: on Linux a process that has imported what engines are made of.

    It has computed nothing and has no threads, so that it can be forked. An engine that died, or
    another model, is there as fast as its weights are read.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.llm"])
    return context


class _Life:
    """One life of the engine's process: started, talked to, ended."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._has_spoken = False

    async def open(self, *arguments: Any) -> tuple[EngineInfo, Tokenizer | None]:
        """Start the process and wait until it serves.

        Args:
            arguments: of :func:`~paceline.server.engine.process.run_engine`, the socket aside.

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
            kind, *told = await received(self.reader)
        except (EOFError, OSError) as error:
            raise EngineDeadError("the engine died: its process was ended") from error
        self._has_spoken = True
        if kind == "failed":
            raise told[0]
        info, tokenizer = told
        return info, tokenizer

    def send(self, message: Message) -> None:
        """Never waits.

        Raises:
            EngineDeadError: the other end is gone.
        """
        if self._writer is None or self._writer.is_closing() or self.reader.at_eof():
            raise EngineDeadError("the process of the engine is gone")
        self._writer.write(packed(message))

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


class EngineClient:
    """An engine in a process of its own, and its successors.

    A dead engine is started again, and so is one that hangs, as often as ``restarts`` allows; then
    the state is ``failed``, and :attr:`failure` says why.

    Args:
        factory: makes the engine, a :class:`~paceline.llm.LLM`; it must be picklable.
        configure_logging: picklable too; what the process runs first.
        stream_interval: seconds within which an answer's pieces come as one; 0: each by itself.
        restarts: how often; by default five times in a row.
        pulse: when an engine counts as hung; by default after a minute without a sign of life.

    Attributes:
        info: valid after :meth:`start`; replaced when the engine is started again.
        tokenizer: None where the model has none.
        failure: why the state is ``failed``.
        num_restarts: engines that were started, or tried to, after the first.
        last_stats: the newest counters that the living engine told, for when it does not answer;
            None before the first.
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
    ) -> None:
        self.state: EngineState = "starting"
        self.failure = ""
        self.num_restarts = 0
        self.last_stats: EngineStats | None = None
        self._restarts = restarts or Restarts()
        self._pulse = pulse or Pulse()
        self._opening = (factory, configure_logging, stream_interval, self._pulse.interval)
        self._life: _Life | None = None
        self._lives: asyncio.Task[None] | None = None
        self._reason = ""
        self._is_draining = False
        self._numbers = itertools.count()
        self._generations: dict[int, EngineGeneration] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}

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
        self._life = self.last_stats = None

    # --- prompts -------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        cache_salt: str = "",
        trace_id: str = "",
    ) -> AsyncIterator[EngineGeneration]:
        """The answers to the prompts of a request; leaving the block aborts what still runs.

        Args:
            params: one per prompt, with as many samples each.

        Raises (when the block is entered):
            RequestError: the engine refuses a prompt, and so the request.
            EngineDeadError: the engine is dead, or being started again.
            EngineClosedError: it was closed.
        """
        life = self._living()
        handle = next(self._numbers)
        life.send(("generate", handle, prompts, params, cache_salt, trace_id))
        generation = self._generations[handle] = EngineGeneration(params)
        try:
            await generation.accepted()
            yield generation
        finally:
            if self._generations.pop(handle, None) is not None:
                with suppress(EngineDeadError):
                    life.send(("abort", handle))

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters.

        Raises: EngineDeadError, EngineClosedError: there is no engine to ask.
        """
        stats: EngineStats = await self._ask("stats")
        self.last_stats = stats
        return stats

    async def flush_prefix_cache(self) -> None:
        await self._ask("flush_prefix_cache")

    async def _ask(self, name: str) -> Any:
        number = next(self._numbers)
        self._living().send(("ask", number, name))
        reply = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        finally:
            self._questions.pop(number, None)

    def _living(self) -> _Life:
        """An engine that serves; raises what says that there is none."""
        if self.state == "closed":
            raise EngineClosedError("the engine is closed")
        if self._life is None or self.state not in ("ready", "hung", "draining"):
            raise EngineDeadError(f"the engine is not running; its state is {self.state!r}")
        return self._life

    # --- messages ------------------------------------------------------------------------------

    def _on_step(self, entries: Sequence[Sequence[Any]]) -> None:
        for handle, *fields in entries:
            generation = self._generations.get(handle)
            if generation is not None and generation.take(Piece(*fields)):
                del self._generations[handle]

    def _on_accepted(self, handle: int) -> None:
        if handle in self._generations:
            self._generations[handle].accept()

    def _on_refused(self, handle: int, error: Exception) -> None:
        generation = self._generations.pop(handle, None)
        if generation is not None:
            generation.fail(error)

    def _on_reply(self, number: int, error: Exception | None, value: Any) -> None:
        reply = self._questions.pop(number, None)
        if reply is None or reply.done():  # nobody waits any more
            return
        if error is None:
            reply.set_result(value)
        else:
            reply.set_exception(error)

    def _on_beat(self, stats: EngineStats | None) -> None:
        self.last_stats = stats or self.last_stats
        self._pulse.beat(stats is not None)
        self._judge()

    def _on_dead(self, reason: str) -> None:
        self._reason = reason

    def _fail_all(self, kind: type[EngineClosedError], reason: str) -> None:
        """Tell everybody who waits, each with an error of their own: they will be raised."""
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(kind(reason))
        for number in list(self._questions):
            self._on_reply(number, kind(reason), None)

    # --- lives and deaths ----------------------------------------------------------------------

    async def _begin(self) -> _Life:
        """Start an engine; raises as :meth:`start`."""
        life = _Life()
        try:
            self.info, self.tokenizer = await life.open(*self._opening)
        except BaseException:
            await life.close()
            raise
        self._life = life
        self._restarts.note_serving()
        self._pulse.restart()
        self.state = "draining" if self._is_draining else "ready"
        return life

    async def _live_on(self, first: _Life) -> None:
        """Serve with an engine, and when it is dead with others, until the budget is spent."""
        life: _Life | None = first
        while life is not None:
            try:
                await self._listen(life)
                reason = f"the engine died: {self._reason or 'its process was ended'}"
                pause = self._lose(reason)
            finally:
                code = await life.close()
            log.error("%s (exit code %s)", reason, code)
            life = await self._successor(pause)

    async def _successor(self, pause: float | None) -> _Life | None:
        while pause is not None:
            log.warning("the engine is started again in %g s", pause)
            await asyncio.sleep(pause)
            self.num_restarts += 1
            try:
                life = await self._begin()
            except Exception as failure:
                log.error("the engine cannot be started: %r", failure)
                pause = self._pause_after(f"the engine cannot be started: {failure}")
            else:
                log.warning("the engine was started again, for the %d. time", self.num_restarts)
                return life
        return None

    async def _listen(self, life: _Life) -> None:
        """Hear what an engine says until its process is gone, or about to be."""
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                kind, *arguments = await received(life.reader)
                getattr(self, f"_on_{kind}")(*arguments)
        except (EOFError, OSError):  # it is gone
            return
        except Exception:  # our mistake; another engine may get further
            log.exception("a message of the engine's process cannot be taken")
        finally:
            ticking.cancel()

    def _lose(self, reason: str) -> float | None:
        """Let whoever waits for an engine hear that it is dead; returns as :meth:`_pause_after`."""
        self._reason = ""
        self._life = self.last_stats = None
        self._fail_all(EngineDeadError, reason)
        return self._pause_after(reason)

    def _pause_after(self, reason: str) -> float | None:
        """How long to wait before the next start; None when there is to be none."""
        pause = self._restarts.next_pause()
        self.state = "failed" if pause is None else "starting"
        if pause is None:
            count = self._restarts.num_used
            self.failure = f"{reason}; after {count} restarts in a row it is not started again"
        return pause

    async def _tick(self) -> None:
        """Miss beats, while an engine lives."""
        while True:
            await asyncio.sleep(self._pulse.interval)
            self._pulse.tick()
            self._judge()

    def _judge(self) -> None:
        """Let the state say whether the engine is silent, and end it when it was too long."""
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
