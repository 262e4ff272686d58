"""What the target makes of traces, kept on disk, and the batches of rows that heads train on.

Two files per group of traces, named after all that they depend on, so that they can be deleted at
any time and are made again where they are needed. Training reads rows through a memory map: packs
of whole traces, epoch after epoch. Everything is a function of (traces, seed, pack number), so a
run that continues needs to know only how many packs it has seen. Knows no head and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from paceline.cache.model_runner import ModelRunner
from paceline.core.errors import TrainingError
from paceline.core.files import whole_file
from paceline.request.span import Span
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


class FeatureRows(NamedTuple):
    """What the target makes of a trace.

    Attributes:
        features: float32 ``[rows, taps * hidden_size]``.
        top_ids, top_probs: ``[wanted, k]``, its likeliest tokens where wanted rows predict.
    """

    features: Tensor
    top_ids: Tensor
    top_probs: Tensor


ReadRows = Callable[[Sequence[int]], FeatureRows]
"""Those of traces, one after another, by the traces' numbers."""


def join_rows(parts: Sequence[FeatureRows]) -> FeatureRows:
    """The rows of several texts, one after another."""
    return FeatureRows(*(torch.cat(each) for each in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class HeadBatch:
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
    def of(traces: Sequence[Trace], made: FeatureRows) -> HeadBatch:
        rows = np.array([num_rows(t) for t in traces])
        wanted = np.array([num_wanted(t) for t in traces])
        positions, ends = _ranges(rows), np.cumsum(rows)
        ranks = _ranges(wanted)
        places = np.repeat(ends - wanted, wanted) + ranks
        return HeadBatch(
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
    ranges: Ints = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranges


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

    def take(self, start: int, count: int) -> HeadBatch:
        """Packs ``start`` to ``start + count`` as one batch."""
        numbers = np.concatenate([self._pack(n) for n in range(start, start + count)])
        return HeadBatch.of([self._traces[i] for i in numbers], self._read(numbers.tolist()))

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


Array = npt.NDArray[Any]
CODES = torch.float8_e4m3fn
LARGEST = 448.0  # of these codes
SHARD = 64  # traces of a file
FORWARD_ROWS = 512
TOP = 32
TOP_ROW = np.dtype([("ids", "<i4", TOP), ("logprobs", "<f2", TOP)])


def pack_rows(features: Tensor) -> Array:
    """Float32 ``[rows, taps, hidden]`` to ``[rows, taps, hidden + 4]`` bytes: codes and a scale.

    Codes are 8-bit floats: their error is relative to each number, and residual streams have a few
    numbers that are hundreds of times larger than the others.
    """
    scales = features.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    codes = (features / scales).to(CODES).view(torch.uint8)
    packed: Array = torch.cat((codes, scales.view(torch.uint8)), dim=-1).numpy()
    return packed


def unpack_rows(packed: Array) -> Tensor:
    """What was packed, as ``[rows, taps * hidden]``."""
    whole = torch.as_tensor(np.array(packed))
    scales = whole[..., -4:].contiguous().view(torch.float32)
    return (whole[..., :-4].view(CODES).float() * scales).flatten(1)


class FeatureFiles:
    """Reads traces' rows by number."""

    def __init__(self, shards: Sequence[Sequence[Trace]], paths: Sequence[Path]) -> None:
        self._places: list[tuple[Array, Array]] = []
        for shard, path in zip(shards, paths, strict=True):
            rows, tops = (np.load(file, mmap_mode="r") for file in _files(path))
            ends = (np.cumsum([count(t) for t in shard])[:-1] for count in (num_rows, num_wanted))
            parts = (np.split(a, at) for a, at in zip((rows, tops), ends, strict=True))
            self._places += zip(*parts, strict=True)

    def __call__(self, numbers: Sequence[int]) -> FeatureRows:
        parts = zip(*(self._places[number] for number in numbers), strict=True)
        rows, tops = (np.concatenate(each) for each in parts)
        probs = torch.as_tensor(tops["logprobs"].astype(np.float32)).exp()
        return FeatureRows(unpack_rows(rows), torch.as_tensor(tops["ids"].astype(np.int64)), probs)


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".features.npy"), path.with_suffix(".tops.npy")


def make_features(
    folders: Sequence[Sequence[Trace]],
    runner: Callable[[], ModelRunner],
    taps: tuple[int, ...],
    folder: Path,
    model: str,
    report: Callable[[int], None] = lambda done: None,
) -> FeatureFiles:
    """Write what is missing or damaged, and open all.

    Args:
        folders: the traces of each, with answers of two tokens or more. One that grows keeps the
            files that it has.
        runner: loads the target; called where a file is missing.
        model: names the target's weights.
        report: is told how many traces are done.

    Raises:
        TrainingError: a file cannot be written, or the target has no room for a trace.
    """
    shards = [each[at : at + SHARD] for each in folders for at in range(0, len(each), SHARD)]
    paths = [folder / _key(shard, taps, model) for shard in shards]
    loaded: ModelRunner | None = None
    done = 0
    for shard, path in zip(shards, paths, strict=True):
        done += len(shard)
        if not _is_whole(path, shard):
            loaded = loaded or runner()
            loaded.taps = taps
            parts = zip(*_forwards(shard, loaded), strict=True)
            for file, arrays in zip(_files(path), parts, strict=True):
                _save(file, np.concatenate(arrays))
            report(done)
    return FeatureFiles(shards, paths)


def _is_whole(path: Path, shard: Sequence[Trace]) -> bool:
    """Whether both files are there and have the rows of all traces."""
    try:
        rows, tops = (np.load(file, mmap_mode="r") for file in _files(path))
    except (OSError, ValueError, EOFError):
        return False
    counts = (sum(map(num_rows, shard)),), (sum(map(num_wanted, shard)),)
    return (rows.shape[:1], tops.shape[:1]) == counts


def _save(path: Path, array: Array) -> None:
    with whole_file(path, TrainingError, make_folder=True) as partial, partial.open("wb") as file:
        np.save(file, array)


def _key(shard: Sequence[Trace], taps: tuple[int, ...], model: str) -> str:
    digest = xxhash.xxh3_128(f"{model} {taps} {CODES} {TOP}".encode())
    for trace in shard:
        digest.update(np.array([trace.prompt_len, *trace.token_ids], "<i4").tobytes())
    return digest.hexdigest()


def _forwards(traces: Sequence[Trace], runner: ModelRunner) -> Iterator[tuple[Array, Array]]:
    """Packed features and likeliest tokens of all traces, in order; several share a forward."""
    group: list[Trace] = []
    for trace in traces:
        if group and sum(map(num_rows, group)) + num_rows(trace) > FORWARD_ROWS:
            yield _forward(group, runner)
            group = []
        group.append(trace)
    yield _forward(group, runner)


def _forward(traces: Sequence[Trace], runner: ModelRunner) -> tuple[Array, Array]:
    kv, spans = runner.kv, list[Span]()
    for index, trace in enumerate(traces):
        tokens = trace.token_ids[:-1].tolist()
        kv.open(index)
        if not kv.reserve(index, len(tokens), certain=len(tokens)):
            raise TrainingError(f"the KV cache has no room for a trace of {len(tokens)} tokens")
        wanted = range(trace.prompt_len, len(tokens))
        spans.append(Span(index, 0, tokens, range(-1, len(tokens) - 1), wanted))
    result = runner.forward(runner.pack(spans))
    assert result.features is not None
    ends = np.cumsum([len(span.token_ids) for span in spans])
    rows = np.delete(np.arange(ends[-1]), ends - 1)  # of the last token nothing is drafted
    for index in range(len(traces)):
        kv.free(index)
    return pack_rows(torch.from_numpy(result.features[rows])), top_rows(
        torch.from_numpy(result.logits)
    )


def top_rows(logits: Tensor) -> Array:
    """The likeliest tokens of ``[rows, vocab_size]``, best first, as :data:`TOP_ROW`."""
    ids, logprobs = likeliest(logits)
    count = ids.shape[1]
    rows = np.zeros(len(logits), TOP_ROW)
    rows["logprobs"] = -np.inf
    rows["ids"][:, :count] = ids.numpy()
    rows["logprobs"][:, :count] = logprobs.numpy()
    return rows


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, best first, and their log-probabilities."""
    best = logits.topk(min(TOP, logits.shape[1]))
    return best.indices, best.values - logits.logsumexp(-1, keepdim=True)
