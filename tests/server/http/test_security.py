"""Keys, limits on bodies, other origins, whose caches are shared, and the names of a server."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from typing import Any

import httpx
import pytest

from paceline.core.errors import ConfigError
from paceline.server.http.config import ServerConfig
from paceline.server.http.errors import ApiError
from paceline.server.http.security import Hosts
from tests.server.asgi import RawCall, application, call, client_of, complete, engine_of, refused

PATH = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 1}
KEYS = ("first-key", "second-key")


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer first-ke", 401),
        ("Bearer first-key2", 401),
        ("first-key", 401),
        ("Basic first-key", 401),
        (basic("first-key"), 401),
        ("Bearer \u00e9", 401),
        ("Bearer first-key", 200),
        ("bearer second-key", 200),
    ],
)
def test_a_key_is_needed_where_one_is_set(authorization: str | None, status: int) -> None:
    app = application(api_keys=KEYS)
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    response = call(app, "POST", PATH, json=BODY, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert engine_of(app).calls == []


@pytest.mark.parametrize("path", ["/metrics", "/stats", "/v1/models", "/version", "/openapi.json"])
def test_everything_but_health_is_behind_the_key(path: str) -> None:
    app = application(api_keys=KEYS)
    assert call(app, "GET", path).status_code == 401
    assert call(app, "GET", path, headers={"authorization": "Bearer first-key"}).is_success
    assert call(app, "GET", "/health").status_code == 200


def test_a_browser_asks_for_the_key_of_the_page() -> None:
    app = application(api_keys=KEYS)
    asked = call(app, "GET", "/")
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"].startswith("Basic ")
    allowed = {"authorization": basic("first-key")}
    assert call(app, "GET", "/", headers=allowed).is_success
    # What the browser adds by itself counts only where the page added a header too.
    assert call(app, "GET", "/stats", headers=allowed).status_code == 401
    assert call(app, "GET", "/stats", headers={**allowed, "x-paceline-page": "1"}).is_success


def test_caches_are_shared_by_callers_with_the_same_key_and_salt() -> None:
    app = application(api_keys=KEYS)
    for key, salt in [(KEYS[0], None), (KEYS[0], "s"), (KEYS[1], None), (KEYS[0], None)]:
        body = {**BODY, "cache_salt": salt}
        call(app, "POST", PATH, json=body, headers={"authorization": f"Bearer {key}"})
    one, salted, other, again = (made.cache_salt for made in engine_of(app).calls)
    assert len({one, salted, other}) == 3
    assert one == again
    assert KEYS[0] not in one
    plain = application()
    complete(plain)
    assert engine_of(plain).calls[0].cache_salt == ""


def test_a_large_body_is_refused_by_its_length_or_while_it_is_read() -> None:
    app = application(max_body_bytes=100)
    assert refused(app, PATH, {"prompt": "a" * 100}, 413)["code"] == "body_too_large"

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 10

    headers = {"content-type": "application/json"}
    response = call(app, "POST", PATH, content=chunks(), headers=headers)
    assert response.status_code == 413
    assert "100 bytes" in response.json()["error"]["message"]
    assert call(app, "POST", PATH, headers={"content-length": "ten"}).status_code == 413


@pytest.mark.usefixtures("skipped_time")
def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(600)

    headers = {"content-type": "application/json"}
    app = application(receive_timeout=10)
    response = call(app, "POST", PATH, content=slow(), headers=headers)
    assert response.status_code == 408
    assert response.headers["connection"] == "close", "the rest of the body will not be read"


@pytest.mark.usefixtures("skipped_time")
def test_a_body_in_drops_has_no_more_time_than_another() -> None:
    sent = []

    async def drops() -> Any:
        for _ in range(50):
            sent.append(b" ")
            yield b" "
            await asyncio.sleep(2)

    headers = {"content-type": "application/json"}
    app = application(receive_timeout=10)
    assert call(app, "POST", PATH, content=drops(), headers=headers).status_code == 408
    assert len(sent) == 5


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost", 200),
        ("https://here.example", 200),
        ("https://there.example", 403),
        ("http://localhost.there.example", 403),
        ("null", 403),
    ],
)
@pytest.mark.parametrize("path", ["/flush_prefix_cache", "/reset_prefix_cache"])
def test_foreign_pages_cannot_empty_the_cache(path: str, origin: str | None, status: int) -> None:
    """A browser sends such a call for any page, without asking first."""
    app = application(allowed_origins=("https://here.example",))
    headers = {} if origin is None else {"origin": origin}
    assert call(app, "POST", path, headers=headers).status_code == status
    assert engine_of(app).num_flushes == (status == 200)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no valid JSON"),
        (b"{", "no valid JSON"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair is no character"),
        (b'{"prompt": "\\udc00\\ud800"}', "half of a surrogate pair is no character"),
        (b'{"prompt": "\\u12"}', "no valid JSON: invalid escape"),
        (b'{"prompt": NaN}', "no valid JSON"),
        (b'{"prompt": "\xff"}', "no valid JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "no valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "beyond what a double holds"),
        (b'{"prompt": "a", "logit_bias": {"1": [-1E+999]}}', "beyond what a double holds"),
        (b'{"prompt": "a", "top_p": ' + b"9" * 400 + b".5}", "beyond what a double holds"),
        (b'{"prompt": "a", "top_p": ' + b"9" * 299 + b"e20}", "beyond what a double holds"),
        (b'{"prompt": "a", "top_p": ' + b"9" * 220 + b".0e+89}", "beyond what a double holds"),
        (b'{"prompt": "' + b"1" * 400 + b' 1e999", "top_q": 1e307}', "unknown field 'top_q'"),
        (b'"text"', "it must be a JSON object"),
    ],
)
def test_what_is_no_json_is_a_400(raw: bytes, message: str) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    response = call(application(), "POST", PATH, content=raw, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_a_body_without_a_type_or_with_curls_is_json_unless_a_page_sends_it(
    kind: dict[str, str],
) -> None:
    app, content = application(), json.dumps(BODY).encode()
    assert call(app, "POST", PATH, content=content, headers=kind).status_code == 200
    response = call(app, "POST", PATH, content=b"prompt=a", headers=kind)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    page = kind | {"origin": "https://example.org"}
    assert call(app, "POST", PATH, content=content, headers=page).status_code == 415


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x"])
def test_a_body_of_another_type_is_refused(kind: str) -> None:
    content = json.dumps(BODY).encode()
    response = call(application(), "POST", PATH, content=content, headers={"content-type": kind})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def preflight(app: Any, origin: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    return call(app, "OPTIONS", PATH, headers=headers)


def test_pages_of_allowed_origins_may_send_what_client_libraries_send() -> None:
    app = application(allowed_origins=("https://here.example",))
    wanted = "authorization,content-type,x-stainless-os,x-stainless-retry-count,x-request-id"
    headers = {
        "origin": "https://here.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    response = call(app, "OPTIONS", PATH, headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-headers"] == wanted
    assert "access-control-allow-credentials" not in response.headers
    there = {**headers, "origin": "https://there.example"}
    assert call(app, "OPTIONS", PATH, headers=there).status_code == 400
    answer = call(app, "POST", PATH, json=BODY, headers={"origin": "https://here.example"})
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after"} <= set(exposed)


def test_other_origins_are_allowed_when_named() -> None:
    here, there = "https://here.example", "https://there.example"
    assert "access-control-allow-origin" not in preflight(application(), here).headers
    app = application(allowed_origins=(here,), api_keys=KEYS)
    assert preflight(app, here).headers["access-control-allow-origin"] == here
    assert preflight(app, there).status_code == 400
    answer = call(app, "POST", PATH, json=BODY, headers={"origin": here})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == here


def test_the_next_request_of_a_connection_starts_afresh() -> None:
    """A limit that was reached by one body says nothing about another."""
    app = application(max_body_bytes=100)

    async def calls() -> list[int]:
        async with client_of(app) as client:
            bodies = [{"prompt": "a" * 100}, BODY, {"prompt": "a" * 100}]
            return [(await client.post(PATH, json=body)).status_code for body in bodies]

    assert asyncio.run(calls()) == [413, 200, 413]


def test_other_protocols_pass_by() -> None:
    """An application is also asked to start and to end."""

    async def start() -> list[str]:
        sent: list[str] = []
        inbox = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

        async def receive() -> Any:
            return inbox.pop(0)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await application()({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(start()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port is 65536"),
        ({"max_queue": -1}, "max_queue"),
        ({"api_keys": ("",)}, "API key is empty"),
        ({"api_keys": ("k\u00e9y",)}, "ASCII"),
        ({"served_model_names": ("",)}, "model name is empty"),
        ({"allowed_hosts": ("https://a.example",)}, "allowed host is 'https://a.example'"),
        ({"allowed_hosts": ("a.example:80",)}, "without a port"),
        ({"metrics_prefix": "a-b"}, "metrics_prefix is 'a-b'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)


def test_raw_calls_are_requests() -> None:
    """The helper that other tests lean on."""

    async def one() -> RawCall:
        made = RawCall(application(), PATH, json.dumps(BODY).encode())
        await made.task
        return made

    made = asyncio.run(one())
    assert made.status == 200
    assert json.loads(made.text)["choices"]


HERE = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::", "192.168.1.5", "llm.example.org")
ADDRESSES = ("127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:80", "192.168.1.5:8000", "8.8.8.8")
LOCAL = (
    *("localhost", "localhost:8000", "LOCALHOST", "localhost."),
    *("llm.localhost", "llm.localhost:80", "host.docker.internal:8000", "llm.ns.Internal"),
)
PRIVATE = (socket.gethostname(), "paceline", "paceline:8000", "box.local", "llm.ns.svc")
FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example")
ODD = ("", ":80", "evil.example:80:localhost", "[evil.example]", "a@localhost.example")


def allows(given: str, host: str, *allowed: str) -> bool:
    hosts = Hosts(ServerConfig(host=host, allowed_hosts=allowed))
    try:
        hosts.check([given])
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("host", [*HERE, *EVERYWHERE])
def test_addresses_and_localhost_are_always_allowed(host: str) -> None:
    assert all(allows(given, host) for given in (*ADDRESSES, *LOCAL))


@pytest.mark.parametrize("host", [*HERE, *EVERYWHERE])
def test_names_of_the_web_are_not_unless_given(host: str) -> None:
    for given in FOREIGN:
        assert not allows(given, host)
        assert allows(given, host, "*")
    assert allows("evil.example:8000", host, "other.example", "Evil.Example")
    assert not allows("sub.evil.example", host, "evil.example")


@pytest.mark.parametrize("host", HERE)
@pytest.mark.parametrize("given", [*PRIVATE[1:], *ODD])
def test_for_this_machine_alone_no_other_names_are_needed(host: str, given: str) -> None:
    assert not allows(given, host)


@pytest.mark.parametrize("host", EVERYWHERE)
@pytest.mark.parametrize("given", PRIVATE)
def test_names_that_no_site_can_have_are_allowed_on_networks(host: str, given: str) -> None:
    assert allows(given, host)


def test_the_machines_full_name_is_allowed_on_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "Box.lab.example.org")
    assert allows("box.lab.example.org:8000", "0.0.0.0")
    assert not allows("box.lab.example.org:8000", "127.0.0.1")


@pytest.mark.parametrize("host", [*HERE, *EVERYWHERE])
def test_with_keys_every_name_is_allowed(host: str) -> None:
    hosts = Hosts(ServerConfig(host=host, api_keys=("secret",)))
    hosts.check([*FOREIGN, *PRIVATE, *ODD])


def test_a_rebound_page_has_no_key() -> None:
    headers = {"host": "evil.example", "origin": "http://evil.example"}
    app = application(api_keys=("secret",))
    assert call(app, "GET", "/stats", headers=headers).status_code == 401
    headers["authorization"] = "Bearer secret"
    assert call(app, "GET", "/stats", headers=headers).status_code == 200


def test_the_address_that_it_listens_on_may_be_a_name() -> None:
    assert allows("llm.example.org:8000", "llm.example.org")


def test_a_rebound_page_gets_nothing_but_health() -> None:
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    app = application()
    for method, path in [
        ("POST", "/flush_prefix_cache"),
        ("POST", "/v1/completions"),
        ("GET", "/stats"),
        ("GET", "/"),
    ]:
        answer = call(app, method, path, headers=headers)
        assert answer.status_code == 403, path
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert call(app, "GET", "/health", headers=headers).status_code == 200
    named = application(allowed_hosts=("evil.example",))
    assert call(named, "GET", "/stats", headers=headers).status_code == 200


def test_every_host_header_counts() -> None:
    headers = [("host", "localhost"), ("host", "evil.example")]
    assert call(application(), "GET", "/stats", headers=headers).status_code == 403
