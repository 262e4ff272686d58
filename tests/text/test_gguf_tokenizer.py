"""Tokenizers rebuilt from GGUF metadata: the same ids as the ones they were taken from.

And those that llama.cpp (b11549) makes, for every way of cutting texts. Where it departs from the
model's own tokenizer, ours are the model's; each such case is named here with its reason.
"""

from __future__ import annotations

import json
import pickle
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.text.gguf_tokenizer import end_ids, tokenizer_from_gguf
from paceline.text.tokenizer import Tokenizer
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.quick import only
from tests.text.gguf_cases import BYTE_LEVEL, PIECES, ids_of, metadata_of, recorded
from tests.text.vocabularies import byte_fallback, byte_fallback_json, byte_level, byte_level_json

TEXTS = ["the fox and the dog", " two  spaces\n", "é€😀 日本", "x=12345;", "<|im_start|>a</s>", ""]


def vocabulary_file(tmp_path: Path, metadata: dict[str, Any]) -> Path:
    convert("qwen3", tmp_path / "m.gguf", metadata=metadata, changes={"vocab_size": 600})
    return tmp_path / "m.gguf"


def loaded(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = load_checkpoint(vocabulary_file(tmp_path, metadata)).tokenizer
    assert tokenizer is not None
    return tokenizer


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    meta = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="gpt-2", eos_token_id=0)
    ours, origin = loaded(tmp_path, meta), byte_level()
    for text in TEXTS:
        assert ours.encode(text) == origin.encode(text)
        assert ours.decode(origin.encode(text)) == origin.decode(origin.encode(text))
    assert ours.fingerprint == origin.fingerprint
    assert ours.eos_token_ids == (0, 2)  # the end of a turn is one too


def test_score_tokenizer(tmp_path: Path) -> None:
    meta = tokenizer_metadata(json.loads(byte_fallback_json()), "llama")
    ours, origin = loaded(tmp_path, meta), byte_fallback()
    for text in TEXTS:
        assert ours.encode(text) == origin.encode(text)
        assert ours.decode(origin.encode(text)) == origin.decode(origin.encode(text))
    assert ours.encode("the")[0] == ours.bos_token_id == 1
    assert ours.fingerprint == origin.fingerprint


def test_trained_score_tokenizer(tmp_path: Path, shared_data: Path) -> None:
    """A real vocabulary whose merges are rebuilt from scores splits stories the same way."""
    folder = shared_data / "models" / "stories260k"
    meta = tokenizer_metadata(json.loads((folder / "tokenizer.json").read_text()), "llama")
    ours, origin = loaded(tmp_path, meta), Tokenizer.from_folder(folder)
    stories = json.loads((shared_data / "corpora" / "tinystories_1000.json").read_text())
    for story in stories[:50]:
        text = story if isinstance(story, str) else json.dumps(story)
        assert ours.encode(text) == origin.encode(text)


def test_a_token_behind_texts(tmp_path: Path) -> None:
    """The ids are llama.cpp's (b11549). A token may both end texts and be called BOS."""
    made = json.loads(byte_level_json())
    flags = {"add_bos_token": False, "add_eos_token": True}
    meta = tokenizer_metadata(made, "gpt2", pre="qwen2", bos_token_id=0, eos_token_id=0, **flags)
    ours = loaded(tmp_path, meta)
    assert ours.encode("dog") == [263, 73, 0]
    assert ours.encode("dog", add_special_tokens=False) == [263, 73]
    assert (ours.begin_ids, ours.end_ids) == ((), (0,))
    assert not ours.begins_with_bos
    meta = tokenizer_metadata(json.loads(byte_fallback_json()), "llama", add_eos_token=True)
    ours = loaded(tmp_path, meta)
    assert ours.encode("dog") == [1, 259, 263, 274, 266, 2]
    assert (ours.begin_ids, ours.end_ids) == ((1,), (2,))
    assert ours.begins_with_bos


def test_no_space_prefix(tmp_path: Path) -> None:
    meta = tokenizer_metadata(
        json.loads(byte_fallback_json()), "llama", add_space_prefix=False, add_bos_token=False
    )
    ours = loaded(tmp_path, meta)
    assert ours.decode(ours.encode(" the")) == " the"
    assert ours.encode("the") != ours.encode(" the")
    assert 1 not in ours.encode("the")


def test_pieces_whose_merges_are_listed(tmp_path: Path) -> None:
    """Gemma 4's way: merges instead of scores, and no space before a text."""
    made = json.loads(byte_fallback_json())
    meta = tokenizer_metadata(made, "llama", add_space_prefix=False)
    scored = loaded(tmp_path, meta)
    merges = [m if isinstance(m, str) else " ".join(m) for m in made["model"]["merges"]]
    ends = ["<turn|>", "<|tool_response>"]
    meta["tokenizer.ggml.tokens"] = [*meta["tokenizer.ggml.tokens"], *ends]
    meta["tokenizer.ggml.token_type"] = [*meta["tokenizer.ggml.token_type"], 3, 4]
    del meta["tokenizer.ggml.scores"], meta["tokenizer.ggml.add_space_prefix"]
    meta |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    roles = {"unknown": 0, "bos": 1, "eos": 2}
    meta |= {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items()}
    ours = loaded(tmp_path, meta)
    count = len(made["model"]["vocab"])
    for text in TEXTS:
        assert ours.encode(text) == scored.encode(text)
        assert ours.decode(ours.encode(text)) == scored.decode(scored.encode(text))
    assert ours.encode("the")[0] == 1
    assert ours.eos_token_ids == (2, count, count + 1)
    assert ours.encode("the<|tool_response>")[-1] == count + 1


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123456's", ["ab", "Ġ123456", "'s"]),
        ("llama-bpe", "ab 123456'S", ["ab", "Ġ", "123", "456", "'S"]),
        ("qwen2", "ab 12'S\n\nx", ["ab", "Ġ", "1", "2", "'S", "ĊĊ", "x"]),
        ("qwen35", "x\u0301b 12'S", ["xÌģb", "Ġ", "1", "2", "'S"]),
        *((pre, "ab 1234'S", ["ab", "Ġ", "123", "4", "'S"]) for pre in ("lfm2", "falcon-h1")),
        ("pixtral", "ab 1234'S", ["ab", "Ġ", "123", "4", "'S"]),
        ("smollm", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("tekken", "abCd 12/", ["ab", "Cd", "Ġ", "1", "2", "/"]),
        ("glm4", "ab 1234'S", ["ab", "Ġ", "123", "4", "'S"]),
        ("dbrx", "ab\n\nx", ["ab", "ĊĊ", "x"]),
        ("seed-coder", "a!\n\n12", ["a", "!", "ĊĊ", "1", "2"]),
        ("hunyuan-dense", "ab 1234!x \u3002", ["ab", "Ġ", "123", "4", "!x", "ĠãĢĤ"]),
        ("exaone4", "ab 123456's", ["ab", "Ġ123456", "'s"]),
        ("stablelm2", "ab 12", ["ab", "Ġ", "1", "2"]),
        *(
            (pre, "abCd's 12345'S/", ["ab", "Cd's", "Ġ", "123", "45", "'S", "/"])
            for pre in ("gpt-4o", "llama4", "minimax-m2")
        ),
        ("hunyuan", "ab 12'S", ["ab", "Ġ", "1", "2", "'S"]),
    ],
)
def test_how_text_is_split(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    meta = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre=pre)
    ours = loaded(tmp_path, meta)
    split = tokenizers.Tokenizer.from_str(ours.to_json()).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


def test_templates_and_bos(tmp_path: Path) -> None:
    meta = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="llama-bpe")
    meta |= {"tokenizer.chat_template": "{{ bos_token }}!", "tokenizer.chat_template.tool_use": "T"}
    tokenizer = loaded(tmp_path, meta)
    assert tokenizer.apply_chat_template([]) == "<|im_start|>!"
    assert tokenizer.apply_chat_template([], tools=[{}]) == "T"
    assert tokenizer.encode("a")[0] == 1  # the family of that split begins texts so


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "of kind 'bert'"),
        ({"tokenizer.ggml.pre": "mystery"}, "'mystery'; supported:"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no list of strings"),
        ({"tokenizer.ggml.merges": ["ab"]}, "joins nothing"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "does not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"tokenizer.huggingface.json": "{"}, "not a valid tokenizer"),
    ],
)
def test_bad_vocabularies(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    meta = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="gpt-2")
    with pytest.raises(ModelLoadError, match=words):
        load_checkpoint(vocabulary_file(tmp_path, {**meta, **change}))


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    assert load_checkpoint(vocabulary_file(tmp_path, {})).tokenizer is None
    no_vocab = {"tokenizer.ggml.model": "no_vocab"}
    assert load_checkpoint(vocabulary_file(tmp_path, no_vocab)).tokenizer is None


@pytest.mark.parametrize(
    "change", [{"tokenizer.ggml.scores": [0.0]}, {"tokenizer.ggml.tokens": ["a" * 2000]}]
)
def test_bad_scores(tmp_path: Path, change: dict[str, Any]) -> None:
    meta = tokenizer_metadata(json.loads(byte_fallback_json()), "llama") | change
    if len(meta["tokenizer.ggml.tokens"]) == 1:
        meta |= {"tokenizer.ggml.scores": [0.0], "tokenizer.ggml.token_type": [1]}
    with pytest.raises(ModelLoadError):
        load_checkpoint(vocabulary_file(tmp_path, meta))


def test_splitting_that_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    """llama.cpp b11549 lower-cases texts for this name and drops their white space."""
    meta = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="whitespace")
    with pytest.raises(UnsupportedModelError, match="'whitespace', which lower-cases a text"):
        loaded(tmp_path, meta)


@pytest.mark.parametrize(
    ("pre", "mask", "is_taken"),
    [
        ("jina-v2-code", "<mask>", True),
        ("jina-v2-de", "<mask>", True),
        ("modern-bert", "[MASK]", True),
        ("modern-bert", "<mask>", False),
        ("gpt-2", "<mask>", False),
    ],
)
def test_masks_take_the_white_space_before_them(
    tmp_path: Path, pre: str, mask: str, is_taken: bool
) -> None:
    """As llama.cpp b11549, which knows ModernBERT by ``general.name`` alone."""
    meta = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre=pre)
    tokens = meta["tokenizer.ggml.tokens"]
    meta |= {
        "tokenizer.ggml.tokens": [*tokens, mask],
        "tokenizer.ggml.token_type": [*meta["tokenizer.ggml.token_type"], 3],
    }
    ours = loaded(tmp_path, meta)
    taken, kept = ours.encode(f"x{mask} x"), ours.encode(f"x {mask} x")
    assert taken[:2] == [tokens.index("x"), len(tokens)]
    assert kept == (taken if is_taken else [taken[0], tokens.index("Ġ"), *taken[1:]])


ORDINARY, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def ends(tokens: dict[str, int], **more: Any) -> list[str]:
    """The spellings of those that end a text."""
    metadata = {"tokens": list(tokens), "token_type": list(tokens.values()), "model": "gpt2"} | more
    ids = end_ids({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    return [list(tokens)[i] for i in ids]


@pytest.mark.parametrize(
    "token",
    [
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>"),  # noqa: RUF001
        *("<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>"),
        *("<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    ],
)
def test_ends_by_spelling(token: str) -> None:
    """All control tokens that llama.cpp takes for the end; an ordinary token is none."""
    assert ends({"a": ORDINARY, token: CONTROL}) == [token]
    assert ends({"a": ORDINARY, token: ORDINARY}) == []


def test_real_vocabularies() -> None:
    """SmolLM2, Qwen 3 and gpt-oss; the last one's end of a message is none."""
    smollm = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
    smollm |= {"<repo_name>": CONTROL, "<reponame>": CONTROL, "<file_sep>": CONTROL}
    assert ends(smollm, eos_token_id=2) == ["<|im_end|>", "<|endoftext|>", "<reponame>"]
    qwen = {"</s>": ORDINARY, "<|endoftext|>": CONTROL, "<|im_end|>": CONTROL}
    assert ends(qwen, eos_token_id=2) == ["<|im_end|>", "<|endoftext|>"]
    harmony = ("<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|message|>")
    found = ends(dict.fromkeys(harmony, CONTROL), eos_token_id=1, eot_token_id=2)
    assert found == ["<|return|>", "<|endoftext|>", "<|call|>"]


def test_solars_end_of_a_message_ends_no_turn() -> None:
    marks = dict.fromkeys(("<|end|>", "<|flush|>", "<|calls|>", "<|endoftext|>"), CONTROL)
    assert "<|end|>" not in ends(marks, eos_token_id=3)
    assert "<|end|>" in ends(marks | {"<|calls|>": ORDINARY}, eos_token_id=3)


def test_tags_of_html_end_no_text() -> None:
    """In Gemma 3 ``</s>`` is user-defined: HTML's strike-through, which llama.cpp ends at."""
    gemma = {"<eos>": CONTROL, "<end_of_turn>": CONTROL, "<s>": USER_DEFINED, "</s>": USER_DEFINED}
    assert ends(gemma, model="llama", eos_token_id=0) == ["<eos>", "<end_of_turn>"]


def test_marks_that_converters_call_user_defined_end_a_turn() -> None:
    assert ends({"a": ORDINARY, "<|im_end|>": USER_DEFINED}) == ["<|im_end|>"]
    assert ends({"a": ORDINARY, "<eos>": USER_DEFINED}) == []


def test_without_types_the_spelling_decides() -> None:
    metadata = {"tokenizer.ggml.tokens": ["a", "<|im_end|>", "</s>"]}
    assert end_ids(metadata) == [1, 2]


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
