"""The id of a request, a client's own or one that it gets, and trace ids down to the log line."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from paceline.server.http.tracing import TraceMiddleware, install_trace_logging, parse_traceparent
from tests.server.asgi import application, call
from tests.server.fakes import FakeEngine

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


PATH = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize("name", ["a", "req_123", "A.b:c/d+e=f@g-h", "x" * 128])
@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_id_comes_back(name: str, stream: bool) -> None:
    body = {**BODY, "stream": stream}
    response = call(application(), "POST", PATH, json=body, headers={"x-request-id": name})
    assert response.headers["x-request-id"] == name


@pytest.mark.parametrize("name", [None, "", "x" * 129, "a b", "a\u00e9", "a\tb", "<script>", 'a"b'])
def test_any_other_request_gets_one_of_its_own(name: str | None) -> None:
    app = application()
    headers = {} if name is None else {"x-request-id": name.encode("latin-1")}
    answers = [call(app, "POST", PATH, json=BODY, headers=headers) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(each.startswith("req_") for each in ids)


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 401), ("/nowhere", 401), ("/health", 200)]
)
def test_refusals_have_one_too(path: str, status: int) -> None:
    app = application(api_keys=("key",))
    response = call(app, "GET", path, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


def test_an_unexpected_failure_is_found_in_the_log_by_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = application(FakeEngine(error_at=(2, ValueError("a secret"))))
    headers = {"x-request-id": "mine"}
    response = call(app, "POST", PATH, json=BODY | {"max_tokens": 9}, headers=headers)
    assert response.status_code == 500
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert "request mine failed unexpectedly" in caplog.text
