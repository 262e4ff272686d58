"""Server-sent events out of a byte stream. Knows nothing of what they say."""

from __future__ import annotations


class EventParser:
    """Collects bytes as they arrive, and gives the data of the events that they complete.

    Args:
        limit: most bytes of one event.

    The format is the HTML standard's: lines of ``field: value``, an empty line ends an event, lines
    that begin with a colon are comments, several data lines are joined.
    """

    def __init__(self, limit: int = 1 << 24) -> None:
        self._rest = b""
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends in these bytes.

        Raises:
            ValueError: an event is longer than the limit.
        """
        if b"\r" in data or self._rest.endswith(b"\r"):
            data, self._rest = self._without_returns(data), b""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > self._limit:
            raise ValueError(f"an event of more than {self._limit} bytes")
        found = (_data_of(event) for event in events)
        return [data for data in found if data]

    def _without_returns(self, data: bytes) -> bytes:
        """Lines that end with CR LF, as if they ended with LF; a last CR waits for its LF."""
        return (self._rest + data).replace(b"\r\n", b"\n")


def _data_of(event: bytes) -> bytes:
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
