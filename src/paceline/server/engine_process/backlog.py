"""What waits for clients in memory: how much it may be, and whose request ends beyond that.

A stream's pieces wait in the HTTP process until its client takes them, an answer in one body until
it is complete and taken; the engine waits for no client. What pieces take is estimated. Owns the
bounds and who is dropped. Knows no engine and no HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from paceline.core.errors import AnswerTooLargeError, BusyError, PacelineError, SlowReaderError
from paceline.request.request import TokenLogprobs
from paceline.server.engine_process.messages import Piece

MOST_BYTES_OF_REQUEST = 16 << 20
"""Of one stream: 30,000 tokens that were told one by one, or 5,000 with 20 log-probs each. A client
that reads on after minutes of a chat has lost nothing."""
MOST_BYTES_OF_ANSWER = 128 << 20
"""Of one answer in one body, or of a stream that tells log-probs of its prompt: it keeps them.
120,000 tokens that were told one by one, or 18,000 with 20 log-probs each."""
MOST_BYTES = 512 << 20
"""Of all requests of a server together."""
# Measured on CPython 3.11 and 3.12, of pieces that came from another process.
_PIECE_BYTES = 480
_TOKEN_BYTES = 48
_LOGPROBS_BYTES = 256
_TOP_BYTES = 136
_SIZE_AS_PARTS = 2
"""Times that a piece's bytes grow where it becomes parts of an answer in one body; at most."""

Told = Callable[[PacelineError], None]


def waiting_bytes(piece: Piece) -> int:
    """About what a piece takes while it waits; what it says of the prompt does not go with it."""
    size = _PIECE_BYTES + _TOKEN_BYTES * len(piece.token_ids) + len(piece.text)
    if piece.logprobs:
        size += _bytes_of_logprobs(piece.logprobs)
    return size + len(piece.embedding)


def _bytes_of_logprobs(entries: Sequence[TokenLogprobs | None]) -> int:
    tops = sum(len(entry.top) for entry in entries if entry is not None)
    return _LOGPROBS_BYTES * len(entries) + _TOP_BYTES * tops


class Backlog:
    """What waits for all clients of a server; beyond its bound the largest request is dropped.

    Attributes:
        num_bytes: that wait.
        shares: of the requests that go on.
    """

    def __init__(
        self,
        most_bytes: int = MOST_BYTES,
        most_bytes_of_request: int = MOST_BYTES_OF_REQUEST,
        most_bytes_of_answer: int = MOST_BYTES_OF_ANSWER,
    ) -> None:
        self.most_bytes = most_bytes
        self.most_bytes_of_request = most_bytes_of_request
        self.most_bytes_of_answer = most_bytes_of_answer
        self.num_bytes = 0
        self.shares = set[Share]()

    def lift_bounds(self) -> None:
        """Let answers in one body take any memory, where it is the machine's owner who asks."""
        self.most_bytes = self.most_bytes_of_answer = sys.maxsize

    def of_stream(self, *told: Told) -> Share:
        """What waits until it is read. Args: told: called, in this order, when it is dropped."""
        return Share(self, told, self.most_bytes_of_request)

    def of_prompt_and_stream(self, *told: Told) -> Share:
        """Likewise, for a stream that keeps what it says of its prompt until it ends."""
        return Share(self, told, self.most_bytes_of_answer)

    def of_answer(self, *told: Told) -> Share:
        """What waits until the answer is complete, since it goes in one body."""
        return Share(self, told, self.most_bytes_of_answer, is_whole=True)

    def of_body(self, num_bytes: int, *told: Told) -> Share:
        """An answer that is complete, until its client has taken it."""
        share = Share(self, told, self.most_bytes)
        share.add(num_bytes)
        return share

    def check(self, share: Share) -> None:
        """Drop whoever lets too much wait: the share that has grown, or the largest of all."""
        if share.num_bytes > share.most:
            share.drop(share.error(f"one may have {_mebibytes(share.most)}"))
        elif self.num_bytes > self.most_bytes:
            largest = max(self.shares, key=lambda each: each.num_bytes)
            largest.drop(largest.error_of_all(_mebibytes(self.most_bytes)))


class Share:
    """What of a backlog one request has; nothing more is counted when it is closed or dropped.

    Args:
        most: bytes of it.
        is_whole: what comes is kept, as parts of the answer, until the share is closed.
    """

    def __init__(
        self, backlog: Backlog, told: Sequence[Told], most: int, is_whole: bool = False
    ) -> None:
        self.num_bytes = 0
        self.most = most
        self._backlog = backlog
        self._told = [*told]
        self.is_whole = is_whole
        backlog.shares.add(self)

    def when_dropped(self, told: Told) -> None:
        self._told.append(told)

    def put(self, piece: Piece) -> None:
        """Count a piece that waits."""
        size = waiting_bytes(piece)
        if piece.prompt_logprobs:
            size += _bytes_of_logprobs(piece.prompt_logprobs)
        self.add(size * (_SIZE_AS_PARTS if self.is_whole else 1))

    def take(self, piece: Piece) -> None:
        """Count that a piece of a stream waits no more."""
        self.add(-waiting_bytes(piece))

    def add(self, num_bytes: int) -> None:
        """Count bytes that wait; less than none where they were taken."""
        if self in self._backlog.shares:
            self.num_bytes += num_bytes
            self._backlog.num_bytes += num_bytes
            self._backlog.check(self)

    def close(self) -> None:
        if self in self._backlog.shares:
            self._backlog.shares.remove(self)
            self._backlog.num_bytes -= self.num_bytes
            self.num_bytes = 0

    def drop(self, error: PacelineError) -> None:
        """End the request by this error."""
        self.close()
        for told in self._told:
            told(error)

    def error(self, allowed: str) -> PacelineError:
        """Why it ends when it alone is too large."""
        size = _mebibytes(self.num_bytes)
        if self.is_whole:
            return AnswerTooLargeError(
                f"the answer in one body takes {size} of memory until now, and {allowed}: ask for "
                "fewer samples, tokens or log-probs, send fewer prompts at once, or stream it"
            )
        return SlowReaderError(
            f"the client left {size} of this stream unread, and {allowed}: "
            "read streams as they come, or ask for fewer samples or log-probs"
        )

    def error_of_all(self, most: str) -> PacelineError:
        """Why it ends where all together are too large, and it is the largest."""
        if not self.is_whole:
            return self.error(f"all answers together may have {most}")
        return BusyError(
            f"all answers together take more than {most} of memory, and this one most of it: "
            "try again, or ask for fewer samples, tokens or log-probs"
        )


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.3g} MiB"
