"""Trace ids from the header to the log line."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from paceline.server.http.tracing import (
    TraceMiddleware,
    install_trace_logging,
    parse_traceparent,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (PARENT, TRACE),
        (f" {PARENT} ", TRACE),
        (f"01-{TRACE}-00f067aa0ba902b7-01-more", TRACE),
        ("", ""),
        (TRACE, ""),
        (PARENT.upper(), ""),
        (f"ff{PARENT[2:]}", ""),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"{PARENT}\nforged log line", ""),
    ],
)
def test_only_well_formed_headers_have_a_trace(header: str, expected: str) -> None:
    assert parse_traceparent(header) == expected


@pytest.fixture
def lines():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    install_trace_logging(logging.INFO, stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lines_of_a_request_carry_its_trace(lines: io.StringIO) -> None:
    log = logging.getLogger("paceline.test")

    async def app(scope, receive, send) -> None:
        log.info("begins")
        await asyncio.sleep(0)
        log.info("ends")

    async def main() -> None:
        served = TraceMiddleware(app)
        headers = [(b"host", b"x"), (b"traceparent", PARENT.encode())]
        traced_scope = {"type": "http", "headers": headers}
        plain = {"type": "http", "headers": []}
        await asyncio.gather(
            served(traced_scope, None, None),
            served(plain, None, None),
            served({"type": "other"}, None, None),
        )
        log.info("idle")

    asyncio.run(main())
    told = lines.getvalue().splitlines()
    assert len(told) == 7
    assert sum(line.endswith(f"begins trace_id={TRACE}") for line in told) == 1
    assert sum(line.endswith(f"ends trace_id={TRACE}") for line in told) == 1
    assert sum("trace_id" in line for line in told) == 2


def test_a_line_may_bring_a_trace_of_its_own(lines: io.StringIO) -> None:
    logging.getLogger("paceline.test").info("own", extra={"trace_id": "mine"})
    assert lines.getvalue().endswith("own trace_id=mine\n")
