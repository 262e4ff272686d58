"""Encoding texts in which special tokens that are written out are mere text. Knows no requests."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

import tokenizers

from paceline.models.tokenizer_files import backend_from_json

_CONTROL = re.compile(r"<[|｜].+[|｜]>")  # noqa: RUF001


def literal_backend(
    backend: tokenizers.Tokenizer, marks: Collection[int] = ()
) -> tokenizers.Tokenizer:
    """A copy of an encoder that takes no special token out of a text.

    Added tokens that are words of texts, such as runs of spaces, stay. Some vocabularies call
    marks ordinary words; what is spelled ``<|...|>`` is taken for one.

    Args:
        marks: ids of further tokens that a text shall not become.
    """
    document = json.loads(backend.to_str())
    for token in document["added_tokens"]:
        token["special"] |= token["id"] in marks or bool(_CONTROL.fullmatch(token["content"]))
    copy = backend_from_json(json.dumps(document), "the tokenizer")
    copy.encode_special_tokens = True
    return copy
