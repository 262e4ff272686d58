"""What travels between the ingress and the replicas: one HTTP request, and the parts of its answer.

Knows no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope

from paceline.ray.prompts import Traits

_OF_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
_LEAVING_SECONDS = 5.0


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        scope: of ASGI; what cannot be sent to another process is left out.
        is_whole: False where the body did not arrive in time.
        traits: what the choice of a replica goes by.
        avoid: names of replicas that have refused it.
    """

    scope: Scope
    body: bytes
    is_whole: bool
    traits: Traits
    avoid: frozenset[str] = frozenset()

    @classmethod
    def of(cls, scope: Scope, body: bytes, is_whole: bool, traits: Traits) -> Call:
        return cls({k: scope[k] for k in _OF_SCOPE if k in scope}, body, is_whole, traits)


class Part(NamedTuple):
    """Some of an answer.

    Attributes:
        replica: name of the one that answers.
        num_replicas: how many there are.
        messages: of ASGI, at least one.
    """

    replica: str
    num_replicas: int
    messages: list[Message]


async def read_body(receive: Receive, limit: int, seconds: float) -> tuple[bytes, bool] | None:
    """The body of a request.

    Args:
        limit: bytes; of a larger body a little more than that is read.

    Returns:
        the bytes, and whether all that is wanted came in time; None where the client left.
    """
    parts, count = list[bytes](), 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                count += len(parts[-1])
                if count > limit or not message.get("more_body", False):
                    return b"".join(parts), True
    except TimeoutError:
        return b"".join(parts), False


async def answered(app: ASGIApp, call: Call) -> AsyncGenerator[list[Message], None]:
    """Run an application on a request; what it sends without waiting comes together.

    Closing the generator tells the application that the client has left.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    has_left = asyncio.Event()
    task = asyncio.ensure_future(app(call.scope, _receiver(call, has_left), _sender(sent)))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (first := await sent.get()) is not None:
            messages = [first]
            while not sent.empty() and (more := sent.get_nowait()) is not None:
                messages.append(more)
            yield messages
            if task.done() and sent.empty():
                break
    finally:
        has_left.set()
        await asyncio.wait((task,), timeout=_LEAVING_SECONDS)
        task.cancel()


async def whole_answer(app: ASGIApp, call: Call) -> list[Message]:
    """All that an application sends."""
    async with aclosing(answered(app, call)) as parts:
        return [message async for part in parts for message in part]


def _receiver(call: Call, has_left: asyncio.Event) -> Receive:
    left: list[Message] = [{"type": "http.request", "body": call.body}]

    async def receive() -> Message:
        if not call.is_whole:
            raise TimeoutError
        if left:
            return left.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    return receive


def _sender(sent: asyncio.Queue[Message | None]) -> Callable[[Message], Any]:
    async def send(message: Message) -> None:
        sent.put_nowait(dict(message))

    return send


def status_of(messages: list[Message]) -> int:
    status: int = messages[0]["status"]
    return status


def body_of(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)
