"""Sends the requests of a batch file and writes their answers, many at a time, in any order.

Owns the order of events; formats are :mod:`paceline.server.batch_file`'s. Requests go through the
application itself, so that a batch is answered as the server would answer it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.errors import EngineClosedError, EngineDeadError
from paceline.server.app import create_app
from paceline.server.batch_file import BatchLine, answer, refusal
from paceline.server.engine_process.client import EngineClient
from paceline.server.http.config import ServerConfig

REQUESTS_PER_SEQUENCE = 2
"""Requests in flight per place in the batch, so that a place never waits for a line to be read."""
MAX_QUEUE = 1 << 20
_POLL_SECONDS = 0.1
Handle = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Any]]]
"""Answers (url, body) with (status, body)."""
FIRST_ERROR_STATUS = 400
SERVER_ERROR_STATUS = 500


class Answers(Protocol):
    """Where answers go, as :class:`~paceline.server.batch_file.AnswerFile` has it."""

    def __contains__(self, line: BatchLine) -> bool: ...

    def write(self, record: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class BatchSummary:
    """How many lines were answered, refused or not sent, and there before."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0

    def note(self, record: Mapping[str, Any]) -> None:
        """Count a line of answers."""
        response = record["response"]
        if response is not None and response["status_code"] < FIRST_ERROR_STATUS:
            self.answered += 1
        else:
            self.failed += 1

    @property
    def total(self) -> int:
        return self.answered + self.failed + self.skipped


async def run_batch(
    lines: Iterable[BatchLine],
    answers: Answers,
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
            summary.note(record)
            advance(summary.total)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if line in answers:
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
    ``EngineDeadError`` when that has failed. A request whose engine died is sent once more, so that
    one which kills engines kills two at most.
    """

    async def handle(url: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, told = await attempt(url, body)
        return await attempt(url, body) if _has_died(status, told) else (status, told)

    async def attempt(url: str, body: dict[str, Any]) -> tuple[int, Any]:
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


def batch_config(names: tuple[str, ...], template_options: Mapping[str, Any]) -> ServerConfig:
    """Of a server that refuses no request for its number or for the time that it takes.

    Args:
        names: what requests call the model.
        template_options: for the template of every chat.
    """
    return ServerConfig(
        served_model_names=names,
        max_queue=MAX_QUEUE,
        request_timeout=0.0,
        default_chat_template_kwargs=template_options,
    )


def batch_handle(client: EngineClient, config: ServerConfig) -> tuple[Handle, int]:
    """The server's application over a started engine.

    Returns:
        what answers requests, and how many it should have at a time.
    """
    places = REQUESTS_PER_SEQUENCE * client.info.max_num_seqs
    app = create_app(client, config)
    app.state.models.backlog.lift_bounds()  # what waits is as much as the file's owner asks for
    return application_handle(app, client), places


def _has_died(status: int, told: Any) -> bool:
    return status == SERVER_ERROR_STATUS and told["error"]["code"] == "engine_dead"


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
