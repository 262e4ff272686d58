"""What the target makes of traces, on disk: features in 8 bits, and its likeliest tokens.

Two files per group of traces, named after all that they depend on, so that they can be deleted at
any time and are made again where they are needed. Training reads rows through a memory map. Owns
these files; knows no head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from paceline.cache.model_runner import ModelRunner
from paceline.core.errors import TrainingError
from paceline.core.writing import whole_file
from paceline.request.span import Span
from paceline.request.traces import Trace
from paceline.training.heads.batches import Rows, num_rows, num_wanted

Tensor = torch.Tensor
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

    def __call__(self, numbers: Sequence[int]) -> Rows:
        parts = zip(*(self._places[number] for number in numbers), strict=True)
        rows, tops = (np.concatenate(each) for each in parts)
        probs = torch.as_tensor(tops["logprobs"].astype(np.float32)).exp()
        return Rows(unpack_rows(rows), torch.as_tensor(tops["ids"].astype(np.int64)), probs)


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
    found = np.zeros(len(logits), TOP_ROW)
    found["logprobs"] = -np.inf
    found["ids"][:, :count] = ids.numpy()
    found["logprobs"][:, :count] = logprobs.numpy()
    return found


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, best first, and their log-probabilities."""
    best = logits.topk(min(TOP, logits.shape[1]))
    return best.indices, best.values - logits.logsumexp(-1, keepdim=True)
