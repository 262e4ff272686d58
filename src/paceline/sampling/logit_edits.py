"""Grammars, penalties, biases and masks: what a request's parameters make of its logits.

Where the native kernels are present they do the same while they sample. Words that an output must
not hold are spelled in token ids by :func:`in_token_ids`; the last token of each is forbidden where
the others stand before it. Knows no temperature, no filters and no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingRow:
    """One row of logits: whose it is, and the draft tokens between its tokens and this row.

    Attributes:
        params: how to sample; the request's own unless a draft ranks differently.
        mask: the tokens that a grammar allows here, as in
            :class:`~paceline.request.request.Constraint`; None allows all. See :meth:`allowed`.
    """

    request: Request
    path: Sequence[int] = ()
    params: SamplingParams | None = None
    mask: bytes | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.params or self.request.params

    @property
    def position(self) -> int:
        """Index of the token to be emitted, in prompt plus output."""
        return len(self.request.token_ids) + len(self.path)

    @property
    def is_plain_greedy(self) -> bool:
        """The token is the arg-max of the raw logits."""
        return self.mask is None and self.sampling.is_plain_greedy

    def allowed(self, vocab_size: int) -> bytes | None:
        """The mask without the tokens that would complete one of ``bad_words_ids`` here."""
        words = self.sampling.bad_words_ids
        if not words:
            return self.mask
        request, most = self.request, max(map(len, words)) - 1
        begin = max(request.prompt_len, len(request.token_ids) - most)
        before = [*request.token_ids[begin:], *self.path]
        # A word of one token has no prefix, and every text ends with that.
        found = [last for *prefix, last in words if _ends_with(before, prefix)]
        if not found:
            return self.mask
        bits = bytearray(b"\xff" * -(-vocab_size // 8) if self.mask is None else self.mask)
        for token_id in found:
            if token_id >> 3 < len(bits):
                bits[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(bits)


def edit_logits(
    logits: npt.NDArray[np.float32], rows: Sequence[SamplingRow]
) -> npt.NDArray[np.float32]:
    """Grammar, penalties, bias and masks, in that order; a copy when anything changes."""
    edited = logits
    for index, row in enumerate(rows):
        params = row.sampling
        mask = row.allowed(logits.shape[1])
        if mask is None and (params.is_plain_greedy or not _is_edited(params)):
            continue
        if edited is logits:
            edited = logits.copy()
        if mask is not None:
            edited[index, ~_allowed(mask, logits.shape[1])] = -np.inf
        _edit_row(edited[index], row, params)
    return edited


def _ends_with(tokens: list[int], end: list[int]) -> bool:
    at = len(tokens) - len(end)
    return at >= 0 and tokens[at:] == end


def _allowed(mask: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    whole = mask.ljust(-(-vocab_size // 8), b"\0")  # what lies beyond its end is not allowed
    bits = np.unpackbits(np.frombuffer(whole, np.uint8), count=vocab_size, bitorder="little")
    return bits.astype(bool)


def _is_edited(params: SamplingParams) -> bool:
    return (
        params.uses_penalties
        or bool(params.logit_bias)
        or bool(params.banned_token_ids)
        or params.allowed_token_ids is not None
        or params.min_tokens > 0
    )


def _edit_row(z: npt.NDArray[np.float32], row: SamplingRow, params: SamplingParams) -> None:
    request = row.request
    if params.uses_penalties:
        _penalise(z, row, params)
    for token_id, bias in params.logit_bias.items():
        z[token_id] += np.float32(bias)
    if params.banned_token_ids:
        z[list(params.banned_token_ids)] = -np.inf
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        kept = z[allowed]
        z[:] = -np.inf
        z[allowed] = kept
    if request.num_output_tokens + len(row.path) < params.min_tokens:
        z[[*request.eos_token_ids, *params.stop_token_ids]] = -np.inf


def _penalise(z: npt.NDArray[np.float32], row: SamplingRow, params: SamplingParams) -> None:
    request = row.request
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*request.token_ids, *row.path], dtype=np.int64))
        penalty = np.float32(params.repetition_penalty)
        values = z[seen]
        z[seen] = np.where(values > 0, values / penalty, values * penalty)
    output = np.asarray([*request.output_token_ids, *row.path], dtype=np.int64)
    tokens, counts = np.unique(output, return_counts=True)
    z[tokens] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    z[tokens] -= np.float32(params.presence_penalty)


Spelling = tuple[int, ...]


def in_token_ids(
    params: SamplingParams, spell: Callable[[str], Sequence[Sequence[int]]]
) -> SamplingParams:
    """The parameters with ``bad_words`` as token ids; words of one token are banned everywhere.

    As in vLLM each word counts as it is and behind a space, whatever space it comes with; so does
    one of nothing but white space, which keeps it. ``spell`` gives the ways in which encoding
    writes a text, at a text's beginning and within one. The same letters in other tokens are not
    found.
    """
    if not params.bad_words:
        return params
    found = [tuple(ids) for ids in params.bad_words_ids]
    for word in params.bad_words:
        found += _spellings(word.lstrip() or word, spell)
    single = [ids[0] for ids in found if len(ids) == 1]
    return replace(
        params,
        bad_words=(),
        bad_words_ids=tuple(dict.fromkeys(ids for ids in found if len(ids) > 1)),
        banned_token_ids=(*params.banned_token_ids, *dict.fromkeys(single)),
    )


def _spellings(word: str, spell: Callable[[str], Sequence[Sequence[int]]]) -> list[Spelling]:
    """Of a word, and of it behind a space, but those that forbidding a shorter one forbids too."""
    spelled = dict.fromkeys(tuple(ids) for text in (word, f" {word}") for ids in spell(text) if ids)
    return [ids for ids in spelled if not any(_ends_in(ids, other) for other in spelled)]


def _ends_in(ids: Spelling, end: Spelling) -> bool:
    return len(ids) > len(end) and ids[-len(end) :] == end
