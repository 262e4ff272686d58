"""Whether an answer to a generated request is right. Owns the rules; knows no transport."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.server.fuzz.requests import Case

TYPES = {
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "rate_limit_error",
    "request_too_large",  # Anthropic's
}
MAX_MESSAGE = 2000
SLOW_SECONDS = 1.0
SECONDS_PER_TOKEN = 0.005
NOT_HTTP = b"Invalid HTTP request received."
"""What is no HTTP is refused by the protocol's reader, which knows no bodies of ours."""
_LEAK = re.compile(
    r"Traceback|File \"|site-packages|/src/paceline|errors\.pydantic\.dev|0x7f[0-9a-f]"
)
_OF_THE_WHOLE = (
    "context_length_exceeded",
    "model_not_found",
    "no_chat_template",
    "body_too_large",
    "invalid_json",
)
"""Codes of errors that lie in no single field, or name theirs by themselves."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` 0: the connection was closed without one."""

    status: int
    content_type: str = ""
    body: bytes = b""


def problems(case: Case, answer: Answer) -> Iterator[str]:
    """What is wrong with an answer; nothing when it is right."""
    if answer.status not in case.statuses:
        yield f"status {answer.status}: {answer.body[:300]!r}"
    if case.raw or case.method == "HEAD":
        return
    if answer.status >= 400:
        yield from _of_error(case, answer)
    elif answer.status == 200 and case.path.partition("?")[0].startswith(("/v1/", "/api/")):
        yield from _of_success(case, answer)


def _of_error(case: Case, answer: Answer) -> Iterator[str]:
    if answer.status == 400 and answer.body == NOT_HTTP:
        return
    if answer.content_type != "application/json":
        yield f"an error of type {answer.content_type!r}"
        return
    document = json.loads(answer.body)
    yield from _of_error_document(_as_openais(case, document))
    found = _LEAK.search(answer.body.decode())
    if found and found[0].encode() not in case.body:
        yield f"the body shows {found[0]!r}"
    if not case.field:
        return
    error = document.get("error", {})
    named = f"{error.get('param')} {error.get('message')}"
    if answer.status != 400 or error.get("code") in _OF_THE_WHOLE:
        return
    if case.field not in named and not _is_about_another(case, named):
        yield f"the error does not name {case.field!r}: {error}"


def _as_openais(case: Case, document: Any) -> Any:
    """The error in OpenAI's shape; Ollama's and Anthropic's must have theirs.

    What is no HTTP is answered in OpenAI's: its path, which says whose API it is, was not read.
    """
    rest = {"param": None, "code": None}
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict) and error.get("code") == "invalid_http":
        return document
    if case.path.startswith("/api/") and isinstance(error, str):
        return {"error": {"message": error, "type": "invalid_request_error", **rest}}
    is_anthropics = case.path.startswith("/v1/messages") and document.get("type") == "error"
    if is_anthropics and isinstance(error, dict) and set(error) == {"type", "message"}:
        return {"error": {**error, **rest}}
    return document if not case.path.startswith("/api/") else None


def _is_about_another(case: Case, named: str) -> bool:
    """Fields that cannot be used together: the one that was there before may be named as well."""
    names = json.loads(case.body) if case.field else {}
    return any(re.search(rf"\b{re.escape(name)}\b", named) for name in names)


def _of_error_document(document: Any) -> Iterator[str]:
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        yield f"no error in {document!r:.200}"
        return
    if error["type"] not in TYPES:
        yield f"an error of type {error['type']!r}: {error['message']!r:.200}"
    message = error["message"]
    if not isinstance(message, str) or not 0 < len(message) <= MAX_MESSAGE:
        yield f"a message of {len(message or '')} characters: {message!r:.200}"
    for name in ("param", "code"):
        if error[name] is not None and not isinstance(error[name], str):
            yield f"{name} is {error[name]!r:.100}"
    if isinstance(error["param"], str) and len(error["param"]) > MAX_MESSAGE:
        yield f"param has {len(error['param'])} characters"


def seconds_for_tokens(answer: Answer) -> float:
    """Tokens that were asked for take their time, which is no fault of an answer."""
    counts = re.findall(rb'"completion_tokens":(\d+)', answer.body)
    return SECONDS_PER_TOKEN * int(counts[-1] if counts else 0)


def _of_success(case: Case, answer: Answer) -> Iterator[str]:
    text = answer.body.decode()
    if answer.content_type.startswith("text/event-stream"):
        blocks = [b for b in text.split("\n\n") if b[:1] != ":"]
        documents = [_data(block) for block in blocks[:-1]]
        if blocks[-1] or documents[-1] not in _ENDS:
            yield f"a stream that ends with {answer.body[-100:]!r}"
        yield from _of_stream(documents)
        return
    if answer.content_type == "application/x-ndjson":
        documents = [json.loads(line) for line in text.splitlines()]
        if not documents[-1].get("done"):
            yield f"a stream that ends with {answer.body[-100:]!r}"
        yield from _of_stream(documents)
        return
    if case.path.startswith("/page") or not answer.content_type.startswith("application/json"):
        return
    document = json.loads(answer.body)
    if _has_error(document):
        yield f"200 with an error: {document!r:.300}"


_ENDS = ("[DONE]", "message_stop", "response.completed", "response.incomplete")
"""Of streams: OpenAI's, Anthropic's, and those of responses."""


def _data(block: str) -> Any:
    """The document of an event; of a last one, what says that it is the last."""
    (line,) = [each for each in block.split("\n") if each.startswith("data: ")]
    data = line.removeprefix("data: ")
    document = data if data == "[DONE]" else json.loads(data)
    is_last = isinstance(document, dict) and document.get("type") in _ENDS
    return document["type"] if is_last else document


def _of_stream(documents: list[Any]) -> Iterator[str]:
    for document in documents:
        if _has_error(document):
            yield f"a stream with an error: {document!r:.300}"


def _has_error(document: Any) -> bool:
    """Whether it tells of one; responses say that there is none."""
    return isinstance(document, dict) and document.get("error") is not None
