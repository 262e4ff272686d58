"""One life of the engine's process, as the HTTP process sees it: started, talked to, ended.

Owns the process and the socket. What messages mean is the client's; so is what happens after death.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.errors import EngineDeadError
from paceline.server.engine.process import NAME, run_engine
from paceline.server.engine.wire import EngineFactory, Message, Unpacker, packed

ENDING_SECONDS = 5.0
"""How long a process that was told to end is given before it is killed."""


class EngineLink(asyncio.Protocol):
    """A running engine process.

    Args:
        on_message: called with every message, on the event loop.
        on_lost: called once with the link when the other end is gone.
    """

    def __init__(
        self, on_message: Callable[[Message], None], on_lost: Callable[[EngineLink], None]
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._unpacker = Unpacker()
        self._transport: Any = None
        self._process: BaseProcess | None = None
        self._has_spoken = False
        self._lost = asyncio.Event()

    async def open(
        self,
        factory: EngineFactory,
        configure_logging: Callable[[], None] | None,
        stream_interval: float,
        beat_interval: float,
    ) -> None:
        """Start the process; its first message says how building the engine went."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:  # held open here, it would hide that the process died
            process = multiprocessing.get_context("spawn").Process(
                target=run_engine,
                args=(theirs, factory, configure_logging, stream_interval, beat_interval),
                name=NAME,
                daemon=True,
            )
            try:
                await asyncio.to_thread(process.start)
            except BaseException:
                ours.close()
                raise
        # multiprocessing would send SIGTERM at exit, which the process ignores.
        atexit.register(process.kill)
        self._process = process
        ours.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=ours)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: Message) -> None:
        """Never waits.

        Raises:
            EngineDeadError: the other end is gone.
        """
        if self._lost.is_set() or self._transport is None:
            raise EngineDeadError("the process of the engine is gone")
        self._transport.write(packed(message))

    def kill(self) -> None:
        """End the process at once; its end is told as every other is."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> int | None:
        """End the process, whatever it is doing; its exit code."""
        if self._transport is not None:
            self._transport.abort()
        process, self._process = self._process, None
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

    # --- asyncio's side ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._has_spoken = True
        for message in self._unpacker.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self._on_lost(self)
