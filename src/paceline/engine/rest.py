"""Steps in which nobody drafts, and of which the planner knows that beforehand.

Most steps of most texts are such. They are to cost as little as possible: the planner is not asked,
and told of many of them at a time. Knows no proposers.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.scheduler import Scheduled
from paceline.policy.planner import PlainStep, Planner
from paceline.request import Request

MOST = 64
"""Steps that the planner is told of at once at most."""


class Rest:
    """See the module's docstring.

    Attributes:
        is_on: the step that runs is such a one.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._left_ms = 0.0
        self._count = 0
        self._latest: Request | None = None
        self._steps: list[PlainStep] = []

    def begin(self, items: Sequence[Scheduled], milliseconds: float) -> None:
        """After this step nobody drafts for these requests for so long; all of them decode."""
        self._left_ms = milliseconds
        self._count, self._latest = len(items), items[-1].request

    def goes_on(self, items: Sequence[Scheduled]) -> bool:
        """Whether the next step is such a one. Requests that come are the last of a step's."""
        self.is_on = (
            self._left_ms > 0.0
            and len(items) == self._count
            and items[-1].request is self._latest
            and len(self._steps) < MOST
        )
        return self.is_on

    def note(self, forward_ms: float, total_ms: float, emitted: float) -> None:
        """The step is over; for the arguments see :class:`~paceline.policy.planner.PlainStep`."""
        self._left_ms -= total_ms
        self._steps.append(PlainStep(forward_ms, total_ms, emitted))

    def end(self, planner: Planner) -> None:
        """Tell the planner of them; from now on it is asked again."""
        steps, self._steps = self._steps, []
        self.is_on, self._left_ms, self._latest = False, 0.0, None
        if steps:
            planner.rested(steps)
