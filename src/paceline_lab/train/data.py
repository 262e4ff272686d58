"""Files of text and traces to documents, these to token streams, and streams to equal windows.

A document is one text whose order inside matters: a source file, a story, a passage of a long book,
a row of a JSONL file. Splits and shuffles act on whole documents.

Each epoch shuffles the documents, joins them with a separator after each, and cuts the stream into
windows of ``seq_len`` predictions; then the windows are shuffled too, so that one batch does not
come from one file. Everything is a function of (documents, seed, window number): a run that
continues needs to know only how many windows it has seen. Knows no model and no optimiser.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import TraceError, TrainingError
from paceline.request.traces import read_traces
from paceline.text.tokenizer import not_encodable

CODE_SUFFIXES = (".py", ".pyi", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts")
TEXT_SUFFIXES = (".txt", ".md", ".rst", *CODE_SUFFIXES)
ROW_SUFFIXES = (".jsonl", ".json")
ROW_FIELDS = ("text", "prompt", "content")
PASSAGE_CHARS = 16_384
MAX_FILE_BYTES = 256 << 20
STDLIB_EXCLUDE = (
    "site-packages/*",
    "*/site-packages/*",
    "test/*",
    "*/test/*",
    "*/tests/*",
    "*/idle_test/*",
    "encodings/*",  # tables of characters
)

BATCH = 64
"""Documents that are encoded at once."""
SHOWN = 5
"""Skipped files that a warning names."""

TokenArray = npt.NDArray[np.int32]
log = logging.getLogger(__name__)


class NoTextsError(TrainingError):
    """A JSON file holds something else than rows of text."""


@dataclass(frozen=True, slots=True)
class Document:
    """``source`` names the file (and row) for messages; it never influences training."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class TokenDocuments:
    """Tokenised documents: number i is ``tokens[offsets[i] : offsets[i + 1]]``, no separators."""

    tokens: TokenArray
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> TokenArray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[TokenArray]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> TokenDocuments:
        """The documents with these numbers, in this order."""
        return TokenDocuments.of([self[int(i)] for i in indices])

    @staticmethod
    def of(documents: Sequence[TokenArray]) -> TokenDocuments:
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(d) for d in documents], out=offsets[1:])
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.int32)
        return TokenDocuments(tokens.astype(np.int32, copy=False), offsets)


def read_documents(
    paths: Iterable[str | Path], exclude: Sequence[str] = (), stdlib: bool = False
) -> Iterator[Document]:
    """The documents of files and folders, in a reproducible order.

    JSON files in a folder that hold no texts, such as configurations, are skipped with a warning.

    Args:
        paths: files, or folders that are searched recursively for the known suffixes. ``.jsonl``
            rows carry ``text``, ``prompt`` or ``content``; ``.json`` is a list of strings or of
            such rows; every other file is text.
        exclude: glob patterns on a file's path relative to its folder.
        stdlib: also Python's own standard library, without tests and character tables.

    Raises:
        TrainingError: a path does not exist, a file is too large or cannot be read, a file that is
            named has a row without text, or a row has text that no encoding can write.
    """
    try:
        for path in map(Path, paths):
            if path.is_file():
                yield from _read_file(path)
            elif path.is_dir():
                yield from _read_folder(path, (*TEXT_SUFFIXES, *ROW_SUFFIXES), exclude)
            else:
                raise TrainingError(f"there is no file or folder {path}")
        if stdlib:
            folder = Path(sysconfig.get_path("stdlib"))
            yield from _read_folder(folder, (".py",), (*exclude, *STDLIB_EXCLUDE))
    except OSError as error:
        raise TrainingError(f"cannot read {error.filename}: {error.strerror or error}") from error


def _read_folder(
    folder: Path, suffixes: tuple[str, ...], exclude: Sequence[str]
) -> Iterator[Document]:
    skipped: list[str] = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        is_excluded = any(fnmatch.fnmatch(name, pattern) for pattern in exclude)
        if file.suffix not in suffixes or is_excluded or not file.is_file():
            continue
        documents = _read_file(file)
        try:
            first = next(documents, None)
        except NoTextsError as error:
            skipped.append(str(error))
            continue
        if first is not None:  # so that the file has texts, and a row without one is a fault
            yield first
            yield from documents
    if skipped:
        others = [f"and {len(skipped) - SHOWN} more"] if len(skipped) > SHOWN else []
        log.warning("skipped: %s", "; ".join([*skipped[:SHOWN], *others]))


def _read_file(path: Path) -> Iterator[Document]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TrainingError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix == ".jsonl":
        # Not splitlines: it also splits at separators that JSON strings may hold unescaped.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield _row(_parse(line, f"{path}:{number}"), f"{path}:{number}")
    elif path.suffix == ".json":
        rows = _parse(text, str(path))
        if not isinstance(rows, list):
            raise NoTextsError(f"{path} is no JSON list of strings or of objects")
        for number, row in enumerate(rows):
            yield _row(row, f"{path}[{number}]")
    elif path.suffix == ".txt":
        for number, passage in enumerate(split_passages(text)):
            yield Document(f"{path}#{number}", passage)
    elif text.strip():
        yield Document(str(path), text)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoTextsError(f"{where} is not JSON: {error}") from error


def _row(row: Any, where: str) -> Document:
    values = [row.get(field) for field in ROW_FIELDS] if isinstance(row, dict) else [row]
    text = next((value for value in values if isinstance(value, str)), None)
    if text is None:
        raise NoTextsError(f"{where} has no text; a row needs one of {', '.join(ROW_FIELDS)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TrainingError(f"{where}: {not_encodable([text], error)}") from error
    return Document(where, text)


def split_passages(text: str, limit: int = PASSAGE_CHARS) -> list[str]:
    """Cut a long text at blank lines into passages of about ``limit`` characters.

    The passages joined give the text again. A paragraph longer than ``limit`` is cut inside.
    """
    passages: list[str] = []
    start = 0
    while len(text) - start > limit:
        cut = text.rfind("\n\n", start + limit // 2, start + limit)
        end = start + limit if cut < 0 else cut + 2
        passages.append(text[start:end])
        start = end
    passages.append(text[start:])
    return [p for p in passages if p.strip()]


def tokenize(documents: Iterable[Document], tokenizer: Any) -> TokenDocuments:
    """Encode documents without special tokens, several at a time; empty ones are dropped."""
    encoded: list[TokenArray] = []
    texts = (document.text for document in documents)
    while batch := list(islice(texts, BATCH)):
        for item in tokenizer.encode_batch(batch, add_special_tokens=False):
            if item.ids:
                encoded.append(np.asarray(item.ids, np.int32))
    return TokenDocuments.of(encoded)


def read_answers(folder: str | Path, vocab_size: int) -> list[TokenArray]:
    """The token ids of all traces in a folder, prompts included.

    Raises:
        TraceError: there is no trace in the folder, a shard is damaged, or holds a token outside
            the vocabulary.
    """
    answers = [trace.token_ids for trace in read_traces(folder)]
    if any(tokens.max() >= vocab_size for tokens in answers):
        raise TraceError(
            f"{folder} has token ids outside the vocabulary of {vocab_size}; it is of another model"
        )
    return answers


def split_held_out(
    documents: TokenDocuments, held_out_tokens: int, seed: int
) -> tuple[TokenDocuments, TokenDocuments]:
    """Training and held-out documents: disjoint, whole, chosen by ``seed`` alone.

    Documents are taken in shuffled order while they fit into ``held_out_tokens``; none longer than
    a quarter of it is taken, so that no single document stands for all.

    Raises:
        TrainingError: less than half of the tokens would remain, or nothing can be held out.
    """
    total = len(documents.tokens)
    if held_out_tokens * 2 > total:
        raise TrainingError(
            f"{held_out_tokens} held-out tokens are more than half of the {total} there are"
        )
    order = np.random.default_rng((seed, 0x5E1D)).permutation(len(documents))
    lengths = documents.lengths
    held: list[int] = []
    room = held_out_tokens
    for index in order:
        if lengths[index] <= min(room, max(1, held_out_tokens // 4)):
            held.append(int(index))
            room -= int(lengths[index])
    if held_out_tokens and not held:
        raise TrainingError(
            f"no document has at most {held_out_tokens // 4} tokens, so none can be held out; "
            "split the texts or hold out more"
        )
    taken = set(held)
    rest = [i for i in range(len(documents)) if i not in taken]
    return documents.select(rest), documents.select(held)


def sample_documents(documents: TokenDocuments, tokens: int, seed: int) -> TokenDocuments:
    """Whole documents, chosen by ``seed``, until ``tokens`` are reached; all of them if 0."""
    if not tokens or tokens >= len(documents.tokens):
        return documents
    order = np.random.default_rng((seed, 0x5A3)).permutation(len(documents))
    reached = np.cumsum(documents.lengths[order])
    return documents.select(order[: int(np.searchsorted(reached, tokens)) + 1])


def pack(documents: TokenDocuments, order: np.ndarray, seq_len: int, separator: int) -> TokenArray:
    """Windows ``[n, seq_len + 1]`` over the documents in ``order``.

    A window's last token is the next one's first, so that every token but the very first is
    predicted exactly once. The stream starts with a separator, has one after each document, and
    is filled up with separators to a whole window.
    """
    pieces: list[TokenArray] = [np.array([separator], np.int32)]
    for index in order:
        pieces += [documents[int(index)], pieces[0]]
    stream = np.concatenate(pieces)
    count = window_count(documents, seq_len)
    padded = np.full(count * seq_len + 1, separator, np.int32)
    padded[: len(stream)] = stream
    starts = np.arange(count)[:, None] * seq_len
    windows: TokenArray = padded[starts + np.arange(seq_len + 1)[None]]
    return windows


def window_count(documents: TokenDocuments, seq_len: int) -> int:
    """Windows of one epoch; the same for every order."""
    predictions = len(documents.tokens) + len(documents)
    return max(1, -(-predictions // seq_len))


class Windows:
    """Training windows by number, without end: number n belongs to epoch ``n // per_epoch``.

    Raises:
        TrainingError: there are no documents.
    """

    def __init__(self, documents: TokenDocuments, seq_len: int, separator: int, seed: int) -> None:
        if not len(documents):
            raise TrainingError("the training texts hold no tokens")
        self._documents = documents
        self._seq_len = seq_len
        self._separator = separator
        self._seed = seed
        self._epoch = -1
        self._windows = np.zeros((0, seq_len + 1), np.int32)
        self.per_epoch = window_count(documents, seq_len)

    def take(self, start: int, count: int) -> TokenArray:
        """Windows ``start`` to ``start + count``, ``[count, seq_len + 1]``."""
        rows = [self._window(n) for n in range(start, start + count)]
        return np.stack(rows)

    def _window(self, number: int) -> TokenArray:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(len(self._documents))
            packed = pack(self._documents, order, self._seq_len, self._separator)
            self._windows = packed[rng.permutation(len(packed))]
            self._epoch = epoch
        window: TokenArray = self._windows[index]
        return window
