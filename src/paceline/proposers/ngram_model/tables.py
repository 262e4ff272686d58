"""The tables of an n-gram model, and the key of a context in them. Knows no files and no drafts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import ConfigError

MIN_ORDER, MAX_ORDER = 2, 5
MAX_CONTINUATIONS = 64
"""Most continuations of one context: a look-up goes through all of them."""
CONTEXT_BYTES, CONTINUATION_BYTES, FIXED_BYTES = 20, 8, 512
"""What one of them takes in the file at most, and what is there once, unigrams aside."""
MAX_BUCKET_BITS = 26
NO_PROMPTS = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The contexts of one length and what follows them.

    Attributes:
        keys: XXH3-64 of each context's tokens as little-endian uint32, ascending ``[contexts]``.
        buckets: keys whose highest bits are b are those from ``buckets[b]`` to ``buckets[b + 1]``.
        starts: where each context's continuations begin and end ``[contexts + 1]``.
        lower_weights: what each context leaves to the distribution of the next shorter one.
        tokens, values: the continuations, of each context the likeliest first.
    """

    keys: NDArray[np.uint64]
    buckets: NDArray[np.uint32]
    starts: NDArray[np.uint32]
    lower_weights: NDArray[np.float32]
    tokens: NDArray[np.uint32]
    values: NDArray[np.float32]

    @property
    def bucket_bits(self) -> int:
        return (len(self.buckets) - 1).bit_length() - 1

    @classmethod
    def of(
        cls,
        keys: NDArray[np.uint64],
        counts: NDArray[np.int64],
        lower_weights: NDArray[np.float32],
        tokens: NDArray[np.uint32],
        values: NDArray[np.float32],
    ) -> Level:
        """A level of contexts in any order, with ``counts`` continuations each.

        Of contexts with one key the first is kept.
        """
        kept, first = np.unique(keys, return_index=True)
        begins = np.cumsum(counts) - counts
        sizes = counts[first]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        moved = np.arange(starts[-1]) + np.repeat(begins[first] - starts[:-1], sizes)
        bits = min(MAX_BUCKET_BITS, max(1, len(kept).bit_length() - 1))
        edges = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
        inner = np.searchsorted(kept, edges)
        return cls(
            kept,
            np.concatenate(([0], inner, [len(kept)])).astype(np.uint32),
            starts.astype(np.uint32),
            lower_weights[first].astype(np.float32),
            tokens[moved].astype(np.uint32),
            values[moved].astype(np.float32),
        )


@dataclass(frozen=True, slots=True, eq=False)
class NgramTables:
    """An n-gram model: what the file holds.

    The probability of a token after a context is that after the next shorter context, times what
    this one leaves to it, plus the token's value here; where ``is_backoff``, the value alone if the
    token is listed. After no context it is the token's ``unigrams``.

    Attributes:
        fingerprint: of the vocabulary, None where it is unknown.
        num_tokens: that the model was trained on.
        levels: contexts of one token, of two, and so on.
        prompts: :func:`context_key` of the prompts whose answers were learnt, ascending; empty
            where there were none, and where a file does not say.
    """

    fingerprint: str | None
    is_backoff: bool
    num_tokens: int
    unigrams: NDArray[np.float32]
    levels: tuple[Level, ...]
    prompts: NDArray[np.uint64] = field(default_factory=lambda: NO_PROMPTS)

    @property
    def order(self) -> int:
        return len(self.levels) + 1

    @property
    def vocab_size(self) -> int:
        return len(self.unigrams)

    def check_fits(self, name: str, vocab_size: int, fingerprint: str | None) -> None:
        """Refuse tables of another vocabulary than the target's, by a ``ConfigError``."""
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"{name} was trained for {self.vocab_size} tokens and the target has {vocab_size}; "
                "train one with the target's tokenizer"
            )
        if None not in (self.fingerprint, fingerprint) and self.fingerprint != fingerprint:
            raise ConfigError(
                f"{name} was trained for another tokenizer than the target's; train one with the "
                "target's tokenizer"
            )


def context_key(tokens: Sequence[int]) -> int:
    """The key under which a context is found."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(tokens)}I", *tokens))
