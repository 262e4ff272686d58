"""How much Python a chat costs the process that speaks HTTP: counts, which no machine changes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import paceline
from paceline.server.batch import application_handle
from tests.server.chats import USER, ChatServer

SOURCE = str(Path(paceline.__file__).parent / "server")
MOST_CALLS, MOST_FILES = 230, 24


def test_a_chat_takes_few_calls_in_few_files() -> None:
    """Of the second chat, since the first makes what is made once; the engine is a fake."""
    server = ChatServer()
    chat = application_handle(server.http.app, server.engine)
    body = {"messages": [USER], "max_tokens": 2}
    files: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            files.append(frame.f_code.co_filename)

    async def second() -> int:
        await chat("/v1/chat/completions", body)
        sys.setprofile(count)
        status, _ = await chat("/v1/chat/completions", body)
        sys.setprofile(None)
        return status

    assert asyncio.run(second()) == 200
    assert 0 < len(files) <= MOST_CALLS
    assert len(set(files)) <= MOST_FILES
