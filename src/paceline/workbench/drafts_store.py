"""Recorded drafts on disk: what a draft model would propose at every place of a set of traces.

One safetensors file per recording, with

    positions     int64 [traces + 1]     where each trace's positions begin and end in ``offsets``
    offsets       int64 [positions + 1]  where each position's candidates begin and end
    token_ids     int32 [candidates]
    parents       int32 [candidates]     index within the position, -1 for the first level
    accept_probs  float64 [candidates]   exact, for nodes are ranked by their products

and in its metadata the key, and ``forwards`` of :class:`RecordedDrafts` as JSON.

Position i of a trace follows its prompt and i output tokens. Candidates are those of all levels,
level by level, the children of a node together and best first. Files are untrusted: types, offsets
and values are checked before they are used. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paceline.errors import TraceError
from paceline.workbench.drafts_key import DraftsKey
from paceline.writing import whole_file

if TYPE_CHECKING:
    from paceline.proposers.draft_model.vocabulary import VocabularyPair

MOST_FORWARDS = 1e6
_ARRAYS = {
    "positions": ("I64", np.int64),
    "offsets": ("I64", np.int64),
    "token_ids": ("I32", np.int32),
    "parents": ("I32", np.int32),
    "accept_probs": ("F64", np.float64),
}


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """The arrays that the module's docstring describes, and what they are of.

    Attributes:
        forwards: of the draft, for the first level of a draft and for each further one; others
            than 1 where a token of the target is several of the draft's.
        pair: the vocabularies of target and draft where they are two. Not in the file.
    """

    key: DraftsKey
    positions: NDArray[np.int64]
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    accept_probs: NDArray[np.float64]
    forwards: tuple[float, float] = (1.0, 1.0)
    pair: VocabularyPair | None = None

    def candidates(self, trace: int, position: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and probabilities of everything that was grown at a position."""
        at = int(self.positions[trace]) + position
        assert 0 <= position < int(self.positions[trace + 1]) - int(self.positions[trace])
        part = slice(int(self.offsets[at]), int(self.offsets[at + 1]))
        return (
            self.token_ids[part].tolist(),
            self.parents[part].tolist(),
            self.accept_probs[part].tolist(),
        )


def write_drafts(path: Path, drafts: RecordedDrafts) -> None:
    """Write a file as a whole or not at all.

    Raises:
        TraceError: it cannot be written.
    """
    arrays = {name: getattr(drafts, name) for name in _ARRAYS}
    said = {"key": drafts.key.text, "forwards": json.dumps(drafts.forwards)}
    with whole_file(path, TraceError, make_folder=True) as partial:
        save_file(arrays, partial, said)


def read_drafts(path: Path, key: DraftsKey, lengths: Sequence[int]) -> RecordedDrafts:
    """The drafts in a file.

    Args:
        key: what they must be of.
        lengths: output tokens of each trace.

    Raises:
        TraceError: the file cannot be read, is damaged, or holds drafts of something else.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            said = file.metadata() or {}
            if said.get("key") != key.text:
                raise TraceError(f"{path} holds drafts of something else")
            forwards = _read_forwards(said.get("forwards", "[1.0, 1.0]"))
            arrays: dict[str, Any] = {name: _read_array(file, name) for name in _ARRAYS}
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is damaged: {error}") from error
    problem = _problem(arrays, lengths, key.vocab_size)
    if problem:
        raise TraceError(f"{path} is damaged: {problem}")
    return RecordedDrafts(key, **arrays, forwards=forwards)


def _read_forwards(text: str) -> tuple[float, float]:
    found = json.loads(text)
    if not (isinstance(found, list) and len(found) == 2 and all(map(_is_count, found))):
        raise ValueError(f"forwards is {text}; two numbers above 0 are expected")
    return found[0], found[1]


def _is_count(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < MOST_FORWARDS


def _read_array(file: Any, name: str) -> NDArray[Any]:
    stored = file.get_slice(name)
    kind, shape = stored.get_dtype(), stored.get_shape()
    if kind != _ARRAYS[name][0] or len(shape) != 1:
        raise ValueError(f"{name} is {kind} of shape {shape}; {_ARRAYS[name][0]}, 1-d is expected")
    array: NDArray[Any] = file.get_tensor(name)
    return array


def _problem(
    arrays: dict[str, NDArray[Any]], lengths: Sequence[int], vocab_size: int
) -> str | None:
    """What does not fit together in a file, or None."""
    positions, offsets, tokens, parents, probs = (arrays[name] for name in _ARRAYS)
    if positions.tolist() != np.cumsum([0, *lengths]).tolist():
        return "its positions are not those of the traces"
    if not len(tokens) == len(parents) == len(probs):
        return "its arrays disagree about the number of candidates"
    ends = len(offsets) == positions[-1] + 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
    if not ends or (np.diff(offsets) < 0).any():
        return "its offsets do not run through its candidates"
    index = np.arange(len(parents)) - np.repeat(offsets[:-1], np.diff(offsets))
    if (parents < -1).any() or (parents >= index).any():
        return "a parent does not come before its child"
    if (tokens < 0).any() or (tokens >= vocab_size).any():
        return "a token is not in the vocabulary"
    if not ((probs > 0) & (probs <= 1)).all():
        return "a probability is not above 0 and at most 1"
    return None
