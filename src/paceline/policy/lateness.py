"""Which requests are behind a target per token. Owns what their tokens count for that."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.request import Request

BEHIND_WEIGHT = 4.0
"""What a token of a request that is behind its target counts."""


class Lateness:
    """Follows requests from the first step in which they decode.

    Args:
        tpot_ms: milliseconds that a token may take.
    """

    def __init__(self, tpot_ms: float) -> None:
        self._tpot_ms = tpot_ms
        self._elapsed_ms = 0.0
        self._starts: dict[int, tuple[float, int]] = {}

    def begin(self, requests: Sequence[Request]) -> None:
        """These requests decode in the next step."""
        for request in requests:
            start = (self._elapsed_ms, len(request.token_ids))
            self._starts.setdefault(request.request_id, start)

    def passed(self, milliseconds: float) -> None:
        """Let time pass."""
        self._elapsed_ms += milliseconds

    def weights(self, requests: Sequence[Request]) -> list[float] | None:
        """What a token of each request counts; None where all count the same."""
        weights = []
        for request in requests:
            began, tokens = self._starts[request.request_id]
            emitted = len(request.token_ids) - tokens
            behind = self._elapsed_ms - began > self._tpot_ms * emitted
            weights.append(BEHIND_WEIGHT if behind else 1.0)
        return weights if min(weights) < max(weights) else None

    def allows(self, requests: Sequence[Request], milliseconds: float) -> bool:
        """Whether a step of so long puts nobody behind who is on time."""
        for request in requests:
            began, tokens = self._starts[request.request_id]
            passed, emitted = self._elapsed_ms - began, len(request.token_ids) - tokens
            is_late = passed > self._tpot_ms * emitted
            if not is_late and passed + milliseconds > self._tpot_ms * (emitted + 1):
                return False
        return True

    def finish(self, request: Request) -> None:
        """Forget a request."""
        self._starts.pop(request.request_id, None)
