"""The keys of a GGUF file that describe its vocabulary, and the tokens that end a text.

Knows no encoder: :mod:`paceline.text.gguf_tokenizer` builds that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelLoadError

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of tokens; 1 is an ordinary one."""

# What llama.cpp (b11549) takes for an end of generation by its text alone.
_MARKED_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<turn|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    *("<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>"),
}
# Texts may hold these as words: "</s>" ends what HTML strikes through.
_WORDLIKE_ENDS = {
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<fim_pad>", "<fim-pad>", "<PAD>", "[PAD]", "<fim-repo>", "<REPO>", "<reponame>"),
}
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Where these end a turn, as in gpt-oss and Solar, "<|end|>" ends one of several messages in it.
_MESSAGE_FORMATS = (
    {"<|return|>", "<|call|>"},
    {"<|flush|>", "<|call|>"},
    {"<|flush|>", "<|calls|>"},
)


def bos_id(metadata: Mapping[str, Any]) -> int | None:
    """The id of the token that begins a text, if there is one."""
    return role_id(metadata, "bos_token_id")


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a text or a turn, that of the file's ``eos_token_id`` first."""
    ids = [role_id(metadata, f"{role}_token_id") for role in _END_ROLES]
    ends = _spelled_ends(metadata)
    if any(ends.keys() >= marks for marks in _MESSAGE_FORMATS):
        message_end = ends.pop("<|end|>", None)
        ids = [i for i in ids if i is None or i != message_end]
    return list(dict.fromkeys(i for i in (*ids, *sorted(ends.values())) if i is not None))


def _spelled_ends(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Tokens that end a text by their spelling, unless the file calls them ordinary ones.

    What the file calls user-defined ends a text only where no text would spell it: converters mark
    so both ``<|im_end|>`` and the tags of HTML.
    """
    tokens, types = (metadata.get(PREFIX + key) for key in ("tokens", "token_type"))
    if not isinstance(tokens, list):
        return {}
    kinds = types if isinstance(types, list) else [CONTROL] * len(tokens)
    found = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        special = kind in (UNKNOWN, CONTROL)
        if (token in _WORDLIKE_ENDS and special) or (
            token in _MARKED_ENDS and (special or kind == USER_DEFINED)
        ):
            found[token] = index
    return found


def role_id(metadata: Mapping[str, Any], key: str) -> int | None:
    """The id that the file gives a role such as ``bos_token_id``."""
    # SentencePiece models have fixed ids where the file names none.
    fixed = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    default = fixed.get(key) if text_value(metadata, "model") == "llama" else None
    value = metadata.get(PREFIX + key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_value(metadata: Mapping[str, Any], key: str) -> str:
    """The string under a key of the vocabulary, empty where there is none."""
    value = metadata.get(PREFIX + key)
    return value if isinstance(value, str) else ""


def string_list(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    """The strings under a key of the vocabulary.

    Raises:
        ModelLoadError: there is no such list.
    """
    value = metadata.get(PREFIX + key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelLoadError(f"{where} has no list of strings {PREFIX}{key}")
    return value
