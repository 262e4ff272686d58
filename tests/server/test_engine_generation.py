"""What the reader of an answer meets: its pieces, then the error of any of its samples."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import RequestFailedError
from paceline.request.sampling_params import SamplingParams
from paceline.server.engine_process.client import Answers
from paceline.server.engine_process.messages import Piece


def test_the_end_of_one_sample_does_not_hide_that_another_failed() -> None:
    async def read() -> None:
        generation = Answers([SamplingParams(n=2)])
        generation.take(Piece(1, [7], ["target"], "x"))
        failed = Piece(0, [], [], finish_reason="abort", error=RequestFailedError("no memory"))
        assert not generation.take(failed)
        assert generation.take(Piece(1, [7], ["target"], "x", finish_reason="stop"))
        pieces = aiter(generation)
        assert (await anext(pieces)).sample == 1
        with pytest.raises(RequestFailedError, match="no memory"):
            await anext(pieces)

    asyncio.run(read())
