"""The micro-batches of one forward on their way through the stages. Knows none of their rows.

As soon as a stage has answered for one, what it said goes to the next stage. Where there are
several, a thread for each stage waits for its answers, so that the engine's own layers need not
wait, and so that a stage can send while the engine sends to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue

from paceline.stages.link import Message
from paceline.stages.remote import RemoteStage
from paceline.tensors.arrays import Array, Floats

Answer = tuple[Message, Sequence[Array]]


class Journey:
    """See the module's docstring.

    Args:
        stages: those after the engine's own, at least one.
        taps: that each of them answers; what goes to the next stage is the last one.
        greedy: the last stage says the arg-max alone.

    Attributes:
        answers: of each stage, by micro-batch.
    """

    def __init__(
        self, stages: Sequence[RemoteStage], taps: Sequence[Sequence[int]], greedy: bool
    ) -> None:
        self._stages, self._taps, self._greedy = stages, taps, greedy
        self._started = [SimpleQueue[int | None]() for _ in stages]
        self._error: Exception | None = None
        self.answers: list[list[Answer]] = [[] for _ in stages]

    def run(self, rows: Iterable[Floats], overlaps: bool) -> None:
        """Take what leaves the engine's own layers through all stages.

        Args:
            rows: ``[rows, hidden_size]`` of each micro-batch, computed when it is asked for.
            overlaps: stages compute meanwhile.

        Raises:
            StageError: a stage is lost or has failed. No stage has anything more to say, then.
        """
        stages = range(len(self._stages))
        threads = [
            threading.Thread(target=self._follow, args=(at,), daemon=True)
            for at in stages
            if overlaps
        ]
        for each in threads:
            each.start()
        try:
            for index, x in enumerate(rows):
                if self._error is not None:
                    break
                self._start(0, index, x)
        finally:
            self._started[0].put(None)
            for each in threads:
                each.join()
            for at in () if threads else stages:
                self._follow(at)
        if self._error is not None:
            raise self._error

    def _start(self, at: int, index: int, x: Floats) -> None:
        self._stages[at].start(x, index, self._taps[at], self._greedy)
        self._started[at].put(index)

    def _follow(self, at: int) -> None:
        """Wait for all that a stage was told to compute, whatever has failed: it will answer."""
        is_last = at + 1 == len(self._stages)
        while (index := self._started[at].get()) is not None:
            try:
                answer = self._stages[at].result()
                self.answers[at].append(answer)
                if not is_last and self._error is None:
                    self._start(at + 1, index, answer[1][-1][:, -1])
            except Exception as error:
                self._error = self._error or error
        if not is_last:
            self._started[at + 1].put(None)
