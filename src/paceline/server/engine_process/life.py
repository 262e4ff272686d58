"""One life of the engine's process: started, talked to, ended. Knows no request."""

from __future__ import annotations

import asyncio
import atexit
import functools
import multiprocessing
import socket
import sys
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.core.errors import EngineDeadError
from paceline.request.metrics import EngineInfo
from paceline.server.engine_process.process import NAME, run_engine
from paceline.server.engine_process.wire import Message, packed, received
from paceline.text.tokenizer import Tokenizer

ENDING_SECONDS = 5.0
"""How long a process that was told to end is given before it is killed."""


@functools.cache
def _context() -> Any:
    """What starts processes: on Linux a process that has imported what engines are made of.

    It has computed nothing and has no threads, so that it can be forked. An engine that died, or
    another model, is there as fast as its weights are read.
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
            kind, *told = await received(self.reader)
        except (EOFError, OSError) as error:
            raise EngineDeadError("the engine died: its process was ended") from error
        self._has_spoken = True
        if kind == "failed":
            raise told[0]
        info, tokenizer = told
        return info, tokenizer

    def send(self, message: Message) -> None:
        """Never waits; ``EngineDeadError`` where the other end is gone."""
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
