"""The deployment that HTTP comes to: it hands each request to a replica, and the answer back.

Owns what happens when a replica refuses or dies. A request of which nothing has been sent goes to
another one: after a refusal to each replica once, after a death once, so that a request which kills
engines kills two at most. Bytes are passed on as the replica's application made them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.errors import EngineDeadError
from paceline.ray.calls import Call, Part, body_of, read_body, status_of
from paceline.ray.failures import last_words, refusal
from paceline.ray.metrics import merged
from paceline.ray.prompts import traits_of
from paceline.server.config import OPEN_PATHS, ServerConfig
from paceline.server.errors import SERVER, ApiError
from paceline.server.metrics import CONTENT_TYPE
from paceline.server.tracing import REQUEST_ID

METRICS = "/metrics"
_ORDERS = ("/flush_prefix_cache", "/reset_prefix_cache")
_ASK_ALL = (METRICS, *_ORDERS, *OPEN_PATHS, "/stats")
_KEPT = ("/v1/responses/", "/responses/")
"""Where paths begin of what one replica keeps, and the others know nothing of."""
_ALL_SECONDS = 10.0
_BUSY = (429, 503)
_DEATHS = (RayError, RayServeException, EngineDeadError)

log = logging.getLogger(__name__)


class Ingress:
    """
    Args:
        engines: the replicas.
    """

    def __init__(self, engines: DeploymentHandle[Any], config: ServerConfig) -> None:
        self.engines = engines
        self.config = config

    async def __call__(self, request: Request) -> Response:
        return _Relay(self)


class _Relay(Response):
    """The answer to one request, which Serve runs as ASGI."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._engines, self._config = ingress.engines, ingress.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._config
        read = await read_body(receive, config.max_body_bytes, config.receive_timeout)
        if read is None:
            return
        call, path = Call.of(scope, *read, traits_of(read[0], scope["headers"])), scope["path"]
        sender = _Sender(send)
        if path in _ASK_ALL or (path.startswith(_KEPT) and scope["method"] != "POST"):
            await self._ask_all(call, sender)
            return
        try:
            async with asyncio.timeout(config.timeout):
                await self._ask(call, sender)
        except TimeoutError:
            late = TimeoutError(f"the answer took longer than {config.request_timeout:g} s")
            await sender.fail(scope, receive, late)
        except _DEATHS as error:
            log.warning("a replica failed: %s", error)
            dead = EngineDeadError("the replica that answered died; send the request again")
            await sender.fail(scope, receive, dead)

    async def _ask(self, call: Call, send: _Sender) -> None:
        """Raises one of ``_DEATHS``: a second replica died, or the first after it had begun."""
        can_retry = True
        while True:
            try:
                refuser = await self._try(call, send, can_retry)
            except _DEATHS:
                if send.has_begun or not can_retry:
                    raise
                can_retry = False
                continue
            if refuser is None:
                return
            call = replace(call, avoid=call.avoid | {refuser})

    async def _try(self, call: Call, send: _Sender, can_retry: bool) -> str | None:
        """Let a replica answer.

        Returns:
            None where it did; the name of one that refused what another may take.

        Raises:
            EngineDeadError: the replica's engine died.
        """
        parts = self._engines.options(stream=True).answer.remote(call)
        try:
            async for values in parts:
                part = Part(*values)
                if part.messages[0]["type"] == "http.response.start":
                    if can_retry and _has_died(part.messages):
                        raise EngineDeadError("the engine of a replica died")
                    if _is_refused(call, part):
                        return part.replica
                for message in part.messages:
                    await send(message)
        finally:
            parts.cancel()
        return None

    async def _ask_all(self, call: Call, send: _Sender) -> None:
        """Answer what concerns all replicas: with the best answer, for an order with the worst."""
        path, asked = call.scope["path"], self._engines.broadcast("whole_answer", call)
        try:
            found = await asked.results_async(timeout_s=_ALL_SECONDS, return_exceptions=True)
        except (TimeoutError, *_DEATHS) as error:
            log.warning("not all replicas answered %s: %s", path, error)
            found = []
        told = sorted(each for each in found if isinstance(each, tuple))
        answers: dict[str, list[Message]] = dict(told)
        if not answers:
            again = {"Retry-After": "5"}
            nobody = ApiError(
                503, "no replica is ready yet", SERVER, code="starting", headers=again
            )
            answers = {"": await _messages(refusal(path, nobody), call.scope)}
        choose = max if path in (METRICS, *_ORDERS) else min
        chosen = choose(answers.values(), key=status_of)
        if path == METRICS and status_of(chosen) == 200:
            pages = {name: body_of(messages).decode() for name, messages in answers.items()}
            response = Response(merged(pages), headers={"content-type": CONTENT_TYPE})
            chosen = await _messages(response, call.scope)
        for message in chosen:
            await send(message)


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
        if message["type"] == "http.response.start":  # Serve adds the id that it gave the request
            headers = [each for each in message["headers"] if each[0] != REQUEST_ID.encode()]
            self._start = {**message, "headers": headers}
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


def _has_died(messages: list[Message]) -> bool:
    return status_of(messages) == 500 and b'"engine_dead"' in body_of(messages)


def _is_refused(call: Call, part: Part) -> bool:
    """Whether another replica, which has not been asked, may answer better."""
    if len(call.avoid) + 1 >= part.num_replicas:
        return False
    status = status_of(part.messages)
    if f"{call.scope['path']}/".startswith(_KEPT) and status in (400, 404):
        return b" is not kept here" in body_of(part.messages)
    return status in _BUSY


async def _messages(response: Response, scope: Scope) -> list[Message]:
    messages = list[Message]()

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await response(scope, receive, send)
    return messages
