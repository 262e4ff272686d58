"""Recurrent layers in numpy, and texts that are read through the native ones in steps.

A :class:`Kind` says what the rows of a layer are and how the kernels are called. A :class:`Memory`
has slots and logs that hold NaN wherever nothing was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

import paceline._native as native

SLOTS, LANES, NODES = 6, 3, 24
Rows = dict[str, np.ndarray]
Span = tuple[list[int], int, int, int, list[int], int]  # parents, read, write, lane, path, certain


class Kind(Protocol):
    """A layer of one kind, with weights."""

    def rows(self, count: int, seed: int) -> Rows: ...

    def memory(self) -> list[np.ndarray]:
        """Arrays whose first dimension is slots, then such whose first two are lanes and nodes."""
        ...

    def run(
        self, rows: Rows, spans: list[Span], arrays: list[np.ndarray], due: np.ndarray
    ) -> np.ndarray: ...

    def exact(self, rows: Rows, parents: Sequence[int]) -> np.ndarray:
        """In float64, behind an empty text."""
        ...


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _nan(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


@dataclass
class Conv:
    """A convolution over ``channels``, with SiLU and biases or with neither."""

    channels: int
    kernel: int
    silu: bool

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.channels)
        self.weight = _normal(rng, self.kernel, self.channels)
        self.bias = _normal(rng, self.channels) if self.silu else None

    def rows(self, count: int, seed: int) -> Rows:
        return {"x": _normal(np.random.default_rng(seed), count, self.channels)}

    def memory(self) -> list[np.ndarray]:
        return [_nan(SLOTS, self.kernel - 1, self.channels), _nan(LANES, NODES, self.channels)]

    def run(
        self, rows: Rows, spans: list[Span], arrays: list[np.ndarray], due: np.ndarray
    ) -> np.ndarray:
        y: np.ndarray = native.convolve(
            rows["x"], self.weight, self.bias, self.silu, spans, *arrays, due
        )
        return y

    def exact(self, rows: Rows, parents: Sequence[int]) -> np.ndarray:
        windows: list[np.ndarray] = []
        empty = np.zeros((self.kernel, self.channels))
        for row, parent in enumerate(parents):
            before = windows[parent] if parent >= 0 else empty
            windows.append(np.concatenate([before[1:], rows["x"][row : row + 1]]))
        y = (np.stack(windows) * self.weight).sum(axis=1)
        return silu(y + self.bias) if self.bias is not None else y


@dataclass
class Recurrence:
    """The delta rule, or Mamba-2 where it does not correct."""

    corrects: bool
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    least: float = 0.0
    most: float = float("inf")

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.heads)
        self.decays = -np.exp(_normal(rng, self.heads))
        self.step_bias = _normal(rng, self.heads)
        self.skip = None if self.corrects else _normal(rng, self.heads)

    def rows(self, count: int, seed: int) -> Rows:
        rng = np.random.default_rng(seed)
        return {
            "query": _normal(rng, count, self.groups, self.key_dim),
            "key": _normal(rng, count, self.groups, self.key_dim),
            "value": _normal(rng, count, self.heads, self.value_dim),
            "rate": _normal(rng, count, self.heads),
            "decay": _normal(rng, count, self.heads),
        }

    def memory(self) -> list[np.ndarray]:
        tiles, logged = -(-self.value_dim // 16), (LANES, NODES)
        return [
            _nan(SLOTS, self.heads, tiles, self.key_dim, 16),
            _nan(*logged, self.groups, self.key_dim),
            _nan(*logged, self.heads, self.value_dim),
            _nan(*logged, self.heads),
        ]

    def run(
        self, rows: Rows, spans: list[Span], arrays: list[np.ndarray], due: np.ndarray
    ) -> np.ndarray:
        y: np.ndarray = native.recur(
            rows["query"],
            rows["key"],
            rows["value"],
            rows["rate"] if self.corrects else None,
            rows["decay"],
            self.decays,
            self.step_bias,
            2.0,
            self.least,
            self.most,
            self.skip,
            spans,
            *arrays,
            due,
        )
        return y

    def exact(self, rows: Rows, parents: Sequence[int]) -> np.ndarray:
        wide = {name: x.astype(np.float64) for name, x in rows.items()}
        query, key = wide["query"], wide["key"]
        step = np.logaddexp(wide["decay"] + self.step_bias, 0)
        rate = 2.0 * _sigmoid(wide["rate"])
        if self.corrects:
            query, key = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
            query = query / np.sqrt(self.key_dim)
        else:
            rate = step = step.clip(self.least, self.most)
        decay = np.exp(self.decays * step)
        query, key = (x.repeat(self.heads // self.groups, axis=1) for x in (query, key))
        states, y = [], np.zeros_like(wide["value"])
        for row, parent in enumerate(parents):
            empty = np.zeros((self.heads, self.key_dim, self.value_dim))
            state = (states[parent] if parent >= 0 else empty) * decay[row][:, None, None]
            added = wide["value"][row]
            if self.corrects:
                added = added - (state * key[row][..., None]).sum(axis=1)
            added = added * rate[row][:, None]
            state = state + key[row][..., None] * added[:, None]
            states.append(state)
            y[row] = (state * query[row][..., None]).sum(axis=1)
            if self.skip is not None:
                y[row] += self.skip[:, None] * wide["value"][row]
        return y


def taken(rows: Rows, index: Sequence[int]) -> Rows:
    return {name: np.ascontiguousarray(x[list(index)]) for name, x in rows.items()}


def joined(parts: Sequence[Rows]) -> Rows:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass
class Text:
    """A text that is read in steps: where its state is, and what of its log was accepted."""

    rows: Rows
    slots: list[int]  # two of its own
    lane: int
    read: int = 0  # rows that are committed
    path: list[int] = field(default_factory=list)
    results: list[np.ndarray] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(next(iter(self.rows.values())))


@dataclass
class Draft:
    """What of a text goes through a step: the rows of its tree, and those among them that are the
    text's next ones."""

    rows: Rows
    parents: list[int]
    right: list[int]
    certain: int
    accepted: int


def chunk(text: Text, count: int) -> Draft:
    """Rows that are certain."""
    count = min(count, text.length - text.read)
    here = range(text.read, text.read + count)
    return Draft(
        taken(text.rows, here), list(range(-1, count - 1)), list(range(count)), count, count
    )


def tree(text: Text, kind: Kind, rng: np.random.Generator, certain: int = 0) -> Draft:
    """The text's next rows among others of no text, in a random order; some are accepted."""
    count = min(int(rng.integers(1, 6)), text.length - text.read)
    certain = min(certain, count)
    wrong = int(rng.integers(0, 12))
    after = list(rng.permutation([True] * (count - certain) + [False] * wrong))
    if certain == 0:
        after.remove(True)
    others, next_right = kind.rows(max(wrong, 1), int(rng.integers(1 << 30))), 0
    parents, right, parts = [], [], []
    for is_right in [True] * (certain or 1) + after:
        node = len(parents)
        if is_right:
            parents.append(right[-1] if right else -1)
            right.append(node)
            parts.append(taken(text.rows, [text.read + next_right]))
            next_right += 1
        else:
            parents.append(int(rng.integers(max(certain - 1, 0), node)))
            parts.append(taken(others, [int(rng.integers(wrong))]))
    accepted = int(rng.integers(max(certain, 1), count + 1))
    return Draft(joined(parts), parents, right, certain, accepted)


class Memory:
    """Slots and logs of a layer, and the steps that texts take together."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.arrays = kind.memory()
        self.due = np.zeros(LANES, np.uint8)

    def start(self, text: Text) -> None:
        self.arrays[0][text.slots[0]] = 0

    def step(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[np.ndarray]:
        """Results of each text's tree. What was accepted is kept as its results."""
        spans: list[Span] = []
        for text, draft in zip(texts, drafts, strict=True):
            self.due[text.lane] = bool(text.path)
            write = text.slots[1 if draft.certain else 0]
            spans.append((draft.parents, text.slots[0], write, text.lane, text.path, draft.certain))
        y = self.kind.run(joined([d.rows for d in drafts]), spans, self.arrays, self.due)
        assert not self.due.any()
        cuts = np.cumsum([len(draft.parents) for draft in drafts])[:-1]
        parts = np.split(y, cuts)
        for text, draft, part in zip(texts, drafts, parts, strict=True):
            kept = draft.right[: draft.accepted]
            text.results.extend(part[kept])
            text.read += draft.accepted
            text.path = [node - draft.certain for node in kept if node >= draft.certain]
            if draft.certain:
                text.slots.reverse()
                self.arrays[0][text.slots[1]] = np.nan
        return parts

    def state(self, text: Text) -> np.ndarray:
        """Behind everything that was accepted: a step of no rows folds it."""
        self.due[text.lane] = bool(text.path)
        empty = taken(text.rows, [])
        slot = text.slots[0]
        self.kind.run(empty, [([], slot, slot, text.lane, text.path, 0)], self.arrays, self.due)
        text.path = []
        return self.arrays[0][slot].copy()
