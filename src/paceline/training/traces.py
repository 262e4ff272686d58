"""The target's own completions, as ``paceline trace`` writes them. Reads what training needs.

A folder holds ``meta.json`` and shards ``shard-00000.npz``, ...; each shard has flat int32 arrays:
``token_ids``, ``offsets`` (sequence i is ``token_ids[offsets[i] : offsets[i + 1]]``) and
``prompt_lens``. Other arrays are ignored.
"""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

import numpy as np

from paceline.errors import TrainingError
from paceline.training.data import TokenArray, TokenDocuments


def read_traces(folder: str | Path, vocab_size: int) -> TokenDocuments:
    """All sequences of a trace folder, prompts included.

    Raises:
        TrainingError: there is no trace in the folder, a shard is damaged, or holds a token outside
            the vocabulary (the trace is of another model).
    """
    folder = Path(folder)
    if not (folder / "meta.json").is_file():
        raise TrainingError(f"{folder} has no meta.json; it is no folder of traces")
    shards = sorted(folder.glob("shard-*.npz"))
    if not shards:
        raise TrainingError(f"{folder} holds no shards")
    sequences: list[TokenArray] = []
    for shard in shards:
        sequences += _read_shard(shard, vocab_size)
    return TokenDocuments.of(sequences)


def _read_shard(path: Path, vocab_size: int) -> list[TokenArray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens, offsets = arrays["token_ids"], arrays["offsets"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise TrainingError(f"{path} cannot be read as a shard of traces: {error}") from error
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
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise TrainingError(
            f"{path} has token ids outside the vocabulary of {vocab_size}; it is of another model"
        )
    ids = tokens.astype(np.int32, copy=False)
    pairs = itertools.pairwise(offsets)
    return [ids[start:stop] for start, stop in pairs if stop > start]
