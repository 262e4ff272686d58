"""The two files of a batch, in OpenAI's format: requests in, answers out, one JSON object a line.

A request has ``custom_id``, ``method``, ``url`` and ``body``; an answer ``id``, ``custom_id`` and
either ``response`` (``status_code``, ``request_id``, ``body``) or ``error`` (``code``,
``message``). Files are untrusted: a bad line of requests is an answer that says so, and a file of
answers that is something else is left alone. Knows no engine and sends nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paceline.core.errors import ConfigError
from paceline.core.reading import read_as
from paceline.core.writing import whole_file

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CUSTOM_ID = 512
FIRST_RETRIED_STATUS = 500
RETRIED = (408, 429)


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


def answer(line: BatchLine, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The line of a request that was sent."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _record(line, response, None)


def refusal(line: BatchLine, code: str, message: str) -> dict[str, Any]:
    """The line of a request that has no answer."""
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
        return None if status >= FIRST_RETRIED_STATUS or status in RETRIED else custom_id

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
