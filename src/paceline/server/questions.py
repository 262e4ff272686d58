"""Questions to the engine that wait for their replies. Knows neither what is asked nor whom."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any


class Questions:
    """See the module's docstring; for one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[int], None]) -> Any:
        """Send a question under the number it is given, and wait for its reply.

        Raises: what ``send`` raises, or what the reply or :meth:`fail` says.
        """
        number = next(self._numbers)
        send(number)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            self._open.pop(number, None)

    def reply(self, number: int, error: Exception | None, value: Any) -> None:
        """A reply has come; whoever asked may have left."""
        future = self._open.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """No replies will come; each who waits gets an error of his own."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(make_error())
