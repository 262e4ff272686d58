"""A replica: the application of ``paceline serve`` and its engine, at an address of their own.

Owns their life inside one of Serve's actors.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray.util
from ray import serve

from paceline.core.errors import EngineDeadError
from paceline.ray.autoscaling import LOAD, load_of
from paceline.ray.cluster import forget_program
from paceline.ray.links import KEEP_ALIVE_SECONDS, Address, Gate
from paceline.request.engine_stats import EngineInfo
from paceline.server.engine_process.client import EngineClient, engine_stats
from paceline.server.http.config import ServerConfig
from paceline.server.http.tracing import install_trace_logging
from paceline.server.run import Listener, started_app

if TYPE_CHECKING:
    from paceline.server.hosting.models import Models, Offer


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
        app = await started_app(client, served.config, others)
        self._models: Models = app.state.models
        self._drain_timeout = served.config.drain_timeout
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self._address = Address(host, port, secrets.token_hex(16))
        gate = Gate(app, self._address.token, _rank)
        options = {"date_header": False, "timeout_keep_alive": KEEP_ALIVE_SECONDS}
        self._server = Listener(gate, served.config, **options)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            await asyncio.sleep(0)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where it listens; Serve asks once, and tells :mod:`paceline.ray.application`."""
        return self._address._asdict()

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
            EngineDeadError: the engine died too often to be started again, or the server ended.
        """
        if self._models.failure:
            raise EngineDeadError(self._models.failure)
        if self._serving.done():
            raise EngineDeadError("the replica does not listen any more")

    async def __del__(self) -> None:
        """Serve does not wait for the requests that are answered here; it knows nothing of them."""
        if not hasattr(self, "_serving"):
            return
        await self._models.drained(self._drain_timeout)
        await self._models.close()
        self._server.should_exit = True
        await self._serving


def _rank() -> str:
    return str(serve.get_replica_context().rank.rank)
