"""One text in two vocabularies: tokenised again step by step, masked, and taken back.

Texts and vocabularies that would cost a translation more than it is worth, or break it. Which
drafts fit to a target's vocabulary: padded otherwise, other tokens, no tokenizer.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.kv_cache import KVCache
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.loading.catalogue import embedded_model
from paceline.models.decoder import Decoder
from paceline.proposers import build_proposers
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.draft_model.heterogeneous import HeterogeneousProposer
from paceline.proposers.draft_model.loading import PaddedRunner
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.draft_model.translation import (
    FARTHEST,
    Translation,
    Vocabulary,
    VocabularyPair,
)
from paceline.text.token_pieces import token_pieces
from paceline.text.tokenizer import Tokenizer
from tests.arrays import arrays
from tests.conftest import REPOSITORY
from tests.proposers.drive import Target, make_request, propose
from tests.proposers.self_drafts import native
from tests.proposers.vocabularies import far_pair, letters, merging, other, toy_vocabulary
from tests.toy import TOY, USUAL, VOCAB, draft_config, toy_folder, toy_ops, toy_runner, toy_tensors

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


@pytest.mark.parametrize("run", ["=", "\n"])
def test_a_run_of_unknown_characters_is_not_tokenised_again_as_a_whole(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("embedded", "babyllama-tok105")
    encode, sizes = pair.draft.encode, []

    def noted(data: bytes, is_start: bool) -> tuple[list[int], list[int]]:
        sizes.append(len(data))
        return encode(data, is_start)

    monkeypatch.setattr(pair.draft, "encode", noted)
    ids = pair.target.tokenizer.encode(run * 3 * FARTHEST + " and on")
    translation = Translation(pair, 1000)
    for length in range(len(ids) - 20, len(ids) + 1):
        translation.update(ids[:length])
    assert sizes[0] > 2 * FARTHEST
    assert max(sizes[1:]) < 2 * FARTHEST
    assert (pair.draft.written(translation.view) + translation.pending).endswith(b"and on")


def test_special_tokens_beyond_the_logits_stand_for_nothing() -> None:
    tokenizer = toy_vocabulary([*"abc", "<s>", "</s>"], bos_token="<s>", eos_token="</s>").tokenizer
    cut = Vocabulary(tokenizer, 3)
    for target, draft in ((letters(), cut), (cut, letters())):
        pair = VocabularyPair(target, draft)
        assert pair.specials == {}
        assert len(pair.mask(b"")) == (len(draft.pieces) + 7) // 8


PROMPT = [5, 9, 2, 7, 45, 30, 11]


# --- equal vocabularies, padded to different sizes ----------------------------------------------


def padded_self(size: int, dtype: str = USUAL) -> DraftModelProposer:
    """The toy target with more rows, which win wherever they may, or without its last ones."""
    config = dataclasses.replace(TOY, vocab_size=size)
    tensors = toy_tensors()
    own = tensors["model.embed_tokens.weight"]
    table = own.new_zeros(size, own.shape[1])
    table[:VOCAB] = own[:size]
    table[VOCAB:] = 3 * own[: max(0, size - VOCAB)]
    tensors["model.embed_tokens.weight"] = table
    ops = toy_ops(dtype)
    kv = KVCache(ops.kv_memory(TOY, 100, ops.default_kv_dtype), prefix_caching=False)
    decoder = Decoder(config, arrays(tensors), ops, TOY.max_position)
    return DraftModelProposer(draft_config(), PaddedRunner(decoder, kv, VOCAB))


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {46: -1.0}}]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("native-float32", marks=native)])
def test_what_only_a_wider_draft_has_is_never_drafted(dtype: str, sampling: dict[str, Any]) -> None:
    model, proposer = Target(toy_runner(dtype)), padded_self(VOCAB + 9, dtype)
    request = make_request(1, PROMPT, **sampling)
    for _ in range(6):
        draft, result = model.step(proposer, request)
        assert result.num_accepted == len(draft) == 4


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {46: 30.0}}]
)
def test_what_a_narrower_draft_has_not_is_read_as_something_else(sampling: dict[str, Any]) -> None:
    model, proposer = Target(toy_runner()), padded_self(VOCAB - 9)
    request = make_request(1, PROMPT, **sampling)
    drafted = [model.step(proposer, request)[0] for _ in range(6)]
    assert all(len(draft) for draft in drafted)
    assert max(token for draft in drafted for token in draft.token_ids) < VOCAB - 9


# --- from a folder ------------------------------------------------------------------------------


def draft_folder(folder: Path, tokenizer: Tokenizer) -> Path:
    toy_folder(folder)
    tokenizer.save(folder)
    return folder


def built(
    folder: Path,
    target: Tokenizer | None,
    vocab_size: int = VOCAB,
    method: str = "draft_model",
    **options: Any,
) -> Proposer:
    info = TargetInfo(
        vocab_size,
        target.fingerprint if target else None,
        device="cpu",
        max_model_len=64,
        max_num_seqs=2,
        kv_bytes=1 << 20,
        backend="reference",
        tokenizer=target,
    )
    options = {"min_accept_prob": 0.0} | options
    config = SpeculativeConfig(method, str(folder), dtype="float32", **options)
    (proposer,) = build_proposers([config], info, strict=True)
    return proposer


@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB, VOCAB + 16])
@pytest.mark.parametrize("flag", [False, True])
def test_the_same_tokens_may_be_padded(tmp_path: Path, size: int, flag: bool) -> None:
    folder = draft_folder(tmp_path, merging().tokenizer)
    proposer = built(folder, merging().tokenizer, size, use_heterogeneous_vocab=flag)
    assert isinstance(proposer, DraftModelProposer)
    (tree,) = propose(proposer, make_request(1, [3, 4, size - 1]))
    tree.validate(size)
    assert len(tree)


def test_other_tokens_need_to_be_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = draft_folder(tmp_path, other().tokenizer)
    with pytest.raises(ConfigError, match="name it by --draft, which translates"):
        built(folder, letters().tokenizer)
    with pytest.raises(ConfigError, match="parallel_draft needs a draft of the target's vocab"):
        built(folder, letters().tokenizer, method="parallel_draft")
    with pytest.raises(ConfigError, match="48 tokens and the target 50"):
        built(folder, None, 50)
    with caplog.at_level(logging.WARNING):
        proposer = built(folder, merging().tokenizer, use_heterogeneous_vocab=True)
    assert "has another vocabulary than the target: what it drafts is translated" in caplog.text
    assert isinstance(proposer, HeterogeneousProposer)
    (tree,) = propose(proposer, make_request(1, [3, 4, 3]))
    tree.validate(VOCAB)


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path, other().tokenizer)
    with pytest.raises(ConfigError, match="without tokenizers a draft model needs as many"):
        built(folder, None, VOCAB + 1, use_heterogeneous_vocab=True)


def test_a_draft_without_a_tokenizer(tmp_path: Path) -> None:
    """It drafts where the target has none either, and as many tokens; it cannot translate."""
    folder = toy_folder(tmp_path)
    assert isinstance(built(folder, None), DraftModelProposer)
    with pytest.raises(ConfigError, match="without tokenizers a draft model needs as many"):
        built(folder, None, VOCAB + 1)
    with pytest.raises(ConfigError, match=f"{folder.name} has no tokenizer, .* copy the target's"):
        built(folder, letters().tokenizer)
    with pytest.raises(ConfigError, match=f"{folder.name} has no tokenizer, .* copy the target's"):
        built(folder, letters().tokenizer, use_heterogeneous_vocab=True)
