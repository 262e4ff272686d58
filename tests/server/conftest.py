"""A browser, started once, and pages in it, for the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser import Page, open_browser
from tests.server.page_server import OpenPage, Script, Visit, make_app, serving


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture
def visit(browser: Any) -> Iterator[OpenPage]:
    """Opens the page of a fresh server with nothing remembered: ``visit(key=..., theme=...)``."""
    servers = []

    def open_page(*, theme: str = "light", width: int = 1280, **script: Any) -> Visit:
        made = Script(**script)
        server = serving(make_app(made))
        servers.append(server)
        url = server.__enter__()
        page = Page(browser)
        browser.get("about:blank")
        browser.get_log("browser")
        page.look(theme=theme, width=width)
        page.open(url)
        return Visit(page, made, url)

    yield open_page
    for server in servers:
        server.__exit__(None, None, None)
