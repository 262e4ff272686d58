"""Requests, and what can be wrong with them besides the meaning of their bodies.

Owns headers, routes, sizes and bytes that are hardly HTTP. Knows neither sockets nor servers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.server.fuzz.values import document, text

KEY = "fuzz-key"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CURLS = "application/x-www-form-urlencoded"
JSON_HEADERS = (("authorization", f"Bearer {KEY}"), ("content-type", "application/json"))
BODY = frozenset({200, 400, 404, 413})
"""What a body of the right type may be answered with."""
MAX_BODY_BYTES = 1 << 20
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        name: what was done to it.
        field: of the body, which an error must name; empty where it need not.
        statuses: that are right.
        raw: sent as it is instead of the rest.
    """

    name: str
    path: str = COMPLETIONS
    body: bytes = b""
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = JSON_HEADERS
    field: str = ""
    statuses: frozenset[int] = BODY
    raw: bytes = b""


# --- what is wrong with them ----------------------------------------------------------------------

_WRONG_HEADERS: tuple[tuple[str, str, frozenset[int]], ...] = (
    ("content-type", "text/plain", frozenset({415})),
    ("content-type", "", BODY),
    ("content-type", "application/json; charset=utf-16", BODY),
    ("content-type", "multipart/form-data; boundary=x", frozenset({415})),
    ("content-type", CURLS, BODY),
    ("content-encoding", "gzip", BODY | {415}),
    ("content-encoding", "nonsense", BODY | {415}),
    ("authorization", "", frozenset({401})),
    ("authorization", "Bearer", frozenset({401})),
    ("authorization", "Bearer wrong", frozenset({401})),
    ("authorization", f"Bearer {KEY}x", frozenset({401})),
    ("authorization", "Basic !!!", frozenset({401})),
    ("authorization", "Basic Zjo=", frozenset({401})),
    ("authorization", "Bearer \xe9\xff", frozenset({401})),
    ("authorization", "Digest " + "x" * 3000, frozenset({401})),
    ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", BODY),
    ("traceparent", "\xff" * 100, BODY),
    ("traceparent", "00-" + "g" * 32 + "-1-1\t", BODY),
    ("accept", "application/xml", BODY),
    ("accept-encoding", "br;q=1e400", BODY),
    ("expect", "200-ok", BODY),
    ("x-paceline-page", "\xe9", BODY),
    ("x" * 2000, "y" * 20_000, BODY),
    ("origin", "null", BODY),
    ("range", "bytes=0-18446744073709551616", BODY),
    ("transfer-encoding", "identity", BODY),
    ("host", "evil.example", BODY),
)


def wrong_header(rng: Random, path: str, body: bytes) -> Case:
    name, value, statuses = rng.choice(_WRONG_HEADERS)
    kept = tuple(header for header in JSON_HEADERS if header[0] != name)
    headers = (*kept, (name, value))
    return Case(f"header {name[:20]}", path, body, "POST", headers, "", statuses)


def wrong_route(rng: Random) -> Case:
    """Paths and methods that do not go together."""
    known = (
        COMPLETIONS,
        CHAT,
        "/tokenize",
        "/v1/models",
        *("/health", "/readyz", "/livez"),
        "/stats",
        "/metrics",
        "/version",
        "/openapi.json",
        *("/v1/models/fuzz", "/v1/responses", "/v1/responses/resp_1", "/v1/embeddings"),
        *("/v1/responses/resp_1/cancel", "/v1/responses/compact", "/v1/responses/input_tokens"),
        *("/v1/responses/resp_1/input_items", "/v1/messages", "/v1/messages/count_tokens"),
        *("/api/tags", "/api/ps", "/api/version", "/api/show", "/api/chat", "/api/generate"),
        *(
            "/api/embed",
            "/props",
            "/infill",
            "/completion",
            "/tokenizer_info",
            "/apply-template",
            "/ping",
        ),
        *("/props?model=other", "/stats?model=%00", "/flush_prefix_cache", "/api/pull"),
    )
    other = ("/", "/v2", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/..%2f..%2fetc", "//")
    other += ("/page/../../config.py", "/page/%2e%2e/app.py", "/v1/completions/", "/%", "/?" * 50)
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"])
    path = rng.choice(known + other) + rng.choice(["", "", "?a=%ff&b[]=1", "?" + "x" * 3000])
    body = rng.choice([b"", b"{}", b"[1]", document(text(rng)).encode("utf-8", "surrogatepass")])
    statuses = frozenset({200, 307, 400, 404, 405})
    return Case(f"{method} {path[:30]}", path, body, method, statuses=statuses)


def large(rng: Random) -> Case:
    """Bodies about as large as is allowed, and larger."""
    size = rng.choice([MAX_BODY_BYTES - 100, MAX_BODY_BYTES + 1, 2 * MAX_BODY_BYTES])
    fills: list[Callable[[], str]] = [
        lambda: '{"prompt":"' + "a" * (size - 13) + '"}',
        lambda: '{"prompt":[' + "1," * ((size - 14) // 2) + "1]}",
        lambda: '{"prompt":[' + '"a",' * ((size - 16) // 4) + '"a"]}',
        lambda: '{"prompt":["' + '","'.join(["a " * 300] * (size // 640)) + '"]}',
        lambda: (
            '{"prompt":"a","logit_bias":{' + ",".join(f'"{i}":1' for i in range(size // 11)) + "}}"
        ),
        lambda: '{"prompt":"a","prompt":' * (size // 23),
        lambda: " " * (size - 20) + '{"prompt":"a"}',
        lambda: '{"prompt":"a","user":"' + r"\u0041" * ((size - 40) // 6) + '"}',
    ]
    return Case("large", COMPLETIONS, rng.choice(fills)().encode())


_RAW = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1e3\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}",
    b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\na: b\x00c\r\n\r\n",
    b"GET  /health  HTTP/1.1\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def hardly_http(rng: Random) -> Case:
    """What is hardly HTTP; an answer may also be none."""
    statuses = frozenset({0, 200, 400, 401, 404, 413, 414, 415, 431})
    return Case("wire", raw=rng.choice(_RAW), statuses=statuses)
