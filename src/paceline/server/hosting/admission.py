"""The bounded queue: how many unfinished samples a server takes on, and who is sent away.

Owns counts and the answer to those sent away. Knows no engine: what waits and what runs is its
scheduler's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.errors import RequestError
from paceline.server.http.errors import RATE_LIMIT, ApiError

_MAX_RETRY_SECONDS = 60
_SMOOTHING = 0.2


class Admission:
    """Places for unfinished samples.

    Args:
        max_queue: samples that may wait besides.

    Attributes:
        max_num_seqs: samples that the engine runs at once; 0 while it is not known.
    """

    def __init__(self, max_num_seqs: int, max_queue: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._seconds = 1.0  # smoothed: how long requests take
        self.num_unfinished = 0

    @property
    def limit(self) -> int:
        """Most samples that may be unfinished."""
        return self.max_num_seqs + self._max_queue

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold places for the samples of one HTTP request until the block ends.

        Raises:
            ApiError: 429, the queue is full; ``Retry-After`` says when to try again.
            RequestError: so many places do not exist.
        """
        if count > self.limit:
            raise RequestError(
                f"prompt and n: the request has {count} samples; at most {self.limit} can be "
                "unfinished at once: send smaller batches"
            )
        if self.num_unfinished + count > self.limit:
            raise self._full()
        self.num_unfinished += count
        began = time.monotonic()
        try:
            yield
        finally:
            self.num_unfinished -= count
            self._seconds += _SMOOTHING * (time.monotonic() - began - self._seconds)

    def _full(self) -> ApiError:
        rounds = self.num_unfinished / max(1, self.max_num_seqs)
        # Half of the queue's time: who comes back then will mostly find a place.
        wait = min(max(math.ceil(self._seconds * rounds / 2), 1), _MAX_RETRY_SECONDS)
        return ApiError(
            429,
            f"the queue is full: {self.num_unfinished} samples are unfinished and "
            f"{self.limit} are allowed; try again in {wait} s",
            RATE_LIMIT,
            code="queue_full",
            headers={"Retry-After": str(wait)},
        )
