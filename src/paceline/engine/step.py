"""What the verbs of one step have in common: its spans, their shape, and the time that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from paceline.engine.scheduler import Scheduled, step_shape
from paceline.metrics import EngineStats
from paceline.request import NO_DRAFT


class Laps:
    """Times a step from here on, verb by verb."""

    __slots__ = ("_began", "_latest", "_stats")

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._began = self._latest = perf_counter()

    def end(self, verb: str) -> None:
        """A verb is over: charge it the time since the one before it was."""
        self._latest = self._stats.add_seconds(verb, self._latest)

    @property
    def total_ms(self) -> float:
        """From the beginning to the end of the latest verb."""
        return (self._latest - self._began) * 1e3


class Step:
    """One step on its way through the engine's verbs.

    Attributes:
        items: one span per request, and, once it is planned, the draft that is verified below it.
        laps: what its verbs take.
        shape: of the forward that the items make.
        forward_ms: time of the forward; 0.0 where it failed, so that nothing is learnt from it.
    """

    __slots__ = ("forward_ms", "items", "laps", "shape")

    def __init__(self, items: Sequence[Scheduled], laps: Laps) -> None:
        self.items = items
        self.laps = laps
        self.shape = step_shape(items)
        self.forward_ms = 0.0

    def reshape(self) -> None:
        """The items have got drafts."""
        self.shape = step_shape(self.items)

    def drop_drafts(self) -> None:
        """Go on as if nothing had been drafted. Slots that were reserved for it are rolled back
        when the step commits.
        """
        for item in self.items:
            item.draft = NO_DRAFT
        self.reshape()
