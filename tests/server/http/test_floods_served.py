"""``paceline serve`` under clients without a key that send a part of a request without end."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.children import HAS_PROC
from tests.programs import module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HAS_PROC, reason="memory of processes is read in /proc"),
]
watch = module("server_process")
MEGABYTE = 1 << 20
SENT = 50 * MEGABYTE
MOST_GROWTH = 20 * MEGABYTE
PART = 1 * MEGABYTE
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "headers": (HEAD, b"a: b\r\n", {431}),
    "one header": (HEAD + b"a: ", b"b" * 64, {431}),
    "a header's name": (HEAD, b"a" * 64, {431}),
    "a request line": (b"GET /", b"a" * 64, {414}),
    "a query": (b"GET /?", b"a=b&", {414}),
    "a method": (b"", b"GET", {400}),
    "blank lines": (b"", b"\r\n", {400}),
    "a chunk's extensions": (CHUNKED + b"1;", b"x=y;", {400, 401}),
    "a chunk's size": (CHUNKED, b"0" * 64, {400, 401}),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n", {401, 431}),
    "a body": (CHUNKED, b"400\r\n" + b" " * 1024 + b"\r\n", {401}),
    "requests": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", {200}),
}
"""What comes first, what comes again and again, and the answer's status. That the key is missing is
known once a head is complete; what comes together with the head may be refused before."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    options = ("--threads", "1", "--max-model-len", "512", "--kv-cache-memory", "32M")
    found = watch.ServerProcess(*options, "--api-key", "a key")
    try:
        yield found
    finally:
        found.kill()


def memory(server: Any, name: str) -> int:
    """Bytes of the process that speaks HTTP, as ``/proc`` names them."""
    text = Path(f"/proc/{server.pids[watch.HTTP]}/status").read_text()
    found = re.search(rf"^{name}:\s*(\d+) kB", text, re.M)
    assert found is not None
    return int(found[1]) * 1024


def forget_peak(server: Any) -> None:
    Path(f"/proc/{server.pids[watch.HTTP]}/clear_refs").write_text("5")


def is_healthy(server: Any) -> bool:
    answer = httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=30)
    return answer.status_code == 200


def flood(server: Any, first: bytes, again: bytes) -> bytes:
    """Send until there is enough or the server has closed the connection; what it answered."""
    part = again * (PART // len(again))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(2)  # a server that does not read on is one that keeps nothing more
        with suppress(ConnectionError, TimeoutError):
            client.sendall(first)
            for count in itertools.count(1):
                client.sendall(part)
                if count % 8 == 0:
                    assert is_healthy(server)
                if count * PART >= SENT:
                    break
        assert is_healthy(server)
        with suppress(ConnectionError, TimeoutError):
            return client.recv(1 << 16)
    return b""


@pytest.mark.parametrize("kind", FLOODS)
def test_a_part_without_end_takes_no_memory(server: Any, kind: str) -> None:
    first, again, statuses = FLOODS[kind]
    assert is_healthy(server)
    forget_peak(server)
    before = memory(server, "VmRSS")
    answer = flood(server, first, again)
    assert memory(server, "VmHWM") - before < MOST_GROWTH
    # A connection that is reset may have lost the answer on its way.
    assert not answer or int(answer.split()[1]) in statuses
