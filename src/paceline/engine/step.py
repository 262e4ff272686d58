"""The state that the verbs of one step share: its spans, their shape, and its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.engine.scheduler import Scheduled, step_shape
from paceline.planner.cost_table import NO_STEP
from paceline.request.request import NO_DRAFT


class Step:
    """One step on its way through the engine's verbs; it is timed from the moment it is made.

    Args:
        seconds: of all steps so far, by verb; what this one takes is added.
        clock: seconds.

    Attributes:
        items: one span per request, after planning with the draft that is verified below it.
        shape: of the forward that the items make, as of the latest :meth:`reshape`.
        forward_ms: time of the forward; 0.0 where it failed, so that nothing is learnt from it.
    """

    __slots__ = ("_began", "_clock", "_latest", "_seconds", "forward_ms", "items", "shape")

    def __init__(self, seconds: dict[str, float], clock: Callable[[], float]) -> None:
        self.items: Sequence[Scheduled] = ()
        self.shape = NO_STEP
        self.forward_ms = 0.0
        self._seconds, self._clock = seconds, clock
        self._began = self._latest = clock()

    def reshape(self) -> None:
        """Compute the shape anew, because the items or their drafts changed."""
        self.shape = step_shape(self.items)

    def share(self, features: Any) -> None:
        """Give each item the hidden states of its own nodes; there may be none."""
        if features is None:
            return
        first = 0
        for item in self.items:
            last = first + item.num_tokens + len(item.draft)
            item.features = features[first:last]
            first = last

    def drop_drafts(self) -> None:
        """Continue without drafts; commit gives back the slots that were reserved."""
        for item in self.items:
            item.draft = NO_DRAFT
        self.reshape()

    def done(self, verb: str) -> None:
        """A verb is over: charge it the time since the one before it was."""
        now = self._clock()
        self._seconds[verb] = self._seconds.get(verb, 0.0) + now - self._latest
        self._latest = now

    @property
    def total_ms(self) -> float:
        """From the beginning to the end of the latest verb."""
        return (self._latest - self._began) * 1e3
