"""Marks for gaps: found in vocabularies of each kind, and texts between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, processors

from paceline.core.errors import RequestError
from paceline.loading.checkpoint import load_checkpoint
from paceline.text.fim import Gap
from paceline.text.tokenizer import Tokenizer
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.text.vocabularies import byte_fallback_json, byte_level, byte_level_json

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")


def vocabulary(*marks: str, source: str = "", special: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(source or byte_level_json())
    added = [AddedToken(mark, normalized=False, special=special) for mark in marks]
    backend.add_special_tokens(added) if special else backend.add_tokens(added)
    return Tokenizer(backend)


def spelled(tokenizer: Tokenizer, gap: Gap) -> str:
    return tokenizer.decode(tokenizer.fim_prompt(gap), skip_special_tokens=False)


@pytest.mark.parametrize(
    "marks",
    [
        QWEN[:3],
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<PRE>", "<SUF>", "<MID>"),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_the_gap_comes_last(marks: tuple[str, ...], special: bool) -> None:
    tokenizer = vocabulary(*marks, special=special)
    before, behind, middle = marks
    found = spelled(tokenizer, Gap(f"a{middle}", f"{behind}c", "b"))
    assert found == f"{before}a{middle}{behind}{behind}c{middle}b"
    ids = tokenizer.fim_prompt(Gap(f"a{middle}", f"{behind}c", "b"))
    assert tokenizer.fim is not None
    assert [each for each in ids if each in tokenizer.fim.all] == list(tokenizer.fim.all[:3])


@pytest.mark.parametrize(("frame", "begin"), [("e $A", [0]), ("$A e", []), ("e $A e", [0])])
def test_only_what_begins_a_text_begins_a_prompt(frame: str, begin: list[int]) -> None:
    """Behind a text may stand the very token that begins one."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("e", 0)])
    tokenizer = vocabulary(*QWEN[:3], source=backend.to_str())
    ids = tokenizer.fim_prompt(Gap("a", "b"))
    assert ids[: -len(vocabulary(*QWEN[:3]).fim_prompt(Gap("a", "b")))] == begin


def test_other_files_have_names_where_the_vocabulary_marks_files() -> None:
    gap = Gap("x", "y", others=[("a.py", "A<|file_sep|>"), ("", "B")])
    assert spelled(vocabulary(*QWEN, special=False), gap) == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nA<|file_sep|>\n<|file_sep|>file\nB\n"
        "<|file_sep|>file\n<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )
    assert spelled(vocabulary(*QWEN[:3]), gap).startswith("A<|file_sep|>\n\nB\n\n<|fim_prefix|>x")


def test_runs_of_spaces_stay_tokens_in_a_literal_text() -> None:
    tokenizer = vocabulary("        ", "<|x|>", special=False)
    ids = tokenizer.encode_literal("a        <|x|>")
    assert "        " in [tokenizer.id_to_token(each) for each in ids]
    assert tokenizer.decode(ids) == "a        <|x|>"
    assert len(ids) > len(tokenizer.encode("a        <|x|>"))


def test_no_space_is_put_into_a_gap() -> None:
    """SentencePiece begins a text with a space, which belongs to what stands before the gap."""
    tokenizer = vocabulary("▁<PRE>", "▁<SUF>", "▁<MID>", source=byte_fallback_json())
    ids = tokenizer.fim_prompt(Gap("the", "and", "the"))
    told = [tokenizer.id_to_token(each) for each in ids]
    assert told == ["▁<PRE>", "▁the", "▁<SUF>", "an", "d", "▁<MID>", "th", "e"] or told == [
        *("▁<PRE>", "▁the", "▁<SUF>", "and", "▁<MID>", "th", "e"),
    ]


def test_a_vocabulary_without_marks_is_refused() -> None:
    for tokenizer in (byte_level(), vocabulary(*QWEN[:2])):
        assert tokenizer.fim is None
        with pytest.raises(RequestError, match="fill-in-the-middle tokens"):
            tokenizer.fim_prompt(Gap("a", "b"))


def test_a_gguf_file_names_marks_that_are_spelled_in_its_own_way(tmp_path: Path) -> None:
    names = ("<A>", "<B>", "<C>", "<D>")
    source = json.loads(vocabulary(*names).to_json())
    for token in source["added_tokens"]:
        source["model"]["vocab"].setdefault(token["content"], token["id"])
    first = source["model"]["vocab"]["<A>"]
    keys = ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_sep_token_id")
    ids = {key: first + place for place, key in enumerate(keys)}
    metadata = tokenizer_metadata(source, "gpt2", pre="gpt-2", **ids)
    convert("qwen3", tmp_path / "m.gguf", metadata=metadata, changes={"vocab_size": 600})
    tokenizer = load_checkpoint(tmp_path / "m.gguf").tokenizer
    assert tokenizer is not None
    gap = Gap("x", "y<C>", others=[("a.py", "A")])
    expected = "<D>a.py\nA\n<D>file\n<A>x<B>y<C><C>"
    assert spelled(tokenizer, gap) == expected
    tokenizer.save(tmp_path)
    assert spelled(Tokenizer.from_folder(tmp_path), gap) == expected
