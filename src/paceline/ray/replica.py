"""A replica: the application of ``paceline serve`` and its engine, asked by messages.

Owns their life inside one of Serve's actors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray import serve
from starlette.types import Message

from paceline.errors import EngineDeadError
from paceline.ray.autoscaling import LOAD, load_of
from paceline.ray.calls import Call, Part, answered, whole_answer
from paceline.ray.cluster import forget_program
from paceline.server.config import ServerConfig
from paceline.server.engine.client import EngineClient
from paceline.server.messages import EngineInfo
from paceline.server.stats import engine_stats
from paceline.server.tracing import install_trace_logging

if TYPE_CHECKING:
    from paceline.server.models import Models, Offer


@dataclass(frozen=True)
class Served:
    """What a replica serves.

    Attributes:
        clients: makes the first model's client, which is not started, and the other models. It
            must be picklable.
    """

    clients: Callable[[], tuple[EngineClient, Sequence[Offer]]]
    config: ServerConfig


class Replica:
    """Serve awaits ``__init__``, which returns once requests are answered."""

    async def __init__(self, served: Served) -> None:  # type: ignore[misc]
        forget_program()
        install_trace_logging()
        client, others = served.clients()
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)  # the engine's process imports what it needs, and so does this one
        from paceline.server.app import create_app
        from paceline.server.chat.prompt import warm_up

        await starting
        await warm_up(client.tokenizer)
        self._app = create_app(client, served.config, others)
        self._models: Models = self._app.state.models

    async def answer(self, call: Call) -> AsyncGenerator[Part, None]:
        """The answer to a request; closing it tells the application that the client has left."""
        context = serve.get_replica_context()
        async with aclosing(answered(self._app, call)) as parts:
            async for messages in parts:
                yield Part(context.replica_tag, context.world_size, messages)

    async def whole_answer(self, call: Call) -> tuple[str, list[Message]]:
        """The answer to a request, and the replica's number."""
        rank = serve.get_replica_context().rank.rank
        return str(rank), await whole_answer(self._app, call)

    def info(self) -> tuple[EngineInfo, tuple[str, ...]]:
        """The first model's facts, and the names of all."""
        return self._models.first.client.info, self._models.names

    def drain(self) -> None:
        """Take no new requests; those that were taken go on."""
        self._models.drain()

    def num_unfinished(self) -> int:
        """Samples that were taken on."""
        return self._models.num_unfinished

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What :class:`~paceline.ray.autoscaling.ByLoad` goes by; Serve asks for it."""
        client = self._models.first.client
        stats = await engine_stats(client)
        return {} if stats is None else {LOAD: load_of(stats, client.info)}

    def check_health(self) -> None:
        """Serve replaces a replica where this raises.

        Raises:
            EngineDeadError: the engine died too often to be started again.
        """
        if self._models.failure:
            raise EngineDeadError(self._models.failure)

    async def __del__(self) -> None:
        if hasattr(self, "_models"):
            await self._models.close()
