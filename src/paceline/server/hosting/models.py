"""The models of a server, by their names. Owns which there are;
:mod:`paceline.server.hosting.loaded_models` says which of them are loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from starlette.requests import Request

from paceline.core.errors import ConfigError
from paceline.server.engine_process.backlog import Backlog
from paceline.server.engine_process.client import EngineClient
from paceline.server.hosting.loaded_models import Limits, LoadState, Room
from paceline.server.hosting.serving import LATEST, SchemaThread, Serving
from paceline.server.http.config import ServerConfig
from paceline.server.http.errors import NOT_FOUND, ApiError
from paceline.server.metrics.server_metrics import ServerMetrics

_MAX_NAMED = 20
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that a server may load.

    Attributes:
        client: not started.
        names: under which requests ask for it.
        num_bytes: of its weights; 0 where that is not known.
    """

    client: EngineClient
    names: tuple[str, ...]
    num_bytes: int = 0


class Models:
    """
    Args:
        client: of the first model, started.
        others: models that are loaded when a request asks for them.

    Attributes:
        backlog: what waits for clients of all models.

    Raises:
        ConfigError: two models have the same names.
        ModelTooLargeError: the first is larger than the memory that all may have.
    """

    def __init__(
        self, client: EngineClient, config: ServerConfig, others: Sequence[Offer] = ()
    ) -> None:
        self.config = config
        self.metrics = ServerMetrics(config.metrics_prefix)
        self.backlog = Backlog()
        self._room = Room(Limits(config.memory_budget, config.max_loaded_models, config.keep_alive))
        self._schemas = SchemaThread()
        self.all: list[Serving] = []
        self._by_name: dict[str, Serving] = {}
        names = config.served_model_names or (client.info.model,)
        for offer in (Offer(client, names), *others):
            self._add(offer)

    def _add(self, offer: Offer) -> None:
        free = [name for name in offer.names if name not in self._by_name]
        if not free:
            raise ConfigError(
                f"two models are named {offer.names[0]!r}: give one of them another "
                "--served-model-name"
            )
        shared = (self.metrics, self._room, self.backlog, self._schemas)
        serving = Serving(offer.client, self.config, free, *shared, num_bytes=offer.num_bytes)
        self.all.append(serving)
        self._by_name |= dict.fromkeys(free, serving)

    @classmethod
    def of(cls, request: Request) -> Models:
        models = request.app.state.models
        assert isinstance(models, cls)
        return models

    @property
    def first(self) -> Serving:
        """The model of requests that name none."""
        return self.all[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, asked: str | None) -> Serving:
        """The model of a name; ``ApiError`` 404 where there is none."""
        if asked is None:
            return self.first
        names = asked, asked.removesuffix(LATEST)
        known = (find(name) for find in (self._by_name.get, self.of_adapter) for name in names)
        model = next(filter(None, known), None)
        if model is None:
            adapters = (name for each in self.all for name in each.client.adapters)
            served = (*self.names, *adapters)
            shown, more = ", ".join(served[:_MAX_NAMED]), len(served) - _MAX_NAMED
            raise ApiError(
                404,
                f"model {asked[:100]!r} is not served here; available: {shown}"
                + (f" and {more} more, which /v1/models lists" if more > 0 else ""),
                NOT_FOUND,
                param="model",
                code="model_not_found",
            )
        return model

    def of_adapter(self, name: str) -> Serving | None:
        """The model of an adapter; None where there is no such adapter."""
        return next((each for each in self.all if name in each.client.adapters), None)

    @property
    def loaded(self) -> list[Serving]:
        """Those that answer, also if they are about to go."""
        return [each for each in self.all if each.resident.is_open]

    @property
    def state(self) -> str:
        """``ready`` while requests are taken, even if their model has to be loaded first."""
        states = [each.state for each in self.loaded] or [self.first.state]
        return "ready" if {"ready", *get_args(LoadState)} & set(states) else states[0]

    @property
    def failure(self) -> str:
        """Why the server cannot go on; empty while it can, as always with several models."""
        is_over = len(self.all) == 1 and self.first.has_failed
        return self.first.client.failure or "the engine failed" if is_over else ""

    @property
    def num_unfinished(self) -> int:
        """Samples that were taken on."""
        return sum(each.admission.num_unfinished for each in self.all)

    @property
    def limit(self) -> int:
        """Most samples that may be unfinished."""
        return sum(each.admission.limit for each in self.all)

    def drain(self) -> None:
        """Take no new requests; those that were taken go on."""
        for each in self.all:
            each.drain()

    async def drained(self, seconds: float) -> None:
        """Drain, and wait until what was taken has ended, but no longer than so many seconds."""
        self.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.num_unfinished:
                    await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """End all engines."""
        await self._room.close()
