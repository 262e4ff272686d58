"""Clients of a load: requests whose answers are known, and the many manners of asking for them.

Owns the requests, HTTP as far as it is needed to misbehave in it, and the comparison of an answer
with the known one. What arrived of an answer that was given up must be how the known one begins.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prompt_sets import load_prompts

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.api.outputs import Completion

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "is_open": {"type": "boolean"}},
    "required": ["name", "is_open"],
    "additionalProperties": False,
}
OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.9, "presence_penalty": 1.0, "logit_bias": {267: 3.0, 300: -5.0}},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.6, "logprobs": 0, "min_tokens": 12, "n": 3},
    {"temperature": 0.0, "stop": ["return", "\n\n"]},
    {"temperature": 0.9, "stop": ["e"], "include_stop_str_in_output": True},
    {"temperature": 0.8, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0.5, "structured_outputs": {"regex": "[a-z]{3,20} (yes|no)"}},
)
LENGTHS = (1, 8, 24, 48, 96, 160)
LONG = {"temperature": 0.8, "n": 4, "logprobs": 5, "ignore_eos": True, "max_tokens": 200}
"""Answers too large for the buffers between server and client."""
PROMPT_CHARACTERS = (60, 200, 500)


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample of an answer, in what every way of asking can be compared by."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Known:
    """A request, and its answer.

    Attributes:
        body: fields of ``/v1/completions`` without those that do not change the answer.
        prompt_ids: the prompt, encoded.
    """

    body: Mapping[str, Any]
    prompt_ids: Sequence[int]
    choices: Sequence[Choice]


def bodies(count: int, source: str) -> list[dict[str, Any]]:
    """Distinct requests: options in turn, with prompts and lengths drawn from a fixed seed."""
    rng = random.Random(0)
    sets = load_prompts(source)
    prompts = [text for kind in ("code", "prose", "edit") for text in sets.kind(kind)]
    found = []
    for index in range(count):
        options = LONG if index % 16 == 15 else OPTIONS[index % len(OPTIONS)]
        body = {
            "prompt": rng.choice(prompts)[: rng.choice(PROMPT_CHARACTERS)],
            "seed": index,
            "top_p": 1.0,
            "max_tokens": rng.choice(LENGTHS),
            **options,
        }
        found.append(body)
    return found


def params(body: Mapping[str, Any]) -> SamplingParams:
    fields = {name: value for name, value in body.items() if name != "prompt"}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputs(**fields["structured_outputs"])
    return SamplingParams(**fields)


def answered(wanted: Sequence[Mapping[str, Any]], **engine: Any) -> list[Known]:
    """The answers, one request at a time, of an engine without speculation.

    Args:
        engine: options of :class:`~paceline.api.llm.LLM`.
    """
    found = []
    with LLM("embedded", speculative_config=[], **engine) as llm:
        for body in wanted:
            ids = llm.encode(body["prompt"])
            output = llm.generate(ids, params(body))
            found.append(Known(body, ids, [_choice(each) for each in output.completions]))
    return found


def _choice(completion: Completion) -> Choice:
    return Choice(
        completion.text,
        tuple(completion.token_ids),
        tuple(entry.logprob for entry in completion.logprobs),
        None if completion.finish_reason is None else str(completion.finish_reason),
        completion.stop_reason,
    )


MANNERS = {
    "whole": 10,  # reads the answer as it comes
    "slow": 3,  # a few bytes, then a pause
    "abort": 4,  # resets the connection in mid-answer
    "leave": 2,  # closes it in mid-answer
    "half closed": 1,  # says that it will send no more, and reads on
    "deaf": 1,  # closes without having read anything
    "half a body": 2,  # leaves before its request is complete
    "refused": 1,  # sends what is answered with an error
}
"""How clients behave, and how often in proportion."""
BUFFER = 4096
"""Bytes that a slow reader's socket and this program hold of what it has not read."""
PATIENCE = 300.0
"""Seconds for one request; longer is a lost answer."""


class LoadError(Exception):
    """An answer that is not the known one."""


@dataclass(slots=True)
class Connection:
    """A client's way to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int, is_slow: bool = False) -> Connection:
        sock = socket.socket()
        if is_slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        limit = BUFFER if is_slow else 1 << 16
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    def reset(self) -> None:
        """Let the other end see an error rather than an end."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


@dataclass(slots=True)
class Answer:
    """What has arrived of an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False


async def read(connection: Connection, answer: Answer, pause: float = 0.0) -> AsyncIterator[int]:
    """Read an answer into what is given; yields how much of its body there is, again and again."""
    reader = connection.reader
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    answer.status = int(head[0].split()[1])
    lines = (line.partition(":") for line in head[1:] if line)
    answer.headers = {name.lower(): value.strip() for name, _, value in lines}
    is_chunked = answer.headers.get("transfer-encoding") == "chunked"
    left = 0 if is_chunked else int(answer.headers["content-length"])
    while True:
        if is_chunked:
            left = int(await reader.readline(), 16)
        is_last = is_chunked and not left
        while left:
            data = await reader.read(min(left, 200) if pause else left)
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            answer.body += data
            left -= len(data)
            yield len(answer.body)
            if pause:
                await asyncio.sleep(pause)
        if is_chunked:
            await reader.readexactly(2)
        if is_last or not is_chunked:
            answer.is_complete = True
            return


# --- one request ----------------------------------------------------------------------------------


def varied(known: Known, rng: random.Random) -> dict[str, Any]:
    """The request with what must not change its answer."""
    body = {**known.body, "return_origins": True, "stream": rng.random() < 0.75}
    if rng.random() < 0.3:
        body["prompt"] = list(known.prompt_ids)
    if rng.random() < 0.7:
        body["cache_salt"] = str(rng.randrange(8))
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    match rng.randrange(6):
        case 0:
            body["speculative"] = {"enabled": False}
        case 1:
            body["speculative"] = {"num_speculative_tokens": rng.randrange(1, 5)}
        case 2:
            body["speculative"] = {"method": rng.choice(["suffix", "draft_model"])}
    return body


def request_bytes(body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(connection: Connection, known: Known, manner: str, rng: random.Random) -> bool:
    """Send one request in one manner.

    Returns:
        Whether the connection can be used again.

    Raises:
        LoadError: the answer is not the known one.
        OSError, EOFError, TimeoutError: it was lost.
    """
    body = varied(known, rng)
    if manner == "refused":
        body["temperature"] = -1.0
    data = request_bytes(body)
    sent = data[: rng.randrange(1, len(data))] if manner == "half a body" else data
    connection.writer.write(sent)
    if manner == "half closed" or (manner == "half a body" and rng.random() < 0.5):
        connection.writer.write_eof()
    if manner in ("deaf", "half a body"):
        await asyncio.sleep(rng.random() * 0.2)
        return False
    answer = Answer()
    gives_up_at = rng.randrange(1, 6000) if manner in ("abort", "leave") else float("inf")
    pause = rng.choice([0.005, 0.02]) if manner == "slow" else 0.0
    try:
        async with asyncio.timeout(PATIENCE):
            async for size in read(connection, answer, pause):
                if size >= gives_up_at:
                    break
    except (OSError, EOFError):
        if manner != "half closed":  # which a server may take for a client that left
            raise
    check(known, answer, body, manner)
    if manner == "abort":
        connection.reset()
    return answer.is_complete and manner in ("whole", "slow", "refused")


# --- what came back -------------------------------------------------------------------------------


def check(known: Known, answer: Answer, body: Mapping[str, Any], manner: str) -> None:
    """Compare what arrived with what is known.

    Raises:
        LoadError: they differ.
    """
    wanted = 400 if manner == "refused" else 200
    if answer.status not in ((wanted,) if answer.is_complete else (wanted, 0)):
        raise LoadError(f"status {answer.status}: {bytes(answer.body[:300])!r}")
    if manner == "refused" or not (answer.is_complete or body["stream"]):
        return
    found = documents(answer, body["stream"])
    parts: dict[int, list[dict[str, Any]]] = {}
    for document in found:
        if "error" in document:
            raise LoadError(f"an error instead of an answer: {document}")
        for part in document["choices"]:
            parts.setdefault(part["index"], []).append(part)
    _check_usage(known, found, body, answer.is_complete)
    if answer.is_complete and len(parts) != len(known.choices):
        raise LoadError(f"{len(parts)} samples instead of {len(known.choices)}")
    for index, found in parts.items():
        _compare(_joined(found), known.choices[index], answer.is_complete)


def documents(answer: Answer, is_stream: bool) -> list[dict[str, Any]]:
    """The JSON that has arrived whole: of a stream each event's."""
    if not is_stream:
        return [json.loads(answer.body)]
    *events, rest = bytes(answer.body).split(b"\n\n")
    data = [each.removeprefix(b"data: ") for each in events if each.startswith(b"data: ")]
    if answer.is_complete and (rest or data.pop() != b"[DONE]"):
        raise LoadError("the stream ended without its end")
    return [json.loads(each) for each in data if each != b"[DONE]"]


def _check_usage(
    known: Known, documents: list[dict[str, Any]], body: Mapping[str, Any], is_complete: bool
) -> None:
    usage = documents[-1].get("usage") if documents else None
    if not is_complete or (usage is None and "stream_options" not in body and body["stream"]):
        return
    wanted = len(known.prompt_ids), sum(len(choice.token_ids) for choice in known.choices)
    if usage is None or (usage["prompt_tokens"], usage["completion_tokens"]) != wanted:
        raise LoadError(f"usage is {usage} instead of {wanted}")


def _joined(parts: list[dict[str, Any]]) -> Choice:
    logprobs = [part["logprobs"]["token_logprobs"] for part in parts if part["logprobs"]]
    return Choice(
        "".join(part["text"] for part in parts),
        tuple(token["id"] for part in parts for token in part["tokens"]),
        tuple(value for values in logprobs for value in values),
        parts[-1]["finish_reason"],
        parts[-1]["stop_reason"],
    )


def _compare(found: Choice, wanted: Choice, is_complete: bool) -> None:
    if is_complete or found.finish_reason is not None:
        same = found == wanted
    else:
        same = (
            wanted.text.startswith(found.text)
            and wanted.token_ids[: len(found.token_ids)] == found.token_ids
            and wanted.logprobs[: len(found.logprobs)] == found.logprobs
        )
    if not same:
        raise LoadError(f"{found} instead of {wanted}")
