"""Requests that a careless or hostile client sends; a seed and a number name a case.

Owns bodies that are right, and what is done to them. Knows neither sockets nor servers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from paceline.core.checks import seconds_of
from paceline.core.errors import ConfigError
from tests.server.fuzz.adapters import BASES, OTHER_FIELDS
from tests.server.fuzz.fields import FIELDS
from tests.server.fuzz.requests import (
    CHAT,
    COMPLETIONS,
    Case,
    hardly_http,
    large,
    wrong_header,
    wrong_route,
)
from tests.server.fuzz.values import NAME, Raw, anything, document, nest


def cases(seed: int, count: int, first: int = 0) -> Iterator[Case]:
    """The cases of a seed from the ``first`` on, up to ``count``."""
    weights = [weight for _, weight in _KINDS]
    for number in range(first, count):
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


_BASES: dict[str, tuple[int, Callable[[Random], dict[str, Any]]]] = {
    COMPLETIONS: (10, completion),
    CHAT: (10, chat),
    "/tokenize": (2, _tokenize),
    "/detokenize": (1, _detokenize),
    **BASES,
}


_FIELDS = FIELDS | OTHER_FIELDS


def _base(rng: Random) -> tuple[str, dict[str, Any]]:
    path = rng.choices(list(_BASES), [weight for weight, _ in _BASES.values()])[0]
    return path, _BASES[path][1](rng)


# --- what is done to them -------------------------------------------------------------------------


def _right(rng: Random) -> Case:
    path, body = _base(rng)
    return Case("right", path, document(body).encode(), statuses=frozenset({200}))


def _field(rng: Random) -> Case:
    """One field with a value that somebody made up for it, or with any other."""
    path, body = _base(rng)
    known = _FIELDS[path]
    name = rng.choice(list(known))
    value = known[name](rng) if rng.random() < 0.6 else anything(rng)
    if name == "keep_alive" and _lets_go(value):
        value = "5m"
    # Errors of adapters speak of the fields that what they ask for has.
    is_named = path in FIELDS and not (isinstance(value, Raw) and not _is_json(value.text))
    named = name if is_named else ""
    return Case(f"field {name}", path, document(body | {name: value}).encode(), field=named)


def _lets_go(keep_alive: Any) -> bool:
    """Whether the model may be unloaded meanwhile: another engine would hide what this one leaks,
    and its memory, which is small at first, would look like a leak.
    """
    try:
        return seconds_of(keep_alive) < 60.0
    except ConfigError:
        return False


def _fields(rng: Random) -> Case:
    path, body = _base(rng)
    known = _FIELDS[path]
    for name in rng.sample(list(known), min(4, len(known))):
        body[name] = known[name](rng)
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
    data = document(body).encode()
    if path not in FIELDS:  # some ignore what they do not know
        return Case("unknown", path, data)
    return Case("unknown", path, data, field=name[:20], statuses=frozenset({400}))


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


def _headers(rng: Random) -> Case:
    path, body = _base(rng)
    return wrong_header(rng, path, document(body).encode())


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
    (wrong_route, 5),
    (large, 1),
    (hardly_http, 2),
)
