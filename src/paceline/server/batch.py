"""Sends the requests of a batch file and writes their answers, many at a time, in any order.

Owns the order of events; formats are :mod:`paceline.server.batch_file`'s. Requests go through the
application itself, so that a batch is answered as the server would answer it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import EngineClosedError, EngineDeadError
from paceline.server.batch_file import AnswerFile, BatchLine, answer, refusal
from paceline.server.engine.client import EngineClient

_POLL_SECONDS = 0.1
Handle = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Any]]]
"""AnswerFile (url, body) with (status, body)."""
FIRST_ERROR_STATUS = 400


@dataclass(slots=True)
class BatchSummary:
    """How many lines were answered, refused or not sent, and there before."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        return self.answered + self.failed + self.skipped


async def run_batch(
    lines: Iterable[BatchLine],
    answers: AnswerFile,
    handle: Handle,
    max_concurrency: int,
    advance: Callable[[int], None] = lambda done: None,
) -> BatchSummary:
    """Answer all lines that have no answer yet.

    Args:
        max_concurrency: most requests in flight; lines beyond them are not read.
        advance: called with the number of lines that are done.

    Raises:
        ConfigError: a file cannot be read or written; answers that were written stay.
        EngineClosedError: from ``handle``: nothing more can be answered; likewise.
    """
    summary, places = BatchSummary(), asyncio.Semaphore(max_concurrency)

    async def send(line: BatchLine) -> None:
        try:
            record = await _answered(line, handle)
            answers.write(record)
            response = record["response"]
            if response is not None and response["status_code"] < FIRST_ERROR_STATUS:
                summary.answered += 1
            else:
                summary.failed += 1
            advance(summary.total)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if not line.problem and line.custom_id in answers.done:
                    summary.skipped += 1
                    advance(summary.total)
                    continue
                await places.acquire()
                group.create_task(send(line))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return summary


async def _answered(line: BatchLine, handle: Handle) -> dict[str, Any]:
    if line.problem:
        return refusal(line, "invalid_request", line.problem)
    try:
        status, body = await handle(line.url, line.body)
    except EngineClosedError:
        raise
    except Exception as error:
        return refusal(line, "request_failed", f"line {line.number}: {error!r}")
    return answer(line, status, f"req_{uuid.uuid4().hex}", body)


# --- the application, without a socket ------------------------------------------------------------

Message = MutableMapping[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Any], Awaitable[None]]


def application_handle(app: Application, client: EngineClient) -> Handle:
    """Requests to an ASGI application in this process, while its engine serves.

    The handle waits for an engine that hangs or is being started again, and raises
    ``EngineDeadError`` when that has failed.
    """

    async def handle(url: str, body: dict[str, Any]) -> tuple[int, Any]:
        while client.state in ("starting", "hung"):
            await asyncio.sleep(_POLL_SECONDS)
        if client.state == "failed":
            raise EngineDeadError(
                f"{client.failure}; the same command continues with what has no answer yet"
            )
        sent: list[Message] = []
        data = json.dumps(body).encode()
        inbox: asyncio.Queue[Message] = asyncio.Queue()  # empty after the body: nobody hangs up
        inbox.put_nowait({"type": "http.request", "body": data, "more_body": False})

        async def send(message: Message) -> None:
            sent.append(message)

        await app(_scope(url, len(data)), inbox.get, send)
        return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))

    return handle


def _scope(url: str, length: int) -> Message:
    headers = {"content-type": "application/json", "content-length": str(length)}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
