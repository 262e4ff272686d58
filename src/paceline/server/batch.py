"""A batch in OpenAI's format: a file of requests in, a file of answers out, one JSON object a line.

A request has ``custom_id``, ``method``, ``url`` and ``body``; an answer ``id``, ``custom_id`` and
either ``response`` (``status_code``, ``request_id``, ``body``) or ``error`` (``code``,
``message``). Files are untrusted: a bad line of requests is an answer that says so, and a file of
answers that is something else is left alone. Many requests are sent at a time, in any order, to the
application itself, so that a batch is answered as the server would answer it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paceline.core.errors import ConfigError, EngineClosedError, EngineDeadError
from paceline.core.files import read_as, whole_file
from paceline.server.app import create_app
from paceline.server.engine_process.client import EngineClient
from paceline.server.http.config import ServerConfig

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CUSTOM_ID = 512
FIRST_ERROR_STATUS, FIRST_SERVER_ERROR = 400, 500
RETRIED = (408, 429)
"""Besides those of the server."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of requests; ``problem`` says why it cannot be sent, and is empty otherwise."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def read_batch(path: Path) -> Iterator[BatchLine]:
    """The lines of a file that are not blank, each checked.

    Raises:
        ConfigError: the file cannot be read.
    """
    seen: set[str] = set()
    with read_as(ConfigError, f"requests from {path}"), path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            data = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
            if data.strip():
                yield _parse(number, data, seen)


def count_lines(path: Path) -> int:
    """Lines that are not blank, for a progress bar; ``ConfigError`` where it cannot be read."""
    with read_as(ConfigError, f"requests from {path}"), path.open("rb") as file:
        return sum(bool(data.strip()) for data in file)


def _parse(number: int, data: bytes, seen: set[str]) -> BatchLine:
    try:
        row = json.loads(data)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, problem=f"line {number} is not valid JSON: {error}")
    if not isinstance(row, dict):
        return BatchLine(number, problem=f"line {number} is not a JSON object")
    custom_id = row.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return BatchLine(
            number,
            problem=f"line {number}: custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters",
        )
    problem = _problem(row, custom_id in seen)
    seen.add(custom_id)
    if problem:
        return BatchLine(number, custom_id, problem=f"line {number}: {problem}")
    return BatchLine(number, custom_id, row["url"], row["body"])


def _problem(row: dict[str, Any], is_known: bool) -> str:
    if is_known:
        return "an earlier line has this custom_id"
    for name in row:
        if name not in ("custom_id", "method", "url", "body"):
            return f"unknown field {name[:100]!r}; allowed: custom_id, method, url and body"
    if row.get("method", "POST") != "POST":
        return "method must be POST"
    if row.get("url") not in URLS:
        return f"url must be one of {', '.join(URLS)}"
    if not isinstance(row.get("body"), dict):
        return "body must be an object"
    if row["body"].get("stream"):
        return "stream is not possible in a batch"
    return ""


def answer(line: BatchLine, status: int, body: Any) -> dict[str, Any]:
    """The record of a request that was sent."""
    request_id = f"req_{uuid.uuid4().hex}"
    return _record(line, {"status_code": status, "request_id": request_id, "body": body}, None)


def refusal(line: BatchLine, code: str, message: str) -> dict[str, Any]:
    """The record of a request that has no answer."""
    return _record(line, None, {"code": code, "message": message})


def _record(line: BatchLine, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


class AnswerFile:
    """A file of answers that a later run continues.

    Requests that were answered, with a success or a refusal of theirs, stay; a line that is cut
    off, and answers that another attempt could better, are taken out when the file is opened.

    Args:
        path: a file that this class has written, or none yet.

    Attributes:
        done: ``custom_id`` of every answer that is there.

    Raises:
        ConfigError: the file holds something else, or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()
        try:
            if path.is_file():
                self._repair()
            self._file: BinaryIO = path.open("ab")
        except OSError as error:
            raise self._failure(error) from error

    def _repair(self) -> None:
        dropped: set[int] = set()
        with self.path.open("rb") as old:
            for number, data in enumerate(old, start=1):
                custom_id = self._finished(data, number)
                if custom_id is None or custom_id in self.done:
                    dropped.add(number)
                else:
                    self.done.add(custom_id)
        if dropped:
            self._take_out(dropped)

    def _take_out(self, dropped: Collection[int]) -> None:
        with (
            whole_file(self.path, ConfigError) as partial,
            self.path.open("rb") as old,
            partial.open("wb") as new,
        ):
            new.writelines(data for i, data in enumerate(old, start=1) if i not in dropped)

    def _finished(self, data: bytes, number: int) -> str | None:
        """The id of a line that stays."""
        is_whole = data.endswith(b"\n")
        try:
            row = json.loads(data)
            custom_id, response = row["custom_id"], row["response"]
            status = response["status_code"] if response else None
        except (ValueError, RecursionError, KeyError, TypeError):
            if not is_whole:
                return None
            raise ConfigError(
                f"{self.path} holds something else than answers (line {number}): choose another "
                "file with --output-file"
            ) from None
        if not is_whole or not isinstance(custom_id, str) or not isinstance(status, int):
            return None
        return None if status >= FIRST_SERVER_ERROR or status in RETRIED else custom_id

    def __contains__(self, line: BatchLine) -> bool:
        """Whether a line that can be sent was answered before."""
        return not line.problem and line.custom_id in self.done

    def write(self, record: dict[str, Any]) -> None:
        """Add a line, which readers see at once; ``ConfigError`` where it cannot be written."""
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        with suppress(OSError):  # write() has told it
            self._file.close()

    def _failure(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write answers to {self.path}: {error.strerror or error}")


REQUESTS_PER_SEQUENCE = 2
"""Requests in flight per place in the batch, so that a place never waits for a line to be read."""
MAX_QUEUE = 1 << 20
_POLL_SECONDS = 0.1
Handle = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Any]]]
"""Answers (url, body) with (status, body)."""


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


class BatchRun:
    """One run over a file of requests: what is left to be sent, and where answers go.

    Args:
        advance: called with the number of lines that are done.
    """

    def __init__(self, answers: AnswerFile, advance: Callable[[int], None]) -> None:
        self.summary = BatchSummary()
        self._answers = answers
        self._advance = advance

    def left(self, lines: Iterable[BatchLine]) -> Iterator[BatchLine]:
        """Lines without an answer; one that cannot be sent gets a refusal here."""
        for line in lines:
            if line in self._answers:
                self.summary.skipped += 1
                self._advance(self.summary.total)
            elif line.problem:
                self.write(refusal(line, "invalid_request", line.problem))
            else:
                yield line

    def write(self, record: dict[str, Any]) -> None:
        self._answers.write(record)
        self.summary.note(record)
        self._advance(self.summary.total)


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
    run = BatchRun(answers, advance)
    await answer_lines(run.left(lines), run.write, handle, max_concurrency)
    return run.summary


async def answer_lines(
    lines: Iterable[BatchLine],
    write: Callable[[dict[str, Any]], None],
    handle: Handle,
    max_concurrency: int,
) -> None:
    """Send lines and write their records, in any order; raises as :func:`run_batch`."""
    places = asyncio.Semaphore(max_concurrency)

    async def send(line: BatchLine) -> None:
        try:
            write(await _answered(line, handle))
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for line in lines:
                await places.acquire()
                group.create_task(send(line))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _answered(line: BatchLine, handle: Handle) -> dict[str, Any]:
    try:
        status, body = await handle(line.url, line.body)
    except EngineClosedError:
        raise
    except Exception as error:
        return refusal(line, "request_failed", f"line {line.number}: {error!r}")
    return answer(line, status, body)


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
        has_died = status == FIRST_SERVER_ERROR and told["error"]["code"] == "engine_dead"
        return await attempt(url, body) if has_died else (status, told)

    async def attempt(url: str, body: dict[str, Any]) -> tuple[int, Any]:
        while client.state in ("starting", "hung"):
            await asyncio.sleep(_POLL_SECONDS)
        if client.state == "failed":
            raise EngineDeadError(
                f"{client.failure}; the same command continues with what has no answer yet"
            )
        sent: list[Message] = []
        data = json.dumps(body).encode()
        inbox: asyncio.Queue[Message] = asyncio.Queue()  # empty after the body: no client leaves
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


def _scope(url: str, length: int) -> Message:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    how = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    where = {"scheme": "http", "path": url, "raw_path": url.encode(), "query_string": b""}
    return {**how, **where, "headers": headers}
