"""Which models are loaded: who comes when a request asks, and who has to make room.

A model comes when the first request needs it, and stays until it has been idle for its keep-alive
or another one needs its place; then the one whose last request ended longest ago goes, one without
requests first. A model with running requests goes when they have ended; those that come meanwhile
wait until it is loaded again, so that no model keeps another one out for ever. Models come and go
one at a time, in the order in which they were asked for.

Owns the order in which models come and go. Knows no engine, no name and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from paceline.core.errors import ModelTooLargeError
from paceline.server.hosting.resident import Limits, Loadable, Resident

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
        found = Resident(self, model, "loaded" if is_loaded else "unloaded")
        self._residents.append(found)
        if is_loaded:
            self._check_size(found)
        return found

    @property
    def is_shared(self) -> bool:
        """Whether there are several models."""
        return len(self._residents) > 1

    async def close(self) -> None:
        """Unload everything; who waits for a model gets an ``EngineClosedError``."""
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
        except asyncio.CancelledError:  # nobody needs its place any more
            resident.place = "loaded"
            raise
        log.info("unloading %s", resident.model.name)
        await resident.model.close()
        resident.place = "unloaded"


def gibibytes(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"
