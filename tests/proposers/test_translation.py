"""One text in two vocabularies: tokenised again step by step, masked, and taken back."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.loading.catalogue import embedded_model
from paceline.proposers.draft_model.translation import Translation, Vocabulary, VocabularyPair
from paceline.text.token_pieces import token_pieces
from paceline.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY
from tests.proposers.vocabularies import far_pair, letters, merging, other, toy_vocabulary

DATA = REPOSITORY.parent / "shared" / "data" / "models"
NAMES = ("embedded", "tinystories-656k", "stories260k", "babyllama-tok105")
PAIRS = [
    ("embedded", "stories260k"),
    ("tinystories-656k", "stories260k"),
    ("stories260k", "babyllama-tok105"),
    ("babyllama-tok105", "embedded"),
]
OVER_WORDS = ("tinystories-656k",)
"""Tokens of several words, where what follows can undo merges far back."""
FEW = settings(max_examples=20)
WORDS = (
    "Once",
    " upon",
    " a",
    " time",
    ",",
    ".\n",
    "\n\n",
    " there",
    "Lily",
    " said",
    '"',
    "'s",
    "  ",
)
SENTENCES = st.lists(st.sampled_from(WORDS), max_size=40).map("".join)
TEXTS = st.one_of(SENTENCES, st.text(max_size=40), st.text("aeht .é😀{\n", max_size=40))


@cache
def vocabulary(name: str) -> Vocabulary:
    folder = Path(embedded_model("target")) if name == "embedded" else DATA / name
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    tokenizer = Tokenizer.from_folder(folder)
    return Vocabulary(tokenizer, tokenizer.vocab_size)


def writes_all(name: str, text: str) -> bool:
    """Whether a vocabulary has every character of a text."""
    own = vocabulary(name)
    return own.tokenizer.decode(own.tokenizer.encode(text)) == text


@cache
def pair_of(target: str, draft: str) -> VocabularyPair:
    return VocabularyPair(vocabulary(target), vocabulary(draft))


# --- pieces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(text=TEXTS)
def test_tokens_write_the_text(name: str, text: str) -> None:
    own = vocabulary(name)
    data = own.prefix + text.encode()
    tokens, ends = own.encode(data, is_start=True)
    assert ends == sorted(ends)
    if text and tokens:
        assert ends[-1] == len(data)
    if text and writes_all(name, text):
        assert own.written(tokens) == data
        assert [end - begin for begin, end in zip([0, *ends], ends, strict=False)] == [
            len(own.piece(token) or b"") for token in tokens
        ]


def test_a_vocabulary_of_word_pieces_is_refused() -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece cannot be translated"):
        token_pieces(Tokenizer(backend), 2)


def test_masks_keep_to_what_has_to_be_written() -> None:
    pair = far_pair()

    def allowed(data: bytes) -> set[bytes | str | None]:
        bits = pair.mask(data)
        tokens = [token for token in range(48) if bits[token // 8] >> token % 8 & 1]
        return {
            pair.draft.piece(token) or pair.draft.tokenizer.id_to_token(token) for token in tokens
        }

    assert allowed(b"ab") == {b"a", b"ab", b"abcd"}
    assert allowed(b"\xc3") == set()
    assert allowed(b"") == {piece for piece in pair.draft.pieces if piece} | {"<end>"}


# --- step by step -------------------------------------------------------------------------------


def steps(ids: list[int], cuts: list[int]) -> list[int]:
    return [*sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@FEW
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_what_is_read_and_what_is_pending_is_the_text(
    target: str, draft: str, text: str, cuts: list[int]
) -> None:
    pair = pair_of(target, draft)
    ids = pair.target.tokenizer.encode(text)
    translation, view = Translation(pair, 1000), []
    for length in steps(ids, cuts):
        same = translation.update(ids[:length])
        assert translation.view[:same] == view[:same]
        view = translation.view
    once = Translation(pair, 1000)
    once.update(ids)
    assert (translation.view, translation.pending) == (once.view, once.pending)
    if writes_all(target, text) and writes_all(draft, text):
        written = pair.draft.written(translation.view) + translation.pending
        assert written == pair.draft.prefix + text.encode()


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@FEW
@given(text=SENTENCES, more=SENTENCES, rest=SENTENCES.map(" then{}".format))
def test_a_continuation_is_what_the_target_would_say(
    target: str, draft: str, text: str, more: str, rest: str
) -> None:
    pair = pair_of(target, draft)
    encode = pair.target.tokenizer.encode
    translation = Translation(pair, 1000)
    translation.update(encode(text))
    found = translation.continuation(more.encode())
    if not writes_all(target, text + more + rest):
        return
    if found.tokens:
        assert pair.target.written(found.tokens).endswith(more.encode())
        assert found.ends[-1] == len(more.encode())
    known, whole, further = encode(text), encode(text + more), encode(text + more + rest)
    if whole[: len(known)] == known:
        assert found.tokens in ([], whole[len(known) :])
        settled = [*known, *found.tokens[: found.settled]]
        is_usual = target not in OVER_WORDS and not more[-1:].isspace()
        if further[: len(known)] == known and is_usual:
            assert further[: len(settled)] == settled


def test_a_character_that_is_not_finished_is_pending() -> None:
    pair = VocabularyPair(vocabulary("embedded"), vocabulary("stories260k"))
    ids = pair.target.tokenizer.encode("a 😀")
    translation = Translation(pair, 100)
    translation.update(ids[:-1])
    done = "a 😀".encode()
    assert translation.pending == pair.target.written(ids[:-1])[-len(translation.pending) :]
    assert 0 < len(translation.pending) < 5
    assert pair.draft.written(translation.view).endswith(b" a")
    rest = done[len(pair.target.written(ids[:-1])) :]
    assert translation.continuation(rest).tokens == ids[-1:]
    assert translation.continuation(b"\xff").tokens == []


# --- special tokens and replacements ------------------------------------------------------------


def chat_pair(*replacements: tuple[str, str]) -> VocabularyPair:
    target = toy_vocabulary(
        ["</s>", "<user>", *"abcdefxyz", "<bot>"], eos_token="</s>", a="<user>", b="<bot>"
    )
    draft = toy_vocabulary(
        ["<end>", *"abcdefxyz", "<u>", "<bot>"], eos_token="<end>", a="<u>", b="<bot>"
    )
    return VocabularyPair(target, draft, replacements)


@pytest.mark.parametrize(
    ("replacements", "expected"),
    [
        ([], ["a", "b", "<bot>", "c", "<end>"]),  # nothing stands for <user>
        ([("<user>", "<u>")], ["<u>", "a", "b", "<bot>", "c", "<end>"]),
        ([("<user>ab", "<u>x")], ["<u>", "x", "<bot>", "c", "<end>"]),
        ([("ab", "")], ["<bot>", "c", "<end>"]),
        ([("<user>ab<bot>x", "y")], ["a", "b", "<bot>", "c", "<end>"]),  # it does not come
        ([("<user>", "yy"), ("b<bot>", "d")], ["y", "y", "a", "d", "c", "<end>"]),
    ],
)
def test_markers_of_chats(replacements: list[tuple[str, str]], expected: list[str]) -> None:
    pair = chat_pair(*replacements)
    ids = pair.target.tokenizer.encode("<user>ab<bot>c</s>")
    translation = Translation(pair, 100)
    for length in range(1, len(ids) + 1):
        translation.update(ids[:length])
    spell = pair.draft.tokenizer.id_to_token
    assert [spell(token) for token in translation.view] == expected


def test_the_beginning_of_a_replacement_is_read_as_it_is_until_it_is_whole() -> None:
    pair = chat_pair(("abc", "x"))
    translation = Translation(pair, 100)
    read = []
    for token in pair.target.tokenizer.encode("zabcd"):
        translation.update([*translation.tokens, token])
        read.append(pair.draft.written(translation.view))
    assert read == [b"z", b"za", b"zab", b"zx", b"zxd"]


def test_vocabularies_are_close_when_most_tokens_are_the_same() -> None:
    assert VocabularyPair(letters(), letters()).is_close
    assert VocabularyPair(letters(), merging()).is_close
    assert not VocabularyPair(letters(), toy_vocabulary(["</s>", *"abc"])).is_close
    shared = VocabularyPair(merging(), other()).to_target
    assert len(shared) == 26 + 6 + 1  # letters, merges, and the end
