"""Which rows of a forward follow which, for recurrent layers in torch. Knows no arithmetic.

A span's rows are a tree below the state of its request. They are walked level by level: all rows
of one depth, of all spans, after those of the depth before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.backends.rows.tensor_states import TensorStates
from paceline.models.backend import StateSpan
from paceline.request.span import Span

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Level:
    """The rows of one depth.

    Attributes:
        rows: ``[n]``, indices into the batch.
        before: ``[n]``, which row of the level before each follows; of the first level, which span
            it is of.
        kept: ``[k]``, which of these rows are the last ones that are certain, and ``slots``
            ``[k]``, where their states go.
    """

    rows: Tensor
    before: Tensor
    kept: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """
    Attributes:
        memory: states and logs.
        spans: where each span's state is.
        num_rows: real rows of the batch.
        levels: by their depths.
        windows: ``[rows, kernel]``, what the convolution of each row sees, the oldest first:
            columns of the spans' states (``kernel - 1`` each, spans in order), then rows.
        last_windows: ``[k, kernel - 1]``, the same of what is kept after the last certain row of
            the spans that have one, and ``last_slots`` ``[k]``, where it goes.
        logged: ``[l]`` rows that are logged, in ``lanes`` and ``nodes`` ``[l]``.
    """

    memory: TensorStates
    spans: Sequence[StateSpan]
    num_rows: int
    levels: Sequence[Level]
    windows: Tensor
    last_windows: Tensor
    last_slots: Tensor
    logged: Tensor
    lanes: Tensor
    nodes: Tensor


@dataclass(slots=True)
class _Walk:
    """Rows of a batch, gathered span by span. Lists of levels are by depth."""

    kernel: int
    rows: list[list[int]] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    kept: list[list[tuple[int, int]]] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    last: list[tuple[list[int], int]] = field(default_factory=list)
    logged: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, index: int, count: int, span: Span, where: StateSpan) -> None:
        """
        Args:
            index: of the span, out of ``count``.
        """
        assert span.num_cached == 0, "no forward leaves a state in the middle of a span"
        first, states = len(self.windows), count * (self.kernel - 1)
        columns = list(range(index * (self.kernel - 1), (index + 1) * (self.kernel - 1)))
        places: list[tuple[int, int]] = []  # depth, and index in that level
        for node, parent in enumerate(span.parents):
            seen = columns if parent < 0 else self.windows[first + parent][1:]
            window = [*seen, states + first + node]
            self.windows.append(window)
            depth = 0 if parent < 0 else places[parent][0] + 1
            place = self._place(depth, first + node, index if parent < 0 else places[parent][1])
            places.append((depth, place))
            if node == where.certain - 1:
                self.kept[depth].append((place, where.write))
                self.last.append((window[1:], where.write))
            elif node >= where.certain:
                self.logged.append((first + node, where.lane, node - where.certain))

    def _place(self, depth: int, row: int, before: int) -> int:
        if depth == len(self.rows):
            for lists in (self.rows, self.before, self.kept):
                lists.append([])
        self.rows[depth].append(row)
        self.before[depth].append(before)
        return len(self.rows[depth]) - 1


def recurrent_batch(
    spans: Sequence[Span], states: Sequence[StateSpan], memory: TensorStates
) -> RecurrentBatch:
    """Pack spans whose states are reserved, one :class:`StateSpan` for each."""
    device, walk = memory.state.device, _Walk(memory.shape.kernel)
    for index, (span, where) in enumerate(zip(spans, states, strict=True)):
        walk.add(index, len(spans), span, where)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def table(rows: Sequence[Sequence[int]], width: int) -> Tensor:
        return column([at for row in rows for at in row]).view(-1, width)

    kernel = memory.shape.kernel
    levels = [
        Level(
            column(rows), column(before), column([k for k, _ in kept]), column([s for _, s in kept])
        )
        for rows, before, kept in zip(walk.rows, walk.before, walk.kept, strict=True)
    ]
    return RecurrentBatch(
        memory=memory,
        spans=states,
        num_rows=len(walk.windows),
        levels=levels,
        windows=table(walk.windows, kernel),
        last_windows=table([window for window, _ in walk.last], kernel - 1),
        last_slots=column([slot for _, slot in walk.last]),
        logged=column([row for row, _, _ in walk.logged]),
        lanes=column([lane for _, lane, _ in walk.logged]),
        nodes=column([node for _, _, node in walk.logged]),
    )
