"""Requests that a careless or hostile client sends, and which answers to each are right.

Owns what is generated; a seed and a number name a case. Knows neither sockets nor servers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.server.fuzz_fields import FIELDS
from tests.server.fuzz_values import NAME, Raw, anything, document, nest, text

KEY = "fuzz-key"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
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
    statuses: frozenset[int] = field(default=BODY)
    raw: bytes = b""


def cases(seed: int, count: int) -> Iterator[Case]:
    """The first cases of a seed."""
    weights = [weight for _, weight in _KINDS]
    for number in range(count):
        rng = Random(f"{seed}/{number}")
        make = rng.choices([make for make, _ in _KINDS], weights)[0]
        yield make(rng)


# --- bodies that are right ------------------------------------------------------------------------


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def completion(rng: Random) -> dict[str, Any]:
    prompt = rng.choice(["Once", [5, 6, 7], ["One", "Two"], [[5], [6, 7]], "Ünïcödé \U0001f600"])
    return {"model": NAME, "prompt": prompt, "max_tokens": rng.randrange(1, 6)} | _options(rng)


def chat(rng: Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How is it?"}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    body: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": rng.randrange(1, 6)}
    if rng.random() < 0.2:
        body["tools"] = [_tool("add"), _tool("sub")]
    return body | _options(rng)


def _options(rng: Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    usual = {
        "temperature": rng.choice([0, 0.7, 2]),
        "top_p": 0.9,
        "seed": 3,
        "stop": ["\n"],
        "n": 2,
        "stream": True,
        "logit_bias": {"7": -5},
        "presence_penalty": 0.5,
        "return_origins": True,
        "include_metrics": True,
        "speculative": {"enabled": False},
    }
    for name, value in usual.items():
        if rng.random() < 0.15:
            found[name] = value
    return found


def _tokenize(rng: Random) -> dict[str, Any]:
    return rng.choice([{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}])


def _detokenize(_: Random) -> dict[str, Any]:
    return {"tokens": [5, 6, 7]}


_BASES: dict[str, Callable[[Random], dict[str, Any]]] = {
    COMPLETIONS: completion,
    CHAT: chat,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}


def _base(rng: Random) -> tuple[str, dict[str, Any]]:
    path = rng.choices(list(_BASES), [10, 10, 2, 1])[0]
    return path, _BASES[path](rng)


# --- what is done to them -------------------------------------------------------------------------


def _right(rng: Random) -> Case:
    path, body = _base(rng)
    return Case("right", path, document(body).encode(), statuses=frozenset({200}))


def _field(rng: Random) -> Case:
    """One field with a value that somebody made up for it, or with any other."""
    path, body = _base(rng)
    known = FIELDS[path]
    name = rng.choice(list(known))
    value = known[name](rng) if rng.random() < 0.6 else anything(rng)
    named = "" if isinstance(value, Raw) and not _is_json(value) else name
    return Case(f"field {name}", path, document(body | {name: value}).encode(), field=named)


def _fields(rng: Random) -> Case:
    path, body = _base(rng)
    for name in rng.sample(list(FIELDS[path]), min(4, len(FIELDS[path]))):
        body[name] = FIELDS[path][name](rng)
    return Case("several fields", path, document(body).encode())


def _inside(rng: Random) -> Case:
    """A value somewhere inside replaced, or a key there that nobody knows."""
    path, body = _base(rng)
    body = copy.deepcopy(body)
    places = [place for place in _containers(body) if place]
    place = rng.choice(places)
    key: Any = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if isinstance(place, dict) and rng.random() < 0.4:
        key = rng.choice(["unknown", "", "__class__", "é", "$ref", "type"])
    place[key] = anything(rng)
    return Case("inside", path, document(body).encode())


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each)


def _missing(rng: Random) -> Case:
    path, body = _base(rng)
    name = rng.choice(list(body))
    del body[name]
    return Case("missing", path, document(body).encode())


def _unknown(rng: Random) -> Case:
    path, body = _base(rng)
    name = rng.choice(["best_off", "Temperature", "prompt ", "_", "x" * 300, "naïve", "json"])
    body[name] = rng.choice([None, 1, "a", [], {}])
    statuses = frozenset({400})
    return Case("unknown", path, document(body).encode(), field=name[:20], statuses=statuses)


def _damaged(rng: Random) -> Case:
    """Bytes that were JSON once."""
    path, body = _base(rng)
    data = document(body).encode()
    at = rng.randrange(len(data))
    data = rng.choice(
        [
            data[:at],
            data[:at] + rng.randbytes(rng.randrange(1, 4)) + data[at + 1 :],
            data[:at] + b"\xff\xfe" + data[at:],
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
            data + data,
            data[:-1] + b',"n":1,"n":2}',
            data[:-1] + b",}",
            b"[" + data + b"]",
            document(anything(rng)).encode("utf-8", "surrogatepass"),
            document(nest(rng)).encode(),
            b"",
            b"null",
            rng.randbytes(200),
            b'{"prompt":' + b'"a",' * 1000,
        ]
    )
    return Case("damaged", path, data)


_WRONG_HEADERS: tuple[tuple[str, str, frozenset[int]], ...] = (
    ("content-type", "text/plain", frozenset({415})),
    ("content-type", "", frozenset({415})),
    ("content-type", "application/json; charset=utf-16", BODY),
    ("content-type", "multipart/form-data; boundary=x", frozenset({415})),
    ("content-type", "application/x-www-form-urlencoded", frozenset({415})),
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


def _headers(rng: Random) -> Case:
    path, body = _base(rng)
    name, value, statuses = rng.choice(_WRONG_HEADERS)
    kept = tuple(header for header in JSON_HEADERS if header[0] != name)
    headers = (*kept, (name, value))
    return Case(f"header {name[:20]}", path, document(body).encode(), "POST", headers, "", statuses)


def _route(rng: Random) -> Case:
    """Paths and methods that do not go together."""
    known = (*_BASES, "/v1/models", "/health", "/stats", "/metrics", "/version", "/openapi.json")
    other = ("/", "/v2", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/..%2f..%2fetc", "//")
    other += ("/page/../../config.py", "/page/%2e%2e/app.py", "/v1/completions/", "/%", "/?" * 50)
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"])
    path = rng.choice(known + other) + rng.choice(["", "", "?a=%ff&b[]=1", "?" + "x" * 3000])
    body = rng.choice([b"", b"{}", b"[1]", document(text(rng)).encode("utf-8", "surrogatepass")])
    statuses = frozenset({200, 307, 400, 404, 405, 422})
    return Case(f"{method} {path[:30]}", path, body, method, statuses=statuses - {422})


def _large(rng: Random) -> Case:
    """Bodies about as large as is allowed, and larger."""
    size = rng.choice([MAX_BODY_BYTES - 100, MAX_BODY_BYTES + 1, 2 * MAX_BODY_BYTES])
    fills: list[Callable[[], str]] = [
        lambda: '{"prompt":"' + "a" * (size - 13) + '"}',
        lambda: '{"prompt":[' + "1," * ((size - 14) // 2) + "1]}",
        lambda: '{"prompt":[' + '"a",' * ((size - 16) // 4) + '"a"]}',
        lambda: '{"prompt":["' + '","'.join(["a " * 300] * (size // 640)) + '"]}',
        lambda: '{"prompt":"a","logit_bias":{'
        + ",".join(f'"{i}":1' for i in range(size // 11))
        + "}}",
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


def _wire(rng: Random) -> Case:
    """What is hardly HTTP; an answer may also be none."""
    statuses = frozenset({0, 200, 400, 401, 404, 413, 415, 431})
    return Case("wire", raw=rng.choice(_RAW), statuses=statuses)


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


_KINDS: tuple[tuple[Callable[[Random], Case], float], ...] = (
    (_right, 6),
    (_field, 42),
    (_fields, 8),
    (_inside, 14),
    (_missing, 3),
    (_unknown, 3),
    (_damaged, 10),
    (_headers, 6),
    (_route, 5),
    (_large, 1),
    (_wire, 2),
)
