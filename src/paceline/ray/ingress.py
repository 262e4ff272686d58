"""What is between clients and replicas: it hands each request to one, and the answer back.

Owns what happens when a replica refuses or dies. A request of which nothing has been sent goes to
another one: after a refusal to each replica once, after a death once, so that a request which kills
engines kills two at most. Bytes are passed on as they are; the metrics of all replicas become one
page, with a label for the replica.

``paceline serve`` runs it in its own process. Behind Serve's proxies it is a deployment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.core.errors import EngineDeadError
from paceline.ray.links import (
    RANK,
    Address,
    Links,
    ReplicaCall,
    addresses,
    body_of,
    header_of,
    last_words,
    read_body,
    refusal,
    status_of,
)
from paceline.ray.routing import Affinity, parts_of
from paceline.server.http.config import OPEN_PATHS, ServerConfig
from paceline.server.http.errors import SERVER, ApiError
from paceline.server.http.security import body_too_slow
from paceline.server.http.sse import ClientGoneError, Deadline, while_connected
from paceline.server.http.tracing import REQUEST_ID, current_request_id
from paceline.server.metrics.server_metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

METRICS = "/metrics"
_ORDERS = ("/flush_prefix_cache", "/reset_prefix_cache")
_ASK_ALL = (METRICS, *_ORDERS, *OPEN_PATHS, "/stats")
_KEPT = ("/v1/responses/", "/responses/")
"""Where paths begin of what one replica keeps, and the others know nothing of."""
_ALL_SECONDS = 10.0
_LOOK_SECONDS = 0.05
"""Between two looks whether there is a replica."""
_ABSENT_SECONDS = 30.0
"""How long a request waits where there is no replica; one that was killed is back sooner."""
_AVOIDED_SECONDS = 5.0
"""After a connection to a replica broke; if it is dead, Serve has noticed by then."""
_BUSY = (429, 503)

log = logging.getLogger(__name__)


def relay(engines: DeploymentHandle[Any], config: ServerConfig) -> Relay:
    """The application over the replicas of a handle."""
    engines.options(method_name="info")  # from here on Serve tells where they are
    return Relay(lambda: addresses.get(engines.app_name, {}), config)


class Ingress:
    """The application as a deployment, over the handle of the replicas."""

    def __init__(self, engines: DeploymentHandle[Any], config: ServerConfig) -> None:
        self._relay = relay(engines, config)

    async def __call__(self, request: Request) -> Response:
        return _Answer(self._relay)


class _Answer(Response):
    """The answer to one request, which Serve runs as ASGI."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:  # the proxy sets one of its own
            await send(_without(message, REQUEST_ID.encode()))

        await self._relay(scope, receive, send_without_id)


class _Chosen(NamedTuple):
    """A replica; ``is_last`` where no other one is left to be asked."""

    name: str
    address: Address
    is_last: bool


class Relay:
    """The ASGI application.

    Args:
        addresses: of the running replicas, by their names.
    """

    def __init__(
        self,
        addresses: Callable[[], Mapping[str, Address]],
        config: ServerConfig,
        links: Links | None = None,
    ) -> None:
        self._addresses, self._config = addresses, config
        self._links = links or Links()
        self._policy = Affinity()
        self._work = Counter[str]()
        self._broken: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender, config = _Sender(send), self._config
        try:
            body = await read_body(receive, config.max_body_bytes, config.receive_timeout)
        except TimeoutError:
            await sender.fail(scope, receive, body_too_slow(config.receive_timeout))
            return
        if body is None:
            return
        asking = self._ask(ReplicaCall.of(scope, body), sender)
        try:
            await while_connected(receive, asking, Deadline.after(config.timeout))
        except ClientGoneError:
            return
        except (TimeoutError, ApiError) as error:
            await sender.fail(scope, receive, error)
        except EngineDeadError as error:
            log.warning("a replica failed: %s", error)
            dead = EngineDeadError("the replica that answered died; send the request again")
            await sender.fail(scope, receive, dead)

    async def _ask(self, call: ReplicaCall, send: _Sender) -> None:
        """Raises ``EngineDeadError``: a second replica died, or the first after it had begun."""
        is_kept = call.path.startswith(_KEPT) and call.method != "POST"
        if call.path in _ASK_ALL or is_kept:
            await self._ask_all(call, send)
            return
        parts = parts_of(call.body, call.headers)
        refused, can_retry, is_answered = set[str](), True, False
        while not is_answered:
            async with self._chosen(parts, refused) as chosen:
                try:
                    is_answered = await self._try(chosen, call, send, can_retry)
                except EngineDeadError:
                    if send.has_begun or not can_retry:
                        raise
                    can_retry = False
                refused.add(chosen.name)

    @asynccontextmanager
    async def _chosen(self, parts: Sequence[int], refused: set[str]) -> AsyncIterator[_Chosen]:
        """A replica, to whose unfinished work the request belongs meanwhile.

        Raises:
            ApiError: there has been none for long.
        """
        deadline = time.monotonic() + _ABSENT_SECONDS
        while not (known := self._reachable()):
            if time.monotonic() > deadline:
                raise _nobody_ready()
            await asyncio.sleep(_LOOK_SECONDS)
        left = [name for name in known if name not in refused]
        work = {name: self._work[name] for name in left or known}
        name, added = self._policy.choose(parts, work)
        self._work[name] += added
        try:
            yield _Chosen(name, known[name], len(left) < 2)
        finally:
            self._work[name] -= added
            if not self._work[name]:
                del self._work[name]

    def _reachable(self) -> dict[str, Address]:
        known, now = self._addresses(), time.monotonic()
        self._broken = {name: end for name, end in self._broken.items() if end > now}
        self._links.keep(known.values())
        return {name: each for name, each in known.items() if name not in self._broken}

    async def _try(
        self, chosen: _Chosen, call: ReplicaCall, send: _Sender, can_retry: bool
    ) -> bool:
        """Let a replica answer.

        Returns:
            False where it refused what another one may take.

        Raises:
            EngineDeadError: the replica or its engine died.
        """
        try:
            async with aclosing(self._links.answer(chosen.address, call, _names())) as parts:
                async for messages in parts:
                    if messages[0]["type"] == "http.response.start":
                        if can_retry and _has_died(messages):
                            raise EngineDeadError("its engine died")
                        if not chosen.is_last and _is_refused(call, messages):
                            return False
                    for message in messages:
                        await send(message)
        except OSError as error:
            self._broken[chosen.name] = time.monotonic() + _AVOIDED_SECONDS
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error
        return True

    async def _ask_all(self, call: ReplicaCall, send: _Sender) -> None:
        """Answer what concerns all replicas: with the best answer, for an order with the worst."""
        asked = (self._whole_answer(each, call) for each in self._reachable().values())
        results = await asyncio.gather(*asked, return_exceptions=True)
        wholes = [result for result in results if isinstance(result, list)]
        by_rank = {header_of(messages, RANK): messages for messages in wholes}
        answers = dict(sorted(by_rank.items()))
        if not answers:
            log.warning("no replica answers %s: %s", call.path, results)
            answers = {"": _messages(refusal(call.path, _nobody_ready()))}
        choose = max if call.path in (METRICS, *_ORDERS) else min
        chosen = choose(answers.values(), key=status_of)
        if call.path == METRICS and status_of(chosen) == 200:
            pages = {rank: body_of(messages).decode() for rank, messages in answers.items()}
            chosen = _messages(Response(merged(pages), headers={"content-type": CONTENT_TYPE}))
        for message in chosen:
            await send(message)

    async def _whole_answer(self, address: Address, call: ReplicaCall) -> list[Message]:
        async with (
            asyncio.timeout(_ALL_SECONDS),
            aclosing(self._links.answer(address, call, _names())) as parts,
        ):
            return [message async for messages in parts for message in messages]


class _Sender:
    """Sends an answer's messages; its start waits for the first bytes, until which it can change.

    Attributes:
        has_begun: something has been sent.
    """

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = _without(message, RANK)
        elif self.has_begun or message.get("body") or not message.get("more_body"):
            if not self.has_begun:
                assert self._start is not None
                self.has_begun = True
                await self._send(self._start)
            await self._send(message)

    async def fail(self, scope: Scope, receive: Receive, error: Exception) -> None:
        """Say how the answer ends, as its API has it."""
        path = scope["path"]
        if not self.has_begun:
            await refusal(path, error)(scope, receive, self._send)
            return
        await self._send({"type": "http.response.body", "body": last_words(path, error)})


def _nobody_ready() -> ApiError:
    again = {"Retry-After": "5"}
    return ApiError(503, "no replica is ready yet", SERVER, code="starting", headers=again)


def _names() -> tuple[tuple[bytes, bytes], ...]:
    """Headers by which the replica's log and this process's name a request alike."""
    name = current_request_id()
    return ((REQUEST_ID.encode(), name.encode()),) if name else ()


def _without(message: Message, name: bytes) -> Message:
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [each for each in message["headers"] if each[0] != name]}


def _has_died(messages: list[Message]) -> bool:
    return status_of(messages) == 500 and b'"engine_dead"' in body_of(messages)


def _is_refused(call: ReplicaCall, messages: list[Message]) -> bool:
    """Whether another replica may answer better."""
    status = status_of(messages)
    if f"{call.path}/".startswith(_KEPT) and status in (400, 404):
        return b" is not kept here" in body_of(messages)
    return status in _BUSY


def _messages(response: Response) -> list[Message]:
    head = {"status": response.status_code, "headers": response.raw_headers}
    return [
        {"type": "http.response.start", **head},
        {"type": "http.response.body", "body": bytes(response.body)},
    ]


LABEL = "replica"


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                empty = Metric(family.name, family.documentation, family.type)
                merged = families.setdefault(family.name, empty)
                for sample in family.samples:
                    labels = {**sample.labels, LABEL: replica}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()


def merged(pages: Mapping[str, str]) -> bytes:
    """
    Args:
        pages: in Prometheus' text format, by replica.
    """
    return generate_latest(_Pages(pages))
