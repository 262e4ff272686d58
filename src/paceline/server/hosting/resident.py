"""A model that comes and goes: whether it is loaded, who uses it, and until when it stays.

Knows no other model: when it may come, and when it has to go, is
:mod:`paceline.server.hosting.room`'s.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paceline.core.errors import EngineClosedError, ModelTooLargeError, ModelUnavailableError

Place = Literal["unloaded", "loading", "loaded", "leaving"]
"""``leaving``: it takes no new requests, and is unloaded when the running ones have ended."""
RETRY_SECONDS = 5.0
"""How long a model that could not be loaded is not tried again, so that it takes no place and no
time from others."""


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


class Housing(Protocol):
    """What a model asks of the place that loaded models share (:class:`~.room.Room`)."""

    clock: Callable[[], float]
    limits: Limits
    is_closed: bool

    @property
    def is_shared(self) -> bool: ...
    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    async def admit(self, newcomer: Resident) -> None: ...
    async def dismiss(self, resident: Resident) -> None: ...


class Resident:
    """One model: whether it is loaded, who uses it, and until when it stays.

    Attributes:
        place: whether it is loaded.
        used_at: when its last request ended, by the room's clock.
        is_empty: set while no request runs.
    """

    def __init__(self, room: Housing, model: Loadable, place: Place) -> None:
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
        has_failed = self.model.has_failed and self._room.is_shared
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
    async def using(self, keep_alive: float | None = None) -> AsyncIterator[None]:
        """Have the model loaded while the block runs; it is loaded first where it is not.

        Args:
            keep_alive: seconds that it stays afterwards if nobody uses it; None is the limits'.

        Raises (when the block is entered):
            ModelUnavailableError: it cannot be loaded, or is too large.
            EngineClosedError: the server ends.
        """
        user = object()
        self._stop_expiry()
        if self.is_here:
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
        if self._loading is not None and not is_wanted:  # it still waits for its turn, for nobody
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
