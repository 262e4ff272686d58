"""The answer to one prompt while it comes. Owns what its reader has not read yet.

A slow reader holds up nobody: pieces wait here, which are bounded by the prompt's ``max_tokens``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from paceline.request import TokenLogprobs
from paceline.server.engine.wire import LogprobTuple, Rest
from paceline.server.messages import Piece


class EngineGeneration:
    """Iterate over its pieces until all samples ended; one reader at a time.

    Attributes:
        prompt_logprobs: one per prompt token (None for the first) where they were asked for;
            complete when the first piece has arrived.

    Raises:
        RequestFailedError: from the iteration: the forward or the sampler failed for this prompt.
        EngineDeadError: from the iteration: the engine died.
        EngineClosedError: from the iteration: the engine was closed.
    """

    def __init__(self, num_samples: int) -> None:
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self._num_open = num_samples
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None
        self._is_accepted = False
        self._waiter: asyncio.Future[None] | None = None

    # --- the reader's side ---------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            await self._wait()
        return self._pieces.popleft()

    async def accepted(self) -> None:
        """Wait until the engine has taken the prompt on.

        Raises:
            RequestError: it refused.
            EngineClosedError: it is gone.
        """
        while not self._is_accepted:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # --- the client's side ---------------------------------------------------------------------

    def accept(self) -> None:
        self._is_accepted = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """What the reader will meet after the pieces that came before."""
        self._error = error
        self._wake()

    def take(
        self,
        index: int,
        token_ids: Sequence[int],
        origins: Sequence[str],
        text: str,
        rest: Rest | None,
    ) -> bool:
        """Add an entry of a step; True when all samples have ended."""
        self._is_accepted = True
        piece = Piece(index, token_ids, origins, text)
        if rest is not None:
            self._complete(piece, rest)
        if self._error is None:
            self._pieces.append(piece)
        self._wake()
        return not self._num_open

    def _complete(self, piece: Piece, rest: Rest) -> None:
        piece.logprobs = [TokenLogprobs(*each) for each in rest.logprobs]
        piece.finish_reason, piece.stop_reason = rest.finish_reason, rest.stop_reason
        piece.counters, piece.num_cached_tokens = rest.counters, rest.num_cached_tokens
        if rest.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = [_restored(each) for each in rest.prompt_logprobs]
        self._num_open -= rest.finish_reason is not None
        self._error = self._error or rest.error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _restored(entry: LogprobTuple | None) -> TokenLogprobs | None:
    return None if entry is None else TokenLogprobs(*entry)
