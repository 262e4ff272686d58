"""The embedded vocabulary with marks for gaps in place of its three rarest words."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

import tokenizers

from paceline.text.tokenizer import Tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def with_marks(source: str) -> str:
    """A ``tokenizer.json`` of as many tokens; the marks are no special tokens in its own words."""
    document: dict[str, Any] = json.loads(source)
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    for mark in MARKS:
        token = "".join(merges.pop())
        vocabulary[mark] = vocabulary.pop(token)
        kinds = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        document["added_tokens"].append({"id": vocabulary[mark], "content": mark, **kinds})
    document["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(document)


@functools.cache
def fim_tokenizer(template: str = "") -> Tokenizer:
    source = (files("paceline") / "embedded" / "target" / "tokenizer.json").read_text("utf-8")
    backend = tokenizers.Tokenizer.from_str(with_marks(source))
    end, templates = "<|endoftext|>", {"default": template} if template else {}
    return Tokenizer(backend, special_tokens={"eos_token": end}, chat_templates=templates)
