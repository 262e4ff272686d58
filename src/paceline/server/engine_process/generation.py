"""The answers that one request waits for. Owns their order and their errors; knows no process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from paceline.core.errors import PacelineError
from paceline.request.request import TokenLogprobs
from paceline.request.sampling_params import SamplingParams
from paceline.server.engine_process.backlog import Share
from paceline.server.engine_process.messages import Piece


class EngineGeneration:
    """The answers to the prompts of one request: iterate over their pieces until all have ended.

    One reader at a time. A slow one holds up nobody: pieces wait here, as many as its share of the
    backlog may have. Then they go, and the error is all that it meets.

    Args:
        share: counts what waits; None where nothing is counted.

    Attributes:
        prompt_logprobs: by prompt, one per token (None for the first) where they were asked for;
            complete when the first piece of the prompt has been read.

    Raises:
        RequestFailedError: from the iteration: the forward or the sampler failed for a prompt.
        SlowReaderError, AnswerTooLargeError, BusyError: from the iteration: too much waited.
        EngineDeadError: from the iteration: the engine died.
        EngineClosedError: from the iteration: the engine was closed.
    """

    def __init__(self, params: Sequence[SamplingParams], share: Share | None = None) -> None:
        self.prompt_logprobs: list[Sequence[TokenLogprobs | None]] = [() for _ in params]
        self._num_samples = params[0].n
        self._num_open = sum(each.n for each in params)
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None
        self._is_accepted = False
        self._changed = asyncio.Event()
        self._share = share
        if share is not None:
            share.when_dropped(self._drop)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            await self._change()
        piece = self._pieces.popleft()
        if self._share is not None:
            self._share.take(piece)
        return piece

    async def accepted(self) -> None:
        """Wait until the engine has taken the prompts on; ``RequestError`` where it refused."""
        while not self._is_accepted:
            if self._error is not None:
                raise self._error
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def accept(self) -> None:
        self._is_accepted = True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """What the reader will meet after the pieces that came before."""
        self._error = self._error or error
        self._changed.set()

    def take(self, piece: Piece) -> bool:
        """Add a piece; True when all samples have ended."""
        if piece.prompt_logprobs:
            self.prompt_logprobs[piece.sample // self._num_samples] = piece.prompt_logprobs
        if piece.finish_reason is not None:
            self._num_open -= 1
        if piece.error is not None:
            self.fail(piece.error)
        if self._error is None:
            self._pieces.append(piece)
            if self._share is not None:
                self._share.put(piece)
        self.accept()
        return not self._num_open

    def _drop(self, error: PacelineError) -> None:
        self._pieces.clear()
        self._error = None  # that of a sample has nobody who would hear of it
        self.fail(error)
