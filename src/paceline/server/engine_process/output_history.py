"""How many tokens an engine had put out at each of its last beats. Knows no engine.

So a reader that comes late, such as the server's page, can show what went on before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from paceline.request.metrics import EngineStats

MAX_BEATS = 300
"""Five minutes of beats that come every second."""


class OutputHistory:
    """Counts of one life of an engine, the newest :data:`MAX_BEATS` of them.

    Args:
        now: seconds; default: :func:`time.monotonic`.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or time.monotonic
        self._counts: deque[tuple[float, int]] = deque(maxlen=MAX_BEATS)

    def note(self, stats: EngineStats) -> None:
        """A beat has told the engine's counters."""
        self._counts.append((self._now(), stats.num_output_tokens))

    def clear(self) -> None:
        """The engine is gone; the next one counts from zero."""
        self._counts.clear()

    def told(self) -> list[tuple[float, int]]:
        """(seconds ago, output tokens until then), the oldest first."""
        now = self._now()
        return [(round(now - at, 3), tokens) for at, tokens in self._counts]
