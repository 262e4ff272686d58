"""Texts and vocabularies that would cost a translation more than it is worth, or break it."""

from __future__ import annotations

import pytest

from paceline.proposers.draft_model.translation import (
    FARTHEST,
    Translation,
    Vocabulary,
    VocabularyPair,
)
from tests.proposers.test_translation import pair_of
from tests.proposers.vocabularies import letters, toy_vocabulary


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
