"""The one thread in which schemas of clients are read.

Python runs one thread at a time and lets another have its turn every few milliseconds. So a schema
that takes a second to read holds up other requests with schemas, but no stream. With more threads
than one the event loop would wait for all of their turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class SchemaThread:
    """Takes one piece of work after the other; a server has one for all of its models."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-schemas")

    async def run(self, work: Callable[[], T]) -> T:
        """Whatever ``work`` returns or raises. It is not begun if the caller is gone before."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
