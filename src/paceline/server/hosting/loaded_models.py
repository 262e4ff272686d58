"""Which models are loaded: who comes when a request asks, and who has to make room.

A model is loaded when the first request needs it, and stays until it has been idle for its
keep-alive or another one needs its place; then the one whose last request ended longest ago goes,
one without requests first. A model with running requests goes when they have ended; those that
come meanwhile wait until it is loaded again. Models come and go one at a time, in the order in
which they were asked for.

Knows no engine, no name and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paceline.core.errors import EngineClosedError, ModelTooLargeError, ModelUnavailableError

LoadState = Literal["unloaded", "loading", "loaded", "leaving"]
"""``leaving``: it takes no new requests, and is unloaded when the running ones have ended."""
RETRY_SECONDS = 5.0
"""How long a model that could not be loaded is not tried again."""


class Loadable(Protocol):
    """A model that can be loaded, again and again.

    Attributes:
        size: bytes that it takes; what is thought before it was first loaded.
        has_failed: it is loaded, and serves no more.
    """

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def has_failed(self) -> bool: ...
    async def open(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be loaded.

    Attributes:
        memory: bytes of all loaded models.
        models: how many at once, at least one.
        keep_alive: seconds that an idle model stays where its last request did not say.
    """

    memory: float = math.inf
    models: float = math.inf
    keep_alive: float = math.inf


class Resident:
    """One model: whether it is loaded, who uses it, and until when it stays.

    Attributes:
        place: whether it is loaded.
        used_at: when its last request ended, by the room's clock.
        is_empty: set while no request runs.
    """

    def __init__(self, room: Room, model: Loadable, place: LoadState) -> None:
        self.model = model
        self.place = place
        self.used_at = -math.inf
        self._expires_at = math.inf
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self._room = room
        self._users: set[object] = set()
        self._waiting: set[object] = set()
        self._loading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._tried_at = -math.inf
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def is_here(self) -> bool:
        """Whether requests can run at once."""
        # A server of one model ends with it, and tells why.
        has_failed = self._room.is_shared and self.model.has_failed
        return self.place == "loaded" and not has_failed

    @property
    def seconds_left(self) -> float:
        """Until it is unloaded if no request comes; infinite while one runs."""
        return self._expires_at - self._room.clock()

    @property
    def is_open(self) -> bool:
        """Whether requests run, or can run at once."""
        return self.place == "loaded" or (self.place == "leaving" and self.is_busy)

    @property
    def is_busy(self) -> bool:
        return bool(self._users)

    def takes_room_beside(self, other: Resident) -> bool:
        return self is not other and self.place != "unloaded" and not self.model.has_failed

    @asynccontextmanager
    async def using(
        self, keep_alive: float | None = None, before_loading: Callable[[], None] = lambda: None
    ) -> AsyncIterator[None]:
        """Have the model loaded while the block runs; it is loaded first where it is not.

        Args:
            keep_alive: seconds that it stays afterwards without a request; None is the limits'.
            before_loading: called where it is not here; it may raise.

        Raises (when the block is entered):
            ModelUnavailableError: it cannot be loaded, or is too large.
            EngineClosedError: the server ends.
        """
        user, is_here = object(), self.is_here
        if not is_here:
            before_loading()
        self._stop_expiry()
        if is_here:
            self._enter({user})
        else:
            self._waiting.add(user)
        try:
            while user in self._waiting:
                await self._arrival()
            yield
        finally:
            self._leave(user, keep_alive)

    def settle(self) -> None:
        """It is loaded: those who waited run from here on, so that it cannot be sent away first."""
        self.place, waiting, self._waiting = "loaded", self._waiting, set()
        self._enter(waiting)
        if not waiting:
            self._rest(None)

    def _enter(self, users: set[object]) -> None:
        self._users |= users
        if self._users:
            self.is_empty.clear()

    async def _arrival(self) -> None:
        if self._room.is_closed:
            raise EngineClosedError("the server ends and loads no model")
        if self._room.clock() < self._tried_at + RETRY_SECONDS:
            raise self._unavailable()
        if self._loading is None or self._loading.done():
            self._loading = self._room.begin(self._room.admit(self))
        loading = self._loading
        await asyncio.wait((loading,))  # which goes on when this is cancelled
        error = None if loading.cancelled() else loading.exception()
        if isinstance(error, ModelTooLargeError):  # which took nothing from others
            raise ModelTooLargeError(str(error)) from error
        if isinstance(error, Exception):
            self._failure, self._tried_at = error, self._room.clock()
            raise self._unavailable()

    def _unavailable(self) -> Exception:
        """An error for one of those who wait: each is raised by itself."""
        return ModelUnavailableError(f"model {self.model.name} cannot be loaded: {self._failure}")

    def _leave(self, user: object, keep_alive: float | None) -> None:
        if user in self._users:
            self._users.remove(user)
            if not self._users:
                self._rest(keep_alive)
                self.is_empty.set()
            return
        self._waiting.discard(user)
        is_wanted = bool(self._waiting) or self.place == "loading"
        if self._loading is not None and not is_wanted:  # no request waits for it any more
            self._loading.cancel()
            self._loading = None

    def _rest(self, keep_alive: float | None) -> None:
        seconds = self._room.limits.keep_alive if keep_alive is None else keep_alive
        self.used_at = self._room.clock()
        self._expires_at = self.used_at + seconds
        if seconds <= 0:
            self._expire()
        elif seconds < math.inf:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(seconds, self._expire)

    def _stop_expiry(self) -> None:
        self._expires_at = math.inf
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self) -> None:
        if self.place == "loaded" and not self._users and not self._room.is_closed:
            self.place = "leaving"
            self._room.begin(self._room.dismiss(self))


log = logging.getLogger(__name__)


class Room:
    """The place that loaded models share.

    Attributes:
        is_closed: nothing is loaded any more.
    """

    def __init__(
        self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits or Limits()
        self.clock = clock
        self.is_closed = False
        self._residents: list[Resident] = []
        self._door = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def resident(self, model: Loadable, is_loaded: bool = False) -> Resident:
        """Let a model come and go.

        Raises:
            ModelTooLargeError: it is loaded, and larger than all of the memory.
        """
        resident = Resident(self, model, "loaded" if is_loaded else "unloaded")
        self._residents.append(resident)
        if is_loaded:
            self._check_size(resident)
        return resident

    @property
    def is_shared(self) -> bool:
        """Whether there are several models."""
        return len(self._residents) > 1

    async def close(self) -> None:
        """Unload everything; requests that wait for a model get an ``EngineClosedError``."""
        self.is_closed = True
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.model.close() for each in self._residents))

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # those who still wait for it have been told

    async def admit(self, newcomer: Resident) -> None:
        """Load a model, when it is its turn and there is room for it.

        Raises:
            ModelTooLargeError: it is larger than all of the memory.
            Exception: whatever loading raised.
        """
        async with self._door:
            if not newcomer.is_here:
                try:
                    await self._make_room(newcomer)
                    newcomer.place = "loading"
                    log.info("loading %s", newcomer.model.name)
                    await newcomer.model.open()
                    await self._make_room(newcomer)  # it may be larger than was thought
                except BaseException as error:
                    newcomer.place = "unloaded"
                    if isinstance(error, Exception):
                        log.error("%s cannot be loaded: %s", newcomer.model.name, error)
                    await newcomer.model.close()
                    raise
            newcomer.settle()

    async def dismiss(self, resident: Resident) -> None:
        """Unload a model that is leaving."""
        async with self._door:
            if resident.place == "leaving":
                await self._unload(resident)

    def _check_size(self, resident: Resident) -> None:
        if resident.model.size > self.limits.memory:
            raise ModelTooLargeError(
                f"model {resident.model.name} needs {gibibytes(resident.model.size)} of memory "
                f"and all loaded models together may have {gibibytes(self.limits.memory)}: raise "
                "--memory-budget, or make it smaller by --kv-cache-memory or --max-model-len"
            )

    async def _make_room(self, newcomer: Resident) -> None:
        self._check_size(newcomer)
        while others := [each for each in self._residents if each.takes_room_beside(newcomer)]:
            memory = newcomer.model.size + sum(each.model.size for each in others)
            if len(others) < self.limits.models and memory <= self.limits.memory:
                return
            await self._unload(min(others, key=lambda each: (each.is_busy, each.used_at)))

    async def _unload(self, resident: Resident) -> None:
        resident.place = "leaving"
        try:
            await resident.is_empty.wait()
        except asyncio.CancelledError:  # its place is not needed any more
            resident.place = "loaded"
            raise
        log.info("unloading %s", resident.model.name)
        await resident.model.close()
        resident.place = "unloaded"


def gibibytes(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"
