"""``paceline serve`` under clients that ask for a lot and read nothing: the memory they cost."""

from __future__ import annotations

import json
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.server.engine_process.backlog import MOST_BYTES_OF_ANSWER, MOST_BYTES_OF_REQUEST
from tests.children import HAS_PROC
from tests.server.http.test_floods_served import forget_peak, is_healthy, memory, watch
from tests.server.served import chat_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_PROC, reason="memory of processes is read in /proc"),
]
NUM_REQUESTS, NUM_SAMPLES, NUM_TOKENS = 2, 128, 400
BESIDES = 40 << 20
"""Bytes of growth that are no answers: modules, buffers of sockets, the allocator's own."""
TIGHT = {"true": MOST_BYTES_OF_REQUEST, "false": MOST_BYTES_OF_ANSWER}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    options = ("--threads", "1", "--max-model-len", "512", "--kv-cache-memory", "512M")
    with tempfile.TemporaryDirectory() as folder:
        model = str(chat_model(Path(folder)))
        found = watch.ServerProcess(
            *options, "--max-num-seqs", "256", "--served-model-name", "m", "--", model
        )
        try:
            yield found
        finally:
            found.kill()


def head_and_body(stream: str) -> bytes:
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "n": NUM_SAMPLES,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 20,
            "stream": stream == "true",
        }
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    sizes = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + sizes + body


def num_ended(server: Any) -> float:
    """Requests that ended because too much of them waited."""
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=30).text
    found = re.search(r"^paceline:requests_dropped_total\{[^}]*\} (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("stream", TIGHT)
def test_answers_that_are_not_read_take_bounded_memory(server: Any, stream: str) -> None:
    assert is_healthy(server)
    forget_peak(server)
    before, ended = memory(server, "VmRSS"), num_ended(server)
    with ExitStack() as stack:
        for _ in range(NUM_REQUESTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(head_and_body(stream))
        while num_ended(server) < ended + NUM_REQUESTS:
            assert is_healthy(server)
        grown = memory(server, "VmHWM") - before
    assert grown < NUM_REQUESTS * TIGHT[stream] + BESIDES, f"{grown >> 20} MiB"
