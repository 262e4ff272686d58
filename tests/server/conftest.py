"""The one server that the tests of what users see through HTTP share, a browser, and two clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.server.http import sse
from tests.server.clocks import HeldClock, SkippedTime
from tests.server.page.browser import Page, open_browser
from tests.server.page.page_server import OpenPage, Script, Visit, make_app, serving
from tests.server.served import chat_model, served


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def served_url(served_model: Path) -> Iterator[str]:
    with served(served_model) as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture
def visit(browser: Any) -> Iterator[OpenPage]:
    """Opens the page of a fresh server with nothing remembered: ``visit(key=..., theme=...)``."""
    with ExitStack() as servers:

        def open_page(*, theme: str = "light", width: int = 1280, **script: Any) -> Visit:
            made = Script(**script)
            url = servers.enter_context(serving(make_app(made)))
            page = Page(browser)
            browser.get("about:blank")
            browser.get_log("browser")
            page.look(theme=theme, width=width)
            page.open(url)
            return Visit(page, made, url)

        yield open_page


@pytest.fixture
def held_clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    """The time by which answers are late and streams are silent."""
    clock = HeldClock()
    monkeypatch.setattr(sse, "time", clock)
    monkeypatch.setattr(sse, "first_of", clock.first_of)
    return clock


@pytest.fixture
def skipped_time(monkeypatch: pytest.MonkeyPatch) -> SkippedTime:
    """The time of every loop that the test runs, and of the server in it."""
    clock = SkippedTime()
    monkeypatch.setattr(asyncio, "run", clock.run)
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock
