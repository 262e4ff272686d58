"""The target's own completions, as ``paceline trace`` writes them. Reads what training needs.

A folder holds ``meta.json`` and shards ``shard-00000.npz``, ...; each shard has flat int32 arrays:
``token_ids``, ``offsets`` (sequence i is ``token_ids[offsets[i] : offsets[i + 1]]``) and
``prompt_lens``. With its log-probabilities it also has ``top_ids`` and ``top_logprobs``, a row of
the likeliest tokens per output token, in the order of the sequences.
"""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import TrainingError
from paceline.training.data import TokenArray, TokenDocuments


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion, with what the target thought of its every token.

    Attributes:
        token_ids: prompt and output.
        top_ids, top_logprobs: ``[output tokens, k]``, best first.
    """

    token_ids: TokenArray
    prompt_len: int
    top_ids: TokenArray
    top_logprobs: npt.NDArray[np.float32]


def read_traces(folder: str | Path, vocab_size: int) -> TokenDocuments:
    """All sequences of a trace folder, prompts included.

    Raises:
        TrainingError: there is no trace in the folder, a shard is damaged, or holds a token outside
            the vocabulary (the trace is of another model).
    """
    sequences: list[TokenArray] = []
    for shard in _shards(folder):
        arrays = _read_arrays(shard, ("token_ids", "offsets"))
        tokens, offsets = arrays["token_ids"], arrays["offsets"]
        if len(tokens) and tokens.max() >= vocab_size:
            raise TrainingError(
                f"{shard} has token ids outside the vocabulary of {vocab_size}; it is of another "
                "model"
            )
        pairs = itertools.pairwise(offsets)
        sequences += [tokens[start:stop] for start, stop in pairs if stop > start]
    return TokenDocuments.of(sequences)


def read_answers(folder: str | Path) -> Iterator[Answer]:
    """All completions of a trace folder, with their likeliest tokens.

    Raises:
        TrainingError: there is no trace in the folder, or a shard is damaged.
    """
    names = ("token_ids", "offsets", "prompt_lens", "top_ids", "top_logprobs")
    for shard in _shards(folder):
        arrays = _read_arrays(shard, names)
        lengths, prompts = np.diff(arrays["offsets"]), arrays["prompt_lens"]
        ids, logprobs = arrays["top_ids"], arrays["top_logprobs"]
        if prompts.shape != lengths.shape or (prompts < 0).any() or (prompts > lengths).any():
            raise TrainingError(f"{shard} is damaged: its prompts do not fit its sequences")
        ends = np.cumsum(lengths - prompts)
        if ids.ndim != 2 or ids.shape != logprobs.shape or len(ids) != ends[-1:].sum():
            raise TrainingError(f"{shard} is damaged: it has not one row per output token")
        if ids.size and (ids.min() < 0 or not (logprobs <= 0.0).all()):
            raise TrainingError(f"{shard} is damaged: its log-probabilities are none")
        bounds = itertools.pairwise(arrays["offsets"])
        for (start, stop), prompt, end in zip(bounds, prompts.tolist(), ends.tolist(), strict=True):
            rows = slice(end - (stop - start - prompt), end)
            tokens = arrays["token_ids"][start:stop]
            yield Answer(tokens, prompt, ids[rows], logprobs[rows])


def read_fingerprint(folder: str | Path) -> str | None:
    """Of the vocabulary that the traces of a folder are in; None where they do not say.

    Raises:
        TrainingError: the folder holds no traces.
    """
    try:
        meta = json.loads((Path(folder) / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TrainingError(f"{folder} has no readable meta.json: {error}") from error
    found = meta.get("vocab_fingerprint") if isinstance(meta, dict) else None
    return found if isinstance(found, str) else None


def _shards(folder: str | Path) -> list[Path]:
    folder = Path(folder)
    if not (folder / "meta.json").is_file():
        raise TrainingError(f"{folder} has no meta.json; it is no folder of traces")
    shards = sorted(folder.glob("shard-*.npz"))
    if not shards:
        raise TrainingError(f"{folder} holds no shards")
    return shards


def _read_arrays(path: Path, names: tuple[str, ...]) -> Mapping[str, npt.NDArray[Any]]:
    """Arrays of a shard, integers as int32, in which offsets fit the tokens."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise TrainingError(f"{path} cannot be read as a shard of traces: {error}") from error
    tokens, offsets = arrays["token_ids"], arrays["offsets"]
    well_formed = (
        tokens.ndim == offsets.ndim == 1
        and tokens.dtype.kind == offsets.dtype.kind == "i"
        and len(offsets) >= 1
        and offsets[0] == 0
        and offsets[-1] == len(tokens)
        and bool((np.diff(offsets) >= 0).all())
    )
    if not well_formed:
        raise TrainingError(f"{path} is damaged: its offsets do not fit its tokens")
    if len(tokens) and tokens.min() < 0:
        raise TrainingError(f"{path} is damaged: it has a negative token id")
    return arrays | {"token_ids": tokens.astype(np.int32, copy=False)}
