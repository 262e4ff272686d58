"""What the reader of an answer meets: its pieces, then the error of any of its samples."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import RequestFailedError
from paceline.server.engine.generation import EngineGeneration
from paceline.server.engine.wire import Rest


def rest(finish_reason: str, error: Exception | None = None) -> Rest:
    return Rest([], finish_reason, None, None, 0, [], error)


def test_the_end_of_one_sample_does_not_hide_that_another_failed() -> None:
    async def read() -> None:
        generation = EngineGeneration(num_samples=2)
        generation.take(1, [7], ["target"], "x", None)
        assert not generation.take(0, [], [], "", rest("abort", RequestFailedError("no memory")))
        assert generation.take(1, [7], ["target"], "x", rest("stop"))
        pieces = aiter(generation)
        assert (await anext(pieces)).index == 1
        with pytest.raises(RequestFailedError, match="no memory"):
            await anext(pieces)

    asyncio.run(read())
