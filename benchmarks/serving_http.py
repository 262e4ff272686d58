"""A server and a client, each in a process of its own, for the benchmark of what serving costs.

The server is what ``paceline serve`` runs, over an engine that the benchmark's factory makes. The
client keeps its connections open, asks for streams with all prompts at once, and looks at what came
when all has come.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.server.config import ServerConfig
from paceline.server.engine.client import EngineClient
from paceline.server.run import run

END = b"0\r\n\r\n"
ENDING_SECONDS = 30.0
Answer = tuple[int, str]
"""Number of tokens, text."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def serve(factory: Callable[[], Any], stream_interval: float, pipe: Connection) -> None:
    """The server's process: says on which port it listens, then serves until it is told to end."""
    config = ServerConfig(port=0, served_model_names=("m",), stream_interval=stream_interval)
    client = EngineClient(factory, stream_interval=stream_interval)
    run(client, config, pipe.send)


def ask(port: int, pipe: Connection) -> None:
    """The client's process: bodies come through the pipe, and the answers to them go back."""
    with asyncio.Runner() as runner:
        streams: list[Stream] = []
        while bodies := pipe.recv():
            pipe.send(runner.run(_answers(port, bodies, streams)))


async def _answers(port: int, bodies: Sequence[bytes], streams: list[Stream]) -> list[bytes]:
    while len(streams) < len(bodies):
        streams.append(await asyncio.open_connection("127.0.0.1", port))
    pairs = zip(streams, bodies, strict=False)
    return await asyncio.gather(*(_raw_answer(*stream, body) for stream, body in pairs))


async def _raw_answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> bytes:
    head = f"Host: m\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
    answer = b""
    while not answer.endswith(END):
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError(f"the server closed the connection after {answer!r:.300}")
        answer += data
    return answer


def read(answer: bytes) -> Answer:
    """What a stream brought.

    Raises: ValueError: an error instead of an answer, or an end that is none.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    data = b"".join(re.split(rb"\r\n[0-9a-f]+\r\n", b"\r\n" + body))
    events = data.removesuffix(b"\r\n").decode().split("\n\n")
    if not head.startswith(b"HTTP/1.1 200 ") or events[-2:] != ["data: [DONE]", ""]:
        raise ValueError(f"not the answer that was wanted: {answer!r:.200}")
    *documents, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(document["choices"][0]["text"] for document in documents)
    return last["usage"]["completion_tokens"], text


@dataclass(slots=True)
class Served:
    """What came back over HTTP, not yet looked at."""

    raw: list[bytes]


class HttpPair:
    """The two processes."""

    def __init__(self, factory: Callable[[], Any], stream_interval: float) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._server = context.Process(target=serve, args=(factory, stream_interval, theirs))
        self._server.start()
        theirs.close()
        port = int(ours.recv().split(" at http://127.0.0.1:")[1].split()[0])
        self._pipe, theirs = context.Pipe()
        self._client = context.Process(target=ask, args=(port, theirs))
        self._client.start()
        self._cpu = 0.0

    def answers(self, prompts: Sequence[list[int]], length: int) -> Served:
        """Greedy answers of exactly that many tokens to all prompts at once."""
        wishes = {"max_tokens": length, "temperature": 0, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        self._pipe.send(
            [json.dumps({"prompt": each, **wishes, **stream}).encode() for each in prompts]
        )
        return Served(self._pipe.recv())

    def cpu_seconds(self) -> float:
        """What the server's own process has computed since the last call, its engine's not."""
        tasks = Path(f"/proc/{self._server.pid}/task").glob("*/schedstat")
        before, self._cpu = self._cpu, sum(int(t.read_text().split()[0]) for t in tasks) / 1e9
        return self._cpu - before

    def close(self) -> None:
        self._pipe.send([])
        self._client.join(ENDING_SECONDS)
        self._server.terminate()
        self._server.join(ENDING_SECONDS)
        for process in (self._client, self._server):
            process.kill()
