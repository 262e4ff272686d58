"""What waits for clients that read slowly: how much it may be, and whose request ends beyond that.

A stream's pieces wait in the HTTP process while its client takes nothing, and the engine, which
computes for everybody, waits for none of them. What they take is estimated, since counting it would
cost more than making them. Owns the bounds and who is dropped. Knows no piece's meaning, no engine
and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import SlowReaderError
from paceline.server.messages import Piece

MOST_BYTES_OF_REQUEST = 16 << 20
"""Of one stream: 30,000 tokens that were told one by one, or 5,000 with 20 log-probs each. A client
that reads on after minutes of a chat has lost nothing."""
MOST_BYTES = 256 << 20
"""Of all streams of a server together."""
# Measured on CPython 3.11 and 3.12, of pieces that came from another process.
_PIECE_BYTES = 480
_TOKEN_BYTES = 48
_LOGPROBS_BYTES = 256
_TOP_BYTES = 136

Told = Callable[[SlowReaderError], None]


def waiting_bytes(piece: Piece) -> int:
    """About what a piece takes while it waits; what it says of the prompt is kept anyway."""
    size = _PIECE_BYTES + _TOKEN_BYTES * len(piece.token_ids) + len(piece.text)
    if piece.logprobs:
        tops = sum(len(entry.top) for entry in piece.logprobs)
        size += _LOGPROBS_BYTES * len(piece.logprobs) + _TOP_BYTES * tops
    return size


class Backlog:
    """What waits for the clients of all streams of a server.

    When it passes its bound, the stream for which most waits is dropped, so that a client which
    does not read costs nobody else an answer.

    Attributes:
        num_bytes: that wait.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, most_bytes_of_request: int = MOST_BYTES_OF_REQUEST
    ) -> None:
        self.most_bytes = most_bytes
        self.most_bytes_of_request = most_bytes_of_request
        self.num_bytes = 0
        self._shares: set[Share] = set()

    def share(self, *told: Told) -> Share:
        """Args: told: what is called, in this order, where the stream is dropped."""
        share = Share(self, told)
        self._shares.add(share)
        return share

    def close(self, share: Share) -> None:
        self.add(share, -share.num_bytes)
        self._shares.discard(share)

    def add(self, share: Share, num_bytes: int) -> None:
        """Count what has come or was taken, and drop whoever lets too much wait."""
        share.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if share.num_bytes > self.most_bytes_of_request:
            self._drop(share, f"one may leave {_mebibytes(self.most_bytes_of_request)}")
        elif self.num_bytes > self.most_bytes:
            largest = max(self._shares, key=lambda each: each.num_bytes)
            self._drop(largest, f"all together may leave {_mebibytes(self.most_bytes)}")

    def _drop(self, share: Share, allowed: str) -> None:
        message = (
            f"the client left {_mebibytes(share.num_bytes)} of this stream unread, and {allowed}: "
            "read streams as they come, or ask for fewer samples or log-probs"
        )
        self.close(share)
        share.drop(SlowReaderError(message))


class Share:
    """What of a backlog one stream has; nothing more is counted when it is closed or dropped."""

    def __init__(self, backlog: Backlog, told: tuple[Told, ...]) -> None:
        self.num_bytes = 0
        self._backlog = backlog
        self._told = [*told]
        self._is_open = True

    def when_dropped(self, told: Told) -> None:
        self._told.append(told)

    def add(self, num_bytes: int) -> None:
        """Count bytes that wait, or that were taken where there are less than none."""
        if self._is_open:
            self._backlog.add(self, num_bytes)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._backlog.close(self)

    def drop(self, error: SlowReaderError) -> None:
        """Tell everybody that the stream ends by this error."""
        self._is_open = False
        for told in self._told:
            told(error)


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.3g} MiB"
