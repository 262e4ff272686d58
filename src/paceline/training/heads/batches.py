"""Traces to batches of rows for a head: packs of whole traces, epoch after epoch.

Everything is a function of (traces, seed, pack number), so a run that continues needs to know only
how many packs it has seen. Knows no head and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.errors import TrainingError
from paceline.request.traces import Trace

Tensor = torch.Tensor
Ints = npt.NDArray[np.int64]
SORTED = 64
"""Traces that are sorted by length at a time, so that a pack's are about equally long."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where rows of several texts lie in a padded ``[texts, width]``.

    Attributes:
        texts, width: its size.
        places: int64 ``[rows]``, where each row is: its text times ``width`` plus its column.
    """

    texts: int
    width: int
    places: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """``[rows, heads, head_dim]`` to ``[texts, heads, width, head_dim]``."""
        whole = x.new_zeros(self.texts * self.width, *x.shape[1:])
        whole = whole.index_copy(0, self.places, x)
        return whole.view(self.texts, self.width, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """``[texts, heads, width, head_dim]`` to ``[rows, heads * head_dim]``."""
        return x.transpose(1, 2).reshape(self.texts * self.width, -1)[self.places]

    def spread(self, size: int) -> Grid:
        """The grid of blocks of ``size`` rows, one in place of each row."""
        places = (self.places[:, None] * size + torch.arange(size)).flatten()
        return Grid(self.texts, self.width * size, places)


def num_rows(trace: Trace) -> int:
    """Rows of a head that a trace has: the last one predicts the last token."""
    return max(0, len(trace.token_ids) - 2)


def num_wanted(trace: Trace) -> int:
    """Those that predict a token of the answer with the answer's first token known."""
    return max(0, len(trace.token_ids) - trace.prompt_len - 1)


class Rows(NamedTuple):
    """What the target makes of a trace.

    Attributes:
        features: float32 ``[rows, taps * hidden_size]``.
        top_ids, top_probs: ``[wanted, k]``, its likeliest tokens where wanted rows predict.
    """

    features: Tensor
    top_ids: Tensor
    top_probs: Tensor


ReadRows = Callable[[Sequence[int]], Rows]
"""Those of traces, one after another, by the traces' numbers."""


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several texts, one after another."""
    return Rows(*(torch.cat(each) for each in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several texts, one after another, and what the target said where they predict.

    Attributes:
        tokens, positions: int64 ``[rows]``; row ``j`` of a text reads token ``j + 1``.
        features: float32 ``[rows, taps * hidden_size]``.
        grid: of all rows.
        wanted: int64 ``[wanted]``, the rows whose predictions count.
        wanted_grid: of those.
        left: int64 ``[wanted]``, how many wanted rows of the same text follow each.
        emitted: int64 ``[wanted]``, the token that each predicts.
        top_ids, top_probs: ``[wanted, k]``, the target's likeliest tokens there, best first.
    """

    tokens: Tensor
    positions: Tensor
    features: Tensor
    grid: Grid
    wanted: Tensor
    wanted_grid: Grid
    left: Tensor
    emitted: Tensor
    top_ids: Tensor
    top_probs: Tensor

    @staticmethod
    def of(traces: Sequence[Trace], made: Rows) -> Batch:
        rows = np.array([num_rows(t) for t in traces])
        wanted = np.array([num_wanted(t) for t in traces])
        positions, ends = _ranges(rows), np.cumsum(rows)
        ranks = _ranges(wanted)
        places = np.repeat(ends - wanted, wanted) + ranks
        return Batch(
            tokens=_joined([t.token_ids[1:-1] for t in traces]),
            positions=torch.as_tensor(positions),
            features=made.features,
            grid=_grid(rows, positions),
            wanted=torch.as_tensor(places),
            wanted_grid=_grid(wanted, ranks),
            left=torch.as_tensor(np.repeat(wanted, wanted) - 1 - ranks),
            emitted=_joined([t.token_ids[t.prompt_len + 1 :] for t in traces]),
            top_ids=made.top_ids,
            top_probs=made.top_probs,
        )

    def part(self, chosen: Tensor) -> Grid:
        """The grid of some of the wanted rows, by their (ascending) numbers."""
        width = self.wanted_grid.width
        text = self.wanted_grid.places[chosen] // width
        counts = torch.bincount(text, minlength=self.grid.texts)
        begins = counts.cumsum(0) - counts
        ranks = torch.arange(len(chosen)) - begins[text]
        widest = max(1, int(counts.max()))
        return Grid(self.grid.texts, widest, text * widest + ranks)


def _ranges(counts: Ints) -> Ints:
    """0, 1, ... up to each count, one after another."""
    total = int(counts.sum())
    found: Ints = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return found


def _grid(counts: Ints, ranks: Ints) -> Grid:
    width = int(counts.max())
    places = np.repeat(np.arange(len(counts)) * width, counts) + ranks
    return Grid(len(counts), width, torch.as_tensor(places))


def _joined(parts: Sequence[npt.NDArray[np.int32]]) -> Tensor:
    return torch.as_tensor(np.concatenate(parts).astype(np.int64))


def split_prompts(
    traces: Sequence[Trace], held_out_tokens: int, seed: int
) -> tuple[list[int], list[int]]:
    """Numbers of the traces to train on and of those held out; no prompt is in both.

    Prompts are taken in an order of the seed until their traces have ``held_out_tokens`` tokens.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for number, trace in enumerate(traces):
        by_prompt.setdefault(trace.token_ids[: trace.prompt_len].tobytes(), []).append(number)
    groups = list(by_prompt.values())
    order = np.random.default_rng((seed, 0x5E1D)).permutation(len(groups))
    held: list[int] = []
    left = held_out_tokens
    for index in order:
        if left <= 0:
            break
        held += groups[index]
        left -= sum(len(traces[i].token_ids) for i in groups[index])
    taken = set(held)
    return [i for i in range(len(traces)) if i not in taken], sorted(held)


class Packs:
    """Packs of traces by number, without end: number n belongs to epoch ``n // per_epoch``.

    Args:
        size: most rows of a pack; a trace that has more is a pack of its own.

    Raises:
        TrainingError: no trace has an answer of two tokens.
    """

    def __init__(self, traces: Sequence[Trace], read: ReadRows, size: int, seed: int) -> None:
        self._traces, self._read, self._size, self._seed = traces, read, size, seed
        self._usable = np.array([i for i, t in enumerate(traces) if num_wanted(t) > 0], np.int64)
        if not len(self._usable):
            raise TrainingError("the traces hold no answer of two tokens or more")
        self._epoch, self._first = -1, 0
        self._packs: list[Ints] = []

    def take(self, start: int, count: int) -> Batch:
        """Packs ``start`` to ``start + count`` as one batch."""
        numbers = np.concatenate([self._pack(n) for n in range(start, start + count)])
        return Batch.of([self._traces[i] for i in numbers], self._read(numbers.tolist()))

    def _pack(self, number: int) -> Ints:
        while not self._first <= number < self._first + len(self._packs):
            if number < self._first:
                self._epoch, self._first, self._packs = -1, 0, []
            self._first += len(self._packs)
            self._epoch += 1
            self._packs = self.epoch(self._epoch)
        return self._packs[number - self._first]

    def epoch(self, number: int) -> list[Ints]:
        """The packs of an epoch: numbers of traces."""
        rng = np.random.default_rng((self._seed, number))
        order = rng.permutation(self._usable)
        packs: list[list[int]] = [[]]
        room = self._size
        for begin in range(0, len(order), SORTED):
            group = order[begin : begin + SORTED]
            lengths = [num_rows(self._traces[i]) for i in group]
            for index in group[np.argsort(lengths, kind="stable")]:
                need = num_rows(self._traces[index])
                if packs[-1] and need > room:
                    packs.append([])
                    room = self._size
                packs[-1].append(int(index))
                room -= need
        return [np.array(packs[i], np.int64) for i in rng.permutation(len(packs))]
