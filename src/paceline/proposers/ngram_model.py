"""Drafts by a trained n-gram model and by the text of the request at hand. Knows no model's text.

Both are interpolated from the shortest context to the longest. At each length the model speaks
first (:class:`NgramTables` says how), then the text by the rule of Witten and Bell ("The
zero-frequency problem", 1991): where the context occurred C times with T different tokens after it,
a token that followed it c times gets ``c / (C + bT)``, and what was said before is worth
``bT / (C + bT)``. So the text is believed more, the longer and the oftener it repeats itself. With
them b is 1; here it falls with the length of the context. Where the extension is built, look-ups
and trees are made by ``csrc/drafts/ngram.cpp``, which does the same.

The tables are mapped from the file that ``paceline train ngram`` writes, which ``docs/formats.md``
describes byte by byte. It is untrusted: every count, offset, token and probability is checked
against the file's size and its own limits before anything is looked up, and nothing is allocated
that the file does not have room for.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.config.speculative import MAX_CONTINUATIONS, NGRAM_ORDERS, NgramModelConfig
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.files import HEAD_BYTES, check_fetched, whole_file
from paceline.planner.drafts import Drafted, TextDrafter
from paceline.proposers.base import TargetInfo, TextProposer
from paceline.proposers.base.noise import NO_NOISE, TargetNoise, noise_of
from paceline.request.request import Request

NAME = "ngram_model"


class NgramModelProposer(TextProposer):
    """See the module's docstring.

    A request's own text is indexed as far back as its last ``ngram_window`` to twice as many
    tokens; the index is made anew when it holds twice as many.
    """

    name = NAME
    config: NgramModelConfig

    def __init__(
        self, config: NgramModelConfig, tables: NgramTables, *, is_native: bool | None = None
    ) -> None:
        super().__init__(config, is_native)
        native = self._native
        self._make_text: Any = native.NgramText if native else NgramText
        self._make_noise: Any = native.TargetNoise if native else TargetNoise
        self._lookup: Any = (
            native.NgramLookup(tables.levels, tables.unigrams, tables.is_backoff)
            if native
            else NgramLookup(tables)
        )

    def _open(self, request: Request) -> TextDrafter:
        config = self.config
        text: TextDrafter = self._make_text(
            self._lookup,
            config.ngram_window,
            self._branching,
            config.min_accept_prob,
            self._make_noise(*noise_of(request)),
        )
        return text


def build(config: NgramModelConfig, target: TargetInfo) -> NgramModelProposer:
    """Raises ModelLoadError for an unusable file, ConfigError for another vocabulary's."""
    assert config.model is not None
    tables = read_tables(config.model)
    tables.check_fits(config.model, target.vocab_size, target.fingerprint)
    return NgramModelProposer(config, tables)


CACHED_CONTEXT = 4
"""Longest context of the request's own text that is looked up, in tokens."""
MAX_OCCURRENCES = 16
"""Latest occurrences of a context that are counted."""
UNANIMOUS, DISPUTED = (4.0, 1.5, 1.0, 1.0), (2.0, 1.2, 0.7, 0.6)
"""The b of contexts of the text of 1 to 4 tokens: where all occurrences went on alike, and for each
of several different continuations. Chosen by replays of half of SmolLM2's answers to MT-bench and
Spec-Bench; more is accepted of the other half, too, and with the embedded target."""
LONGEST_CONTEXT = 4
"""Tokens before a draft that a look-up may need."""


class TextCache:
    """What followed each context in one request's text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        """Tokens taken in."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int], start: int) -> None:
        """Take in the tokens from ``start`` on."""
        for token in token_ids[start:]:
            recent = tuple(self._tokens[-CACHED_CONTEXT:])
            for begin in range(len(recent)):
                self._followers.setdefault(recent[begin:], []).append(token)
            self._tokens.append(token)

    def followers(self, context: tuple[int, ...]) -> list[int]:
        """The tokens after the latest occurrences of a context, latest first."""
        return self._followers.get(context, [])[: -MAX_OCCURRENCES - 1 : -1]


class NgramLookup:
    """Look-ups in a model's tables."""

    def __init__(self, tables: NgramTables) -> None:
        self._is_backoff = tables.is_backoff
        self._levels = tables.levels
        self._unigrams = tables.unigrams.data

    def context_length(self, tail: Sequence[int]) -> int:
        """Tokens of the longest context at the end of a text that the model knows."""
        lengths = range(min(len(tail), len(self._levels)), 0, -1)
        known = (n for n in lengths if _find(self._levels[n - 1], context_key(tail[-n:])) >= 0)
        return next(known, 0)

    def probability(self, tail: Sequence[int], token: int) -> float:
        """Of a token at the end of a text, by the model alone."""
        prob = self._unigram(token)
        for length, level in enumerate(self._levels, start=1):
            at = _find(level, context_key(tail[-length:])) if length <= len(tail) else -1
            if at >= 0:
                value = dict(_continuations(level, at)).get(token, 0.0)
                listed = self._is_backoff and value > 0.0
                prob = value if listed else value + level.lower_weights.item(at) * prob
        return prob

    def draft(
        self,
        cache: TextCache | None,
        tail: Sequence[int],
        max_nodes: int,
        max_depth: int,
        branching: int,
        min_prob: float,
        length: int = 0,
        noise: TargetNoise = NO_NOISE,
    ) -> Drafted:
        """The nodes whose paths are likeliest, best first; none less likely than ``min_prob``.

        Without a ``cache`` the model speaks alone. ``tail`` is the text's last
        :data:`LONGEST_CONTEXT` tokens, or all of them; ``length``, which ``noise`` goes by, is of
        the whole text.
        """
        tokens, parents, probs = list[int](), list[int](), list[float]()
        order = itertools.count()  # decides ties
        heap = [(-1.0, next(order), -1, 1.0, 0, tuple(tail))]
        while heap and len(tokens) < max_nodes:
            minus_prob, _, parent, prob, depth, path = heapq.heappop(heap)
            if depth:
                tokens.append(path[-1])
                parents.append(parent)
                probs.append(prob)
            if depth == max_depth or len(tokens) == max_nodes:
                continue
            for token, prob in self._children(cache, path, branching, length + depth, noise):
                if -minus_prob * prob < min_prob:
                    break
                below = (*path, token)[-LONGEST_CONTEXT:]
                node = minus_prob * prob, next(order), len(tokens) - 1, prob, depth + 1, below
                heapq.heappush(heap, node)
        return tokens, parents, probs

    def _children(
        self,
        cache: TextCache | None,
        tail: tuple[int, ...],
        most: int,
        position: int,
        noise: TargetNoise,
    ) -> list[tuple[int, float]]:
        """The likeliest tokens at a position; their probabilities sum to at most 1."""
        probs: dict[int, float] = {}
        rest = 1.0  # a token that is in none of the contexts has so much of its unigram
        for length in range(1, len(tail) + 1):
            context = tail[-length:]
            if length <= len(self._levels):
                rest *= self._hear_model(self._levels[length - 1], context, probs, rest)
            if cache is not None and (followers := cache.followers(context)):
                rest *= self._hear_text(length, followers, probs, rest)
        probs = noise.weighed(position, probs)
        best = sorted(probs.items(), key=lambda item: (-item[1], item[0]))[:most]
        total = 0.0
        for _, prob in best:  # from Python 3.12 on sum() rounds otherwise than C++
            total += prob
        return [(token, prob / total) for token, prob in best] if total > 1.0 else best

    def _hear_model(
        self, level: NgramLevel, context: tuple[int, ...], probs: dict[int, float], rest: float
    ) -> float:
        """Mix in what the model says of a context; returns what is left to what was before."""
        at = _find(level, context_key(context))
        if at < 0:
            return 1.0
        left = level.lower_weights.item(at)
        for token in probs:
            probs[token] *= left
        for token, value in _continuations(level, at):
            if self._is_backoff:
                probs[token] = value
            else:
                probs[token] = self._lower(probs, rest * left, token) + value
        return left

    def _hear_text(
        self, length: int, followers: list[int], probs: dict[int, float], rest: float
    ) -> float:
        counts: dict[int, int] = {}
        for token in followers:
            counts[token] = counts.get(token, 0) + 1
        disputed = DISPUTED[length - 1] * len(counts)
        other = UNANIMOUS[length - 1] if len(counts) == 1 else disputed
        total = len(followers) + other
        left = other / total
        for token in probs:
            probs[token] *= left
        for token, count in counts.items():
            probs[token] = self._lower(probs, rest * left, token) + count / total
        return left

    def _lower(self, probs: dict[int, float], rest: float, token: int) -> float:
        known = probs.get(token)
        return rest * self._unigram(token) if known is None else known

    def _unigram(self, token: int) -> float:
        return self._unigrams[token] if token < len(self._unigrams) else 0.0


def _find(level: NgramLevel, key: int) -> int:
    """Index of the context with this key, -1 where there is none."""
    at = int(np.searchsorted(level.keys, np.uint64(key)))
    return at if at < len(level.keys) and level.keys[at] == key else -1


def _continuations(level: NgramLevel, at: int) -> list[tuple[int, float]]:
    begin, end = level.starts[at : at + 2].tolist()
    tokens, values = level.tokens[begin:end].tolist(), level.values[begin:end].tolist()
    return list(zip(tokens, values, strict=True))


class NgramText:
    """Drafts by a model and by a text, as far back as its last ``window`` to twice as many tokens.

    Args:
        window: 0 is the model alone.
        branching: most children of a node.
        min_prob: nodes less likely to be reached and accepted are left out.
        noise: of the text's request.
    """

    def __init__(
        self,
        lookup: NgramLookup,
        window: int,
        branching: int,
        min_prob: float,
        noise: TargetNoise = NO_NOISE,
    ) -> None:
        self._lookup, self._window, self._noise = lookup, window, noise
        self._branching, self._min_prob = branching, min_prob
        self._base = 0  # where its cache begins
        self._cache = TextCache()

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        return self._lookup.draft(
            self._filled_cache(token_ids) if self._window else None,
            token_ids[-LONGEST_CONTEXT:],
            max_nodes,
            max_depth,
            self._branching,
            self._min_prob,
            len(token_ids),
            self._noise,
        )

    def _filled_cache(self, token_ids: list[int]) -> TextCache:
        length = len(token_ids)
        if not len(self._cache) or length - self._base > 2 * self._window:
            self._base, self._cache = max(0, length - self._window), TextCache()
        self._cache.extend(token_ids, self._base + len(self._cache))
        return self._cache


CONTEXT_BYTES, CONTINUATION_BYTES, FIXED_BYTES = 20, 8, 512
"""What one of them takes in the file at most, and what is there once, unigrams aside."""
MAX_BUCKET_BITS = 26
NO_PROMPTS = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class NgramLevel:
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
    ) -> NgramLevel:
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
    levels: tuple[NgramLevel, ...]
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


MAGIC = b"PACENGRM"
VERSION, KNOWN_VERSIONS = 2, (1, 2)
"""A file of version 1 does not say which prompts were learnt."""
_HEADER = struct.Struct("<8sIIQQ16sIIQ")
_LEVEL = struct.Struct("<QQII")
_HASHED_FROM = 32
_PROMPTS = struct.Struct("<Q")
_LEVELS_AT = _HEADER.size
_PROMPTS_AT = 160
_DATA_AT = 192
_BACKOFF = 1
_UNKNOWN = bytes(16)


def write_tables(tables: NgramTables, path: str | Path) -> int:
    """Write the file, whole or not at all (``ModelLoadError``); returns its size in bytes."""
    parts = _parts(tables)
    with whole_file(path, ModelLoadError) as partial, partial.open("wb") as file:
        file.writelines(parts)
    return sum(map(len, parts))


def _parts(tables: NgramTables) -> list[bytes]:
    """The header and everything after it."""
    fingerprint = bytes.fromhex(tables.fingerprint) if tables.fingerprint else _UNKNOWN
    directory = b"".join(
        _LEVEL.pack(len(level.keys), len(level.tokens), level.bucket_bits, 0)
        for level in tables.levels
    )
    directory = directory.ljust(_PROMPTS_AT - _LEVELS_AT, b"\0")
    directory += _PROMPTS.pack(len(tables.prompts))
    body = [directory.ljust(_DATA_AT - _LEVELS_AT, b"\0")]
    for array, dtype in _sections(tables):
        data = np.ascontiguousarray(array, dtype).tobytes()
        body.append(data.ljust(_padded(len(data)), b"\0"))
    size = _LEVELS_AT + sum(map(len, body))
    flags = _BACKOFF if tables.is_backoff else 0
    counts = (fingerprint, tables.vocab_size, flags, tables.num_tokens)
    fields = (MAGIC, VERSION, tables.order, size)
    digest = xxhash.xxh3_64(_HEADER.pack(*fields, 0, *counts)[_HASHED_FROM:])
    for data in body:
        digest.update(data)
    return [_HEADER.pack(*fields, digest.intdigest(), *counts), *body]


def read_tables(path: str | Path) -> NgramTables:
    """Map a file into memory and check it.

    Raises:
        ModelLoadError: it cannot be read, is no n-gram model of a known version, or is damaged.
    """
    try:
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return parse_tables(mapped, str(path))


def parse_tables(data: bytes | mmap.mmap, name: str) -> NgramTables:
    """The tables in the bytes of a file, as views of them; raises as :func:`read_tables`."""
    order, fingerprint, vocab_size, flags, num_tokens, num_prompts = _header(data, name)
    views = _Views(data, name)
    unigrams = views.take(vocab_size, "<f4")
    levels = []
    for at in range(order - 1):
        contexts, entries, bits, _ = _LEVEL.unpack_from(data, _LEVELS_AT + at * _LEVEL.size)
        if not 1 <= bits <= MAX_BUCKET_BITS:
            raise ModelLoadError(f"{name} is damaged: a level has {bits} bits of buckets")
        lengths = (contexts, (1 << bits) + 1, contexts + 1, contexts, entries, entries)
        kinds = ("<u8", "<u4", "<u4", "<f4", "<u4", "<f4")
        levels.append(NgramLevel(*map(views.take, lengths, kinds)))
    prompts = views.take(num_prompts, "<u8")
    views.end()
    known = None if fingerprint == _UNKNOWN else fingerprint.hex()
    is_backoff = bool(flags & _BACKOFF)
    tables = NgramTables(known, is_backoff, num_tokens, unigrams, tuple(levels), prompts)
    problem = next(_problems(tables), None)
    if problem:
        raise ModelLoadError(f"{name} is damaged: {problem}")
    return tables


def _header(data: bytes | mmap.mmap, name: str) -> tuple[int, bytes, int, int, int, int]:
    """Order, fingerprint, size of the vocabulary, flags, tokens and prompts, all checked."""
    check_fetched(name, data[:HEAD_BYTES])
    if len(data) < _DATA_AT or data[:8] != MAGIC:
        raise ModelLoadError(f"{name} is not an n-gram model; paceline train ngram makes one")
    _, version, order, size, digest, fingerprint, vocab_size, flags, num_tokens = (
        _HEADER.unpack_from(data)
    )
    if version not in KNOWN_VERSIONS:
        known = " and ".join(map(str, KNOWN_VERSIONS))
        raise ModelLoadError(f"{name} has format version {version}; known: {known}")
    least, most = NGRAM_ORDERS
    if not least <= order <= most or flags & ~_BACKOFF:
        raise ModelLoadError(
            f"{name} has order {order} and flags {flags:#x}; allowed: orders {least} to {most} and "
            "flags 0 and 1"
        )
    if size != len(data):
        raise ModelLoadError(f"{name} has {len(data)} bytes and states {size}; it is incomplete")
    if xxhash.xxh3_64_intdigest(memoryview(data)[_HASHED_FROM:]) != digest:
        raise ModelLoadError(f"{name} is damaged: its checksum is wrong")
    (num_prompts,) = _PROMPTS.unpack_from(data, _PROMPTS_AT) if version > 1 else (0,)
    return order, fingerprint, vocab_size, flags, num_tokens, num_prompts


class _Views:
    """Hands out the sections of a file one after another."""

    def __init__(self, data: bytes | mmap.mmap, name: str) -> None:
        self._data, self._name, self._at = data, name, _DATA_AT

    def take(self, count: int, kind: str) -> NDArray[Any]:
        dtype = np.dtype(kind)
        size = count * dtype.itemsize
        if size > len(self._data) - self._at:
            raise ModelLoadError(f"{self._name} is damaged: a section goes beyond its end")
        array = np.frombuffer(self._data, dtype, count, self._at)
        self._at += _padded(size)
        return array.astype(dtype.newbyteorder("="), copy=False)

    def end(self) -> None:
        if self._at != len(self._data):
            raise ModelLoadError(f"{self._name} is damaged: its sections do not fill it")


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _sections(tables: NgramTables) -> Iterator[tuple[NDArray[Any], str]]:
    yield tables.unigrams, "<f4"
    for level in tables.levels:
        yield level.keys, "<u8"
        yield level.buckets, "<u4"
        yield level.starts, "<u4"
        yield level.lower_weights, "<f4"
        yield level.tokens, "<u4"
        yield level.values, "<f4"
    yield tables.prompts, "<u8"


def _problems(tables: NgramTables) -> Iterator[str]:
    if not _are_probabilities(tables.unigrams):
        yield "a unigram is not a probability"
    if (tables.prompts[1:] <= tables.prompts[:-1]).any():
        yield "the keys of its prompts do not ascend"
    for length, level in enumerate(tables.levels, start=1):
        of = f"of the contexts of {length} tokens "
        for bounds, end in ((level.buckets, level.keys), (level.starts, level.tokens)):
            if bounds[0] != 0 or bounds[-1] != len(end) or (bounds[1:] < bounds[:-1]).any():
                yield of + "bounds do not run through what they bound"
        if (level.keys[1:] <= level.keys[:-1]).any():
            yield of + "keys do not ascend"
        if len(level.keys) and (level.starts[1:] - level.starts[:-1]).max() > MAX_CONTINUATIONS:
            yield of + f"one has more than {MAX_CONTINUATIONS} continuations"
        if len(level.tokens) and level.tokens.max() >= tables.vocab_size:
            yield of + "a continuation is outside the vocabulary"
        if not (_are_probabilities(level.values) and _are_probabilities(level.lower_weights)):
            yield of + "a value is not a probability"


def _are_probabilities(values: NDArray[np.float32]) -> bool:
    """True of an empty array too; numbers that are none compare as false."""
    return bool(((values >= 0.0) & (values <= 1.0)).all())
