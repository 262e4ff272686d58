"""The one server that the tests of what users see through HTTP share, and two clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.server import sse
from tests.server.clocks import HeldClock, SkippedTime
from tests.server.served import chat_model, served


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def served_url(served_model: Path) -> Iterator[str]:
    with served(served_model) as url:
        yield url


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
