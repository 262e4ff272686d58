"""The target's features of traces, on disk in 8 bits. Owns the files; knows no head.

One file per trace shard, named after all that it depends on, so that it can be deleted at any time
and is made again where it is needed. A row has for each tap the codes of its numbers and a float32
scale; training reads rows through a memory map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from paceline.errors import TrainingError
from paceline.runtime.model_runner import ModelRunner
from paceline.span import Span
from paceline.traces import Trace
from paceline.training.heads.batches import num_rows
from paceline.writing import whole_file

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
CODES = torch.float8_e4m3fn
LARGEST = 448.0  # of these codes
FORWARD_ROWS = 512


def pack_rows(features: torch.Tensor) -> Bytes:
    """Float32 ``[rows, taps, hidden]`` to ``[rows, taps, hidden + 4]`` bytes.

    Codes are 8-bit floats: their error is relative to each number, and residual streams have a few
    numbers that are hundreds of times larger than the others.
    """
    scales = features.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    codes = (features / scales).to(CODES).view(torch.uint8)
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1).numpy()


def unpack_rows(packed: Bytes) -> Floats:
    """What was packed, as ``[rows, taps * hidden]``."""
    whole = torch.from_numpy(np.array(packed))
    scales = whole[..., -4:].contiguous().view(torch.float32)
    return (whole[..., :-4].view(CODES).float() * scales).flatten(1).numpy()


class FeatureFiles:
    """Reads traces' features by number.

    Args:
        traces: in the order in which they are numbered, shard by shard.
    """

    def __init__(self, traces: Sequence[Trace], files: Sequence[tuple[Path, int]]) -> None:
        """``files``: and how many of the traces each holds."""
        self._places: list[tuple[Bytes, int, int]] = []
        left = iter(traces)
        for path, count in files:
            rows, at = np.load(path, mmap_mode="r"), 0
            for _ in range(count):
                end = at + num_rows(next(left))
                self._places.append((rows, at, end))
                at = end

    def __call__(self, number: int) -> Floats:
        rows, begin, end = self._places[number]
        return unpack_rows(rows[begin:end])


def make_features(
    shards: Sequence[Sequence[Trace]],
    runner: Callable[[], ModelRunner],
    taps: tuple[int, ...],
    folder: Path,
    model: str,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> FeatureFiles:
    """Write what is missing, and open all.

    Args:
        runner: loads the target; called where a file is missing.
        model: names the target's weights.
        report: is told the traces done, and all.

    Raises:
        TrainingError: a file cannot be written.
    """
    total, done, files = sum(map(len, shards)), 0, list[tuple[Path, int]]()
    loaded: ModelRunner | None = None
    for shard in shards:
        path = folder / f"features-{_key(shard, taps, model)}.npy"
        if not path.is_file():
            loaded = loaded or runner()
            loaded.taps = taps
            rows = np.concatenate(list(shard_features(shard, loaded)))
            with (
                whole_file(path, TrainingError, make_folder=True) as partial,
                partial.open("wb") as file,
            ):
                np.save(file, rows)
        files.append((path, len(shard)))
        done += len(shard)
        report(done, total)
    return FeatureFiles([trace for shard in shards for trace in shard], files)


def _key(shard: Sequence[Trace], taps: tuple[int, ...], model: str) -> str:
    digest = xxhash.xxh3_128(f"{model} {taps} {CODES}".encode())
    for trace in shard:
        digest.update(np.array([len(trace.token_ids)], "<i4").tobytes())
        digest.update(trace.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()


def shard_features(traces: Sequence[Trace], runner: ModelRunner) -> Iterator[Bytes]:
    """The packed rows of each trace, in order; several traces share a forward."""
    group: list[Trace] = []
    for trace in traces:
        if group and sum(map(num_rows, group)) + num_rows(trace) > FORWARD_ROWS:
            yield from _forward(group, runner)
            group = []
        group.append(trace)
    yield from _forward(group, runner)


def _forward(traces: Sequence[Trace], runner: ModelRunner) -> Iterator[Bytes]:
    kv, spans, rows = runner.kv, list[Span](), [num_rows(trace) for trace in traces]
    for index, (trace, count) in enumerate(zip(traces, rows, strict=True)):
        kv.open(index)
        if not count:
            continue
        if not kv.reserve(index, count):
            raise TrainingError(f"the KV cache has no room for a trace of {count} tokens")
        spans.append(Span.chunk(index, 0, trace.token_ids[:count].tolist(), sample=False))
    if spans:
        features = runner.forward(runner.pack(spans)).features
        assert features is not None
        packed = pack_rows(features.cpu())
        yield from np.split(packed, np.cumsum([len(s.token_ids) for s in spans])[:-1])
    for index in range(len(traces)):
        kv.free(index)
