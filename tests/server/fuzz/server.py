"""A server as it is fuzzed: requests over a socket, and whether it is well afterwards.

Owns the connection and what is seen of the server's processes. Judges no answer.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.server.fuzz.judge import Answer
from tests.server.fuzz.requests import COMPLETIONS, CONTEXT, KEY, Case
from tests.server.fuzz.values import document

GIVE_UP_SECONDS = 60.0
CACHED_WORDS = 12_000
"""More than the cache of the tokenizers package holds, which is 10,000."""

Address = tuple[str, int]


def wire(case: Case) -> bytes:
    """The request as it goes over the connection."""
    if case.raw:
        return case.raw
    headers = dict(case.headers)
    headers.setdefault("host", "fuzz")
    headers |= {"content-length": str(len(case.body)), "connection": "close"}
    lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + case.body


def send(address: Address, case: Case) -> tuple[Answer, float]:
    """The answer, and the seconds until all of it was there."""
    data, began = wire(case), time.perf_counter()
    with socket.create_connection(address, timeout=GIVE_UP_SECONDS) as connection:
        # A server may refuse, and close, before it has read everything.
        with suppress(ConnectionError):
            connection.sendall(data)
            if case.raw:
                connection.shutdown(socket.SHUT_WR)
        answer = _read(connection, case.method)
    return answer, time.perf_counter() - began


def _read(connection: socket.socket, method: str) -> Answer:
    response = http.client.HTTPResponse(connection, method=method)
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ConnectionError):
        return Answer(0)
    finally:
        response.close()
    return Answer(response.status, response.headers.get("content-type", ""), body)


# --- the server around them -----------------------------------------------------------------------


def get(address: Address, path: str) -> Any:
    headers = (("authorization", f"Bearer {KEY}"),)
    answer, _ = send(address, Case("", path, method="GET", headers=headers))
    return answer.status, json.loads(answer.body)


def memory_of(pid: int) -> dict[str, int]:
    """Resident kilobytes of a process and of those that it started, by name.

    Without pages of files, which come and go as the system likes.
    """
    return {"server" if pid_ == pid else name: size for pid_, name, size in _family(pid)}


def files_of(pid: int) -> dict[str, int]:
    """Open files of the same processes."""
    return {
        "server" if pid_ == pid else name: sum(1 for _ in Path(f"/proc/{pid_}/fd").iterdir())
        for pid_, name, _ in _family(pid)
    }


def _family(pid: int) -> list[tuple[int, str, int]]:
    """A process and all that descend from it: id, name, resident kilobytes."""
    every, known = _processes(), {pid}
    while more := {each[0] for each in every if each[1] in known} - known:
        known |= more
    return [(own, name, size) for own, _, name, size in every if own in known]


def _processes() -> list[tuple[int, int, str, int]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, KeyError, ValueError):
            lines = (folder / "status").read_text().splitlines()
            values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            size = int(values["RssAnon"].split()[0])
            found.append((int(values["Pid"]), int(values["PPid"]), values["Name"], size))
    return found


def problems_of_health(address: Address) -> Iterator[str]:
    """Whether the server answers, and its engine is idle, the one it began with, and empty."""
    status, _ = get(address, "/health")
    if status != 200:
        yield f"/health answers {status}"
    _, stats = get(address, "/stats")
    expected = {"running": 0, "waiting": 0, "restarts": 0}
    found = {name: stats[name] for name in expected}
    if found != expected:
        yield f"/stats tells {found}"
    flush = Case("", "/flush_prefix_cache", headers=(("authorization", f"Bearer {KEY}"),))
    send(address, flush)
    _, stats = get(address, "/stats")
    if stats["kv"]["used"]:
        yield f"{stats['kv']['used']} KV blocks are used in the end"


def warm_up(address: Address) -> None:
    """Use what fills once and stays: every KV block, since the memory of a pool becomes resident
    when it is written; the tokenizer's cache of words, which takes so many and then no more; and a
    grammar, whose helper's pipes stay open.
    """
    for first in range(0, CACHED_WORDS, 500):
        words = " ".join(f"{number:x}{number:o}" for number in range(first, first + 500))
        answer, _ = send(address, Case("", "/tokenize", document({"prompt": words}).encode()))
        assert answer.status == 200, answer.body
    for first in range(128):
        ids = [5 + (first + 31 * i) % 4000 for i in range(CONTEXT - 2)]
        body = document({"prompt": ids, "max_tokens": 1}).encode()
        answer, _ = send(address, Case("", COMPLETIONS, body))
        assert answer.status == 200, answer.body
    shaped = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": {"type": "object"}}}
    answer, _ = send(address, Case("", COMPLETIONS, document(shaped).encode()))
    assert answer.status == 200, answer.body


class Stalled:
    """Connections whose bodies never arrive."""

    HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    BEGINNINGS = (
        b"content-length: 50\r\n\r\n{",
        b"transfer-encoding: chunked\r\n\r\n5\r\n{",
        b"transfer-encoding: chunked\r\n\r\n",
        b"content-length: 50\r\n",
    )

    def __init__(self, address: Address, count: int) -> None:
        self._open = []
        for i in range(count):
            connection = socket.create_connection(address, timeout=GIVE_UP_SECONDS)
            begin = self.HEAD + b"authorization: Bearer " + KEY.encode() + b"\r\n"
            connection.sendall(begin + self.BEGINNINGS[i % len(self.BEGINNINGS)])
            self._open.append((i, connection))

    def problems(self) -> Iterator[str]:
        """Those whose headers were complete have been told 408; the others wait for theirs."""
        for i, connection in self._open:
            if i % len(self.BEGINNINGS) < 3:
                answer = _read(connection, "POST")
                if answer.status != 408:
                    yield f"a stalled body is answered with {answer.status}"
            connection.close()


def scheduled(pid: int) -> tuple[int, int]:
    """Nanoseconds that the threads of a server's processes ran, and waited for a processor."""
    ran = waited = 0
    for process, _, _ in _family(pid):
        for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(OSError):
                times = file.read_text().split()
                ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran, waited
