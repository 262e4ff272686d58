"""Tokens of a GGUF file that end a text, by its keys and by their spelling (llama.cpp b11549)."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.text.gguf_tokenizer import end_ids

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
