"""Which hosts a server answers under, when it listens for this machine and for others."""

from __future__ import annotations

import socket

import pytest

from paceline.server.http.config import ServerConfig
from paceline.server.http.errors import ApiError
from paceline.server.http.security import Hosts
from tests.server.asgi import application, call

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
