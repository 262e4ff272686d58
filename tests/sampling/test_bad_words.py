"""Words that must not be said: how they are spelled, and what is forbidden where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.errors import RequestError
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.sampling import sampler
from paceline.sampling.logit_edits import SamplingRow, in_token_ids
from paceline.sampling.sampler import rank_candidates, sample_tokens
from tests.server.fakes import embedded_tokenizer
from tests.text.vocabularies import byte_fallback

PROMPT = [2, 0]
WORDS = ((1,), (0, 2), (2, 2, 0))
VOCAB = 3
SPELLINGS = {
    "cat": [7], " cat": [8],
    "dog": [4, 5], " dog": [6, 5],
    "cow": [9, 3], " cow": [1, 9, 3],
}  # fmt: skip
"""Of words, at a text's beginning and within one."""


def spell(text: str) -> list[list[int]]:
    if text == "hen":
        return [[10, 12], [12]]
    return [[10, 11]] if text == " hen" else [SPELLINGS[text]]


def test_a_word_is_forbidden_at_the_beginning_and_behind_a_space() -> None:
    params = SamplingParams(
        bad_words=["cat", " dog"], banned_token_ids=(3,), bad_words_ids=[[1, 2]]
    )
    told = in_token_ids(params, spell)
    assert told.banned_token_ids == (3, 7, 8)
    assert told.bad_words_ids == ((1, 2), (4, 5), (6, 5))
    assert told.bad_words == ()
    assert in_token_ids(told, spell) is told


def test_a_space_of_its_own_needs_no_second_entry() -> None:
    told = in_token_ids(SamplingParams(bad_words=["cow"]), spell)
    assert told.bad_words_ids == ((9, 3),)


def test_a_word_counts_in_the_middle_of_a_text_too() -> None:
    """Vocabularies of SentencePiece put a space before a text, not before what continues one."""
    told = in_token_ids(SamplingParams(bad_words=["hen"]), spell)
    assert (told.banned_token_ids, told.bad_words_ids) == ((12,), ((10, 11),))


@pytest.mark.parametrize(
    ("word", "banned", "sequences"),
    [
        ("\n", ("\u010a", "\u0120\u010a"), []),
        ("\t", ("\u0109",), []),
        ("\n\n", ("\u010a\u010a",), []),
        (" \n", ("\u0120\u010a",), [("\u0120\u0120", "\u010a")]),
        (" ", ("\u0120", "\u0120\u0120"), []),
        ("cat", (), [("c", "at"), ("\u0120c", "at")]),
    ],
)
def test_white_space_is_banned_as_it_is(
    word: str, banned: Sequence[str], sequences: list[Sequence[str]]
) -> None:
    """The lone space is another word than a line's end or a tab."""
    tokenizer = embedded_tokenizer()
    told = in_token_ids(SamplingParams(bad_words=[word]), tokenizer.spellings)
    named = [[tokenizer.id_to_token(i) for i in ids] for ids in told.bad_words_ids]
    assert [tokenizer.id_to_token(i) for i in told.banned_token_ids] == list(banned)
    assert named == [list(each) for each in sequences]


def test_a_byte_token_is_white_space_too() -> None:
    tokenizer = byte_fallback()
    told = in_token_ids(SamplingParams(bad_words=["\n", "and"]), tokenizer.spellings)
    spelled = [[tokenizer.id_to_token(i) for i in ids] for ids in told.bad_words_ids]
    assert [tokenizer.id_to_token(i) for i in told.banned_token_ids] == ["<0x0A>", "and"]
    assert spelled == [["▁a", "n", "d"]]


def allowed(output: Sequence[int], path: Sequence[int]) -> set[int]:
    params = SamplingParams(temperature=0, bad_words_ids=WORDS)
    request = Request(0, [*PROMPT, *output], len(PROMPT), params, 0, 100)
    row = SamplingRow(request, list(path))
    ids, scores = rank_candidates(np.zeros((1, VOCAB), np.float32), [row], VOCAB)
    return {int(i) for i, score in zip(ids[0], scores[0], strict=True) if np.isfinite(score)}


@pytest.mark.parametrize("kernels", [True, False])
def test_what_may_follow_every_short_text(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt does not count: it ends with the first half of a word."""
    if not kernels:
        monkeypatch.setattr(sampler, "kernels", None)
    elif sampler.kernels is None:
        pytest.skip("the native kernels are not built")
    for length in range(5):
        for text in itertools.product(range(VOCAB), repeat=length):
            expected = {t for t in range(VOCAB) if not any(_ends([*text, t], w) for w in WORDS)}
            for cut in range(length + 1):
                assert allowed(text[:cut], text[cut:]) == expected, (text, cut)


def _ends(text: list[int], word: Sequence[int]) -> bool:
    return text[-len(word) :] == list(word)


def test_a_grammar_s_mask_holds_too() -> None:
    params = SamplingParams(temperature=0, bad_words_ids=((0, 2), (0, 30)))
    request = Request(0, [1, 0], 1, params, 0, 100)
    logits = np.asarray([[0.0, 1.0, 2.0]], dtype=np.float32)
    row = SamplingRow(request, mask=b"\x05")  # tokens 0 and 2
    assert row.allowed(VOCAB) == b"\x01"
    assert sample_tokens(logits, [row])[0] == [0]
    assert SamplingRow(request, [1], mask=b"\x05").allowed(VOCAB) == b"\x05"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": [""]}, "bad_words holds ''"),
        ({"bad_words": ["x"] * 513}, "bad_words has 513 strings; at most 512"),
        ({"bad_words_ids": [[]]}, "bad_words_ids holds an empty list"),
    ],
)
def test_what_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="bad_words_ids names token 9"):
        SamplingParams(bad_words_ids=[[1, 9]]).check_vocabulary(9)
