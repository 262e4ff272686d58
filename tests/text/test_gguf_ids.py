"""Ids of GGUF vocabularies are those that llama.cpp makes, for every way of cutting texts.

Where llama.cpp departs from the model's own tokenizer, ours are the model's; each such case is
named here with its reason.
"""

from __future__ import annotations

import pickle
import unicodedata
from pathlib import Path

import pytest

from paceline.text.gguf_tokenizer import tokenizer_from_gguf
from paceline.text.tokenizer import Tokenizer
from tests.quick import only
from tests.text.gguf_cases import BYTE_LEVEL, PIECES, ids_of, metadata_of, recorded

QUICK = {
    *("", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-llm", "kimi-k2"),
    *("deepseek-coder", "deepseek-v3", "falcon", "afmoe", "youtu", "tiny_aya", *PIECES),
}
CASED = {"tekken", "gpt-4o", "llama4", "kanana2", "talkie", "granite-embed-multi-97m", "minimax-m2"}
COMPOSED = {"qwen2", "deepseek-r1-qwen", "f2llmv2", "qwen35", "stablelm2", "megrez", "hunyuan"}


def tokenizer_of(case: str) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(metadata_of(case, recorded()["vocabularies"]), "made.gguf")
    assert tokenizer is not None
    return tokenizer


def has_marks(text: str) -> bool:
    return any(unicodedata.category(letter).startswith("M") for letter in text)


def departs(case: str, text: str) -> bool:
    """Whether llama.cpp may cut this text otherwise than the model's own tokenizer."""
    if case in CASED:  # it knows the case of ASCII letters alone, and takes no mark for a letter
        return has_marks(text) or any(x.isalpha() and not x.isascii() for x in text)
    if case in COMPOSED:  # it does not compose characters
        return unicodedata.normalize("NFC", text) != text
    if case == "kimi-k2":  # it takes no mark for a letter
        return has_marks(text)
    if case in ("deepseek-llm", "deepseek-coder"):  # it takes U+3000 for another white space
        return "\u3000" in text
    # Behind marks of Phi-3 it swallows the white space of ASCII alone.
    return case == "phi-3" and ("\u00a0" in text or "\u3000" in text)


@pytest.mark.parametrize("case", only(QUICK, (*BYTE_LEVEL, *PIECES)))
def test_ids_are_llama_cpps(case: str) -> None:
    ours = tokenizer_of(case)
    for text, ids in zip(recorded()["texts"], ids_of(case), strict=True):
        if not departs(case, text):
            found = ours.encode(text, add_special_tokens=False)
            assert found == ids, (text, [ours.id_to_token(i) for i in found])


@pytest.mark.parametrize("case", PIECES)
def test_tokenizers_travel_to_other_processes(case: str) -> None:
    """Those too whose pieces are joined by code of ours, which no file holds."""
    ours = tokenizer_of(case)
    literal = ours.encode_literal("<s> a")
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.encode_literal("<s> a") == literal
    for text in recorded()["texts"][::20]:
        assert copy.encode(text) == ours.encode(text)


def pieces(case: str, text: str) -> str:
    ours = tokenizer_of(case)
    ids = ours.encode(text, add_special_tokens=False)
    return "|".join(ours.decode([i], skip_special_tokens=False) for i in ids)


def test_where_the_models_own_tokenizers_are_followed() -> None:
    """Each text is one that llama.cpp cuts otherwise."""
    assert pieces("tekken", "éÉ") == "é|É"
    assert pieces("gpt-4o", "ÉCOLE") == "ÉCOLE"
    assert tokenizer_of("qwen2").encode("e\u0301") == tokenizer_of("qwen2").encode("é")
    assert tokenizer_of("kormo").encode("e\u0301") != tokenizer_of("kormo").encode("é")


def test_user_defined_tokens_with_the_sign_of_a_space() -> None:
    """DeepSeek's marks of calls are one token each, as in llama.cpp and transformers."""
    ours, mark = tokenizer_of("deepseek-v3"), "<｜tool▁calls▁begin｜>"  # noqa: RUF001
    ids = ours.encode(mark, add_special_tokens=False)
    assert [ours.id_to_token(i) for i in ids] == [mark]
    assert ours.decode(ids) == mark


def test_spaces_behind_marks_of_phi_3() -> None:
    ours = tokenizer_of("phi-3")
    close, spaced = (
        ours.encode(f"<|user|>{gap}fox", add_special_tokens=False) for gap in ("", "\n ")
    )
    assert close == spaced
    kept = tokenizer_of("scores")
    assert kept.encode("<|user|>\nfox") != kept.encode("<|user|>fox")


def test_the_vocabulary_of_phi_3_is_known_by_its_architecture_too() -> None:
    """``Phi 3.5 mini`` is what newer converters write as a name."""
    metadata = metadata_of("scores", recorded()["vocabularies"])
    metadata |= {"general.name": "Phi 3.5 mini", "general.architecture": "phi3"}
    ours = tokenizer_from_gguf(metadata, "made.gguf")
    assert ours is not None
    assert ours.encode("<|user|>\nfox") == ours.encode("<|user|>fox")


def test_pieces_with_one_score_outlive_saving(tmp_path: Path) -> None:
    """Merges cannot say that the leftmost of equals joins first; the saved files do."""
    ours = tokenizer_of("one score")
    ours.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    for text, ids in list(zip(recorded()["texts"], ids_of("one score"), strict=True))[:100]:
        assert again.encode(text, add_special_tokens=False) == ids
        assert again.encode_batch([text] * 2, add_special_tokens=False) == [ids] * 2
    literal = ours.encode_literal("<s> the quick")
    assert ours.decode(literal) == "<s> the quick"
    assert ours.encode_literal("quick the") == ours.encode("quick the", add_special_tokens=False)


def test_every_name_is_known_or_refused_by_name() -> None:
    assert len(BYTE_LEVEL) == len(set(BYTE_LEVEL)) == len(recorded()["cases"]) - len(PIECES)
    for case in BYTE_LEVEL:
        tokenizer_of(case)
