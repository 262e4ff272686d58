"""The files of the page over HTTP: policy, size, entity tags, compression."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from paceline.server.page import page_router, read_assets
from tests.server.page.page_server import OpenPage

MAX_OWN_BYTES = 120_000
MAX_PACKED_BYTES = 400_000
WEB = Path(__file__).resolve().parents[3] / "web"


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app, "http://localhost")


def test_page_comes_with_a_strict_policy(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "trusted-types 'none'" in policy
    assert "unsafe" not in policy


def test_page_asks_nobody_else_for_anything() -> None:
    for name, asset in read_assets().items():
        text = asset.content.decode().replace("http://www.w3.org/", "")
        assert not re.search(r"\beval\(|new Function|fetch\(\"|\.src=\"|@import", text), name
        if name.startswith("vendor/"):
            continue
        assert not re.search(r"""(https?:)?//\w+\.\w+|url\(""", text), name
        assert not re.search(r"innerHTML|insertAdjacentHTML|eval\(|\son\w+=|style=\"", text), name


def test_every_file_that_the_page_names_is_served(client: TestClient) -> None:
    page = client.get("/").text
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page))
    scripts = [
        text
        for name in read_assets()
        if name.endswith(".js")
        for text in [client.get(f"/page/{name}").text]
    ]
    imports = r"""(?:from |import\()"\./([^"]+)\""""
    named |= {f"page/{name}" for text in scripts for name in re.findall(imports, text)}
    assert {f"page/{name}" for name in read_assets()} - named == {"page/index.html"}
    for name in named:
        assert client.get(f"/{name}").status_code == 200, name


def test_page_is_small() -> None:
    assets = read_assets()
    own = [asset for name, asset in assets.items() if not name.startswith("vendor/")]
    assert sum(len(asset.content) for asset in own) < MAX_OWN_BYTES
    assert sum(len(asset.packed) for asset in assets.values()) < MAX_PACKED_BYTES


def test_libraries_have_their_licences_and_the_versions_that_are_pinned() -> None:
    """A bundle built from other versions than ``web/package.json`` names is stale."""
    licences = (files("paceline.server.page") / "vendor" / "LICENSES.txt").read_text()
    pinned = json.loads((WEB / "package.json").read_text())["dependencies"]
    assert all(f"{name} {version} (" in licences for name, version in pinned.items())
    assert re.findall(r"[~^*]", " ".join(pinned.values())) == []


@pytest.mark.parametrize("path", ["/", "/page/chat.js"])
def test_unchanged_file_is_not_sent_again(client: TestClient, path: str) -> None:
    first = client.get(path)
    again = client.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get(path, headers={"If-None-Match": 'W/"other"'}).status_code == 200


def test_file_is_compressed_for_those_who_can(client: TestClient) -> None:
    packed = client.get("/page/page.css", headers={"Accept-Encoding": "gzip"})
    plain = client.get("/page/page.css", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.text == plain.text
    assert int(packed.headers["content-length"]) < len(plain.content) / 2


@pytest.mark.parametrize("name", ["absent.js", "__init__.py", "..%2f__init__.py"])
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_it_opens_in_a_browser(visit: OpenPage) -> None:
    """Without complaints; what it does there is tested by the slow tests."""
    page = visit().page
    assert page.one("#tab-live").is_displayed()
    assert page.complaints() == []
