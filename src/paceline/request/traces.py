"""Traces: what a target model answered, token by token, with its log-probabilities, on disk.

A folder with ``meta.json`` and shards ``shard-00000.npz``, each of which holds

    token_ids     int32 [total]       prompt and output of each trace, one after another
    offsets       int32 [n + 1]       where each begins and ends in ``token_ids``
    prompt_lens   int32 [n]           tokens of its prompt
    prompt_index  int32 [n]           its place in the file of prompts
    row_offsets   int32 [n + 1]       where its rows begin and end; one row per output token
    logprobs      float32 [rows]      of the emitted token
    top_ids       int32 [rows, k]     the likeliest tokens, best first
    top_logprobs  float32 [rows, k]
    experts_read  int32 [rows, u]     of a mixture, distinct pairs of a layer and an expert that
                                      2, 4, 8, 16 and 32 tokens read together, the row's own and
                                      those after it; older traces have none

Row i of a trace is the distribution that predicted its output token i. Files are untrusted: sizes
are checked against the file before anything is read. Knows no model and no prompts file.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import TraceError
from paceline.core.files import whole_file, write_text

FORMAT = "paceline-traces"
FORMAT_VERSION = 1
META = "meta.json"
ADDED_KEYS = frozenset({"model_fingerprint"})
"""Which older traces do not have; those are continued without them."""
MODEL_SOURCE = "model_source"
"""Key of where the model lay, or by which name it was loaded; None is the embedded one."""
UNION_ROWS = (2, 4, 8, 16, 32)
"""Tokens that each column of ``experts_read`` is of; a single one reads the same everywhere."""
_ARRAYS = {
    "token_ids": ("<i4", 1),
    "offsets": ("<i4", 1),
    "prompt_lens": ("<i4", 1),
    "prompt_index": ("<i4", 1),
    "row_offsets": ("<i4", 1),
    "logprobs": ("<f4", 1),
    "top_ids": ("<i4", 2),
    "top_logprobs": ("<f4", 2),
}
_EXPERTS = {"experts_read": ("<i4", 2)}
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer with the rows that predicted it.

    Attributes:
        token_ids: prompt and output.
        logprobs: of each output token, ``[n]``.
        top_ids, top_logprobs: ``[n, k]``, best first.
        experts_read: ``[n, len(UNION_ROWS)]``; None where it is not known, and of dense models.
    """

    prompt_index: int
    prompt_len: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    experts_read: NDArray[np.int32] | None = None

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        return self.token_ids[self.prompt_len :]


class TraceWriter:
    """Adds shards to a folder, each whole or not at all.

    Args:
        meta: what identifies the traces: model, vocabulary, parameters. A folder that has traces
            of anything else is refused.

    Raises:
        TraceError: the folder holds other traces, or cannot be written.
    """

    def __init__(self, folder: str | Path, meta: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        wanted = {"format": FORMAT, "format_version": FORMAT_VERSION, **meta}
        if (self.folder / META).exists():
            _check_same(read_meta(self.folder), wanted, self.folder)
        else:
            text = json.dumps(wanted, indent=2) + "\n"
            write_text(self.folder / META, text, TraceError, make_folder=True)
        self.num_shards = self._complete_shards()

    def _complete_shards(self) -> int:
        """Shards that are there and whole, counted up to the first that is not."""
        count = 0
        while (path := self._path(count)).exists():
            try:
                _read_shard(path)
            except TraceError:
                break
            count += 1
        return count

    def _path(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.npz"

    def write_shard(self, traces: list[Trace]) -> None:
        """Write the next shard; ``TraceError`` where that fails."""
        lengths = [len(trace.token_ids) for trace in traces]
        rows = [len(trace.logprobs) for trace in traces]
        arrays = {
            "token_ids": np.concatenate([t.token_ids for t in traces]),
            "offsets": np.cumsum([0, *lengths]),
            "prompt_lens": np.array([t.prompt_len for t in traces]),
            "prompt_index": np.array([t.prompt_index for t in traces]),
            "row_offsets": np.cumsum([0, *rows]),
            "logprobs": np.concatenate([t.logprobs for t in traces]),
            "top_ids": np.concatenate([t.top_ids for t in traces]),
            "top_logprobs": np.concatenate([t.top_logprobs for t in traces]),
        }
        kinds, experts = _ARRAYS, [t.experts_read for t in traces if t.experts_read is not None]
        if len(experts) == len(traces):
            kinds, arrays["experts_read"] = _ARRAYS | _EXPERTS, np.concatenate(experts)
        typed = {name: arrays[name].astype(kinds[name][0]) for name in kinds}
        problem = _shard_problem(typed)
        assert problem is None, problem
        path = self._path(self.num_shards)
        with whole_file(path, TraceError) as partial, partial.open("wb") as file:
            np.savez(file, **typed)  # type: ignore[arg-type]
        self.num_shards += 1


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    # As JSON would have it: a tuple that was written is a list when it is read.
    said = json.loads(json.dumps(wanted))
    wanted = {key: said[key] for key in said if key in found or key not in ADDED_KEYS}
    compared = {**found, **wanted}.keys() - {MODEL_SOURCE}  # a model may have been moved
    differing = [key for key in sorted(compared) if found.get(key) != wanted.get(key)]
    if differing:
        key = differing[0]
        raise TraceError(
            f"{folder} holds traces of something else: {key} is {found.get(key)!r} there and "
            f"{wanted.get(key)!r} here; choose another folder"
        )


def read_meta(folder: str | Path) -> dict[str, Any]:
    """What the traces of a folder are of.

    Raises:
        TraceError: there are none, or they are of a format that this version does not know.
    """
    path = Path(folder) / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise TraceError(f"{path} does not describe traces")
    if meta.get("format_version") != FORMAT_VERSION:
        raise TraceError(
            f"{path} has format version {meta.get('format_version')!r}; known: {FORMAT_VERSION}"
        )
    return meta


def read_traces(folder: str | Path) -> Iterator[Trace]:
    """All traces of a folder, in order.

    Raises:
        TraceError: the folder holds none, or a file is damaged.
    """
    read_meta(folder)
    for path in sorted(Path(folder).glob("shard-*.npz")):
        if re.fullmatch(r"shard-\d{5,}\.npz", path.name):
            yield from _read_shard(path)


def _read_shard(path: Path) -> list[Trace]:
    try:
        with zipfile.ZipFile(path) as archive:
            extra = _EXPERTS if "experts_read.npy" in archive.namelist() else {}
            arrays = {name: _read_array(archive, name, path) for name in (*_ARRAYS, *extra)}
    except (OSError, ValueError, KeyError, EOFError, SyntaxError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path} is damaged: {error}") from error
    problem = _shard_problem(arrays)
    if problem:
        raise TraceError(f"{path} is damaged: {problem}")
    ends, rows = arrays["offsets"].tolist(), arrays["row_offsets"].tolist()
    experts = arrays.get("experts_read")
    return [
        Trace(
            prompt_index=int(arrays["prompt_index"][i]),
            prompt_len=int(arrays["prompt_lens"][i]),
            token_ids=arrays["token_ids"][ends[i] : ends[i + 1]],
            logprobs=arrays["logprobs"][rows[i] : rows[i + 1]],
            top_ids=arrays["top_ids"][rows[i] : rows[i + 1]],
            top_logprobs=arrays["top_logprobs"][rows[i] : rows[i + 1]],
            experts_read=None if experts is None else experts[rows[i] : rows[i + 1]],
        )
        for i in range(len(ends) - 1)
    ]


def _read_array(archive: zipfile.ZipFile, name: str, path: Path) -> NDArray[Any]:
    """One array, after its stated size was compared with the bytes that are there."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > path.stat().st_size:
        raise ValueError(f"{name} is compressed, or larger than the file")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{name} has an unknown header")
        shape, by_columns, dtype = _HEADERS[version](file)
        data = file.read()
    kind, dimensions = (_ARRAYS | _EXPERTS)[name]
    if by_columns or len(shape) != dimensions or dtype != np.dtype(kind):
        raise ValueError(f"{name} is {dtype} of shape {shape}; {kind}, {dimensions}-d is expected")
    count = 1
    for size in shape:
        count *= size
    if min(shape) < 0 or count * dtype.itemsize != len(data):
        raise ValueError(f"{name} states {count} numbers and has {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def _shard_problem(arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """What does not fit together in a shard, or None."""
    tokens, offsets, row_offsets = (arrays[n] for n in ("token_ids", "offsets", "row_offsets"))
    prompt_lens, rows = arrays["prompt_lens"], arrays["logprobs"]
    count = len(prompt_lens)
    if not len(offsets) == len(row_offsets) == count + 1 or len(arrays["prompt_index"]) != count:
        return "its arrays disagree about the number of traces"
    for steps, length in ((offsets, len(tokens)), (row_offsets, len(rows))):
        if steps[0] != 0 or steps[-1] != length or (np.diff(steps) < 0).any():
            return "its offsets do not run through its data"
    outputs = np.diff(offsets) - prompt_lens
    if (prompt_lens < 1).any() or (outputs < 0).any():
        return "a prompt is empty, or longer than its trace"
    if (outputs != np.diff(row_offsets)).any():
        return "the number of rows is not that of output tokens"
    if arrays["top_ids"].shape != arrays["top_logprobs"].shape:
        return "top_ids and top_logprobs differ in shape"
    if len(arrays["top_ids"]) != len(rows):
        return "it has not one row of likeliest tokens per output token"
    experts = arrays.get("experts_read")
    if experts is not None and experts.shape != (len(rows), len(UNION_ROWS)):
        return "it has not one row of experts per output token"
    if (tokens < 0).any() or (arrays["top_ids"] < 0).any():
        return "a token id is negative"
    return None
