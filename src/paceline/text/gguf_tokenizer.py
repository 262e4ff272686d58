"""The tokenizer in a GGUF file's metadata: an encoder from its lists. Knows no tensors.

Two kinds are built: byte-level BPE (``gpt2``) from its merges, and SentencePiece BPE from its
scores (``llama``) or its merges (``gemma4``). The rules by which text is split before byte-level
merging are in :mod:`paceline.text.gguf_splits`, the keys of the metadata in
:mod:`paceline.text.gguf_vocabulary`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.text.fim import GGUF_ROLES
from paceline.text.gguf_splits import PIECES, SplitRule, split_rule
from paceline.text.gguf_vocabulary import (
    CONTROL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    end_ids,
    role_id,
    string_list,
    text_value,
)
from paceline.text.piece_scores import merges_from_scores, scores_tie
from paceline.text.tokenizer import Tokenizer
from paceline.text.tokenizer_files import backend_from_json

logger = logging.getLogger(__name__)

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    **GGUF_ROLES,
}
_SPACE = "▁"
_MAX_TOKENS = 1 << 22
# Models of this vocabulary take the white space behind their marks as part of the marks.
_PHI3 = ("phi-3", "phi3")
_PHI3_ARCHITECTURES = ("phi3", "phimoe")
# These take the white space before them.
_LEFT_STRIPPED = {
    **dict.fromkeys(("jina-v2-de", "jina-v2-es", "jina-v2-code"), "<mask>"),
    "modern-bert": "[MASK]",
}
_PHI3_KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """Build the tokenizer; None where the file has no vocabulary.

    Raises:
        UnsupportedModelError: its kind, or its way of splitting text, is not supported.
        ModelLoadError: a list is missing or does not fit the others.
    """
    if PREFIX + "tokens" not in metadata:
        logger.warning("%s has no vocabulary: it takes and gives token ids only, not text", where)
        return None
    tokens = string_list(metadata, "tokens", where)
    if not 0 < len(tokens) <= _MAX_TOKENS:
        raise ModelLoadError(f"{where} has a vocabulary of {len(tokens)} tokens")
    kind, pre = text_value(metadata, "model"), text_value(metadata, "pre")
    rule = split_rule(pre) if kind == "gpt2" and pre not in PIECES else None
    types = metadata.get(PREFIX + "token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelLoadError(f"{where} has {len(tokens)} tokens, but not as many token types")
    ready_made, piece_scores = metadata.get("tokenizer.huggingface.json"), None
    if isinstance(ready_made, str):
        backend = backend_from_json(ready_made, where)
    elif rule is not None:
        backend = _byte_level(tokens, string_list(metadata, "merges", where), rule, where)
    elif kind in ("llama", "gemma4", "gpt2"):
        merges = _ranked(tokens, metadata, where)
        backend = _sentence_piece(tokens, merges, metadata, where)
        if kind == "llama":
            piece_scores = _scores_that_tie(tokens, types, merges, metadata)
    else:
        raise UnsupportedModelError(
            f"{where} has a tokenizer of kind {kind or 'unknown'!r}; supported: gpt2, llama and "
            "gemma4"
        )
    _add_special(backend, _special(metadata, tokens, types, splits=rule is not None))
    roles = _special_tokens(metadata, tokens)
    _frame_texts(
        backend,
        roles.get("bos_token") if _adds_bos(metadata, rule) else None,
        roles.get("eos_token") if metadata.get(PREFIX + "add_eos_token") is True else None,
    )
    return Tokenizer(
        backend,
        special_tokens=roles,
        eos_token_ids=end_ids(metadata),
        chat_templates=_templates(metadata),
        piece_scores=piece_scores,
    )


def _adds_bos(metadata: Mapping[str, Any], rule: SplitRule | None) -> bool:
    kind, pre = text_value(metadata, "model"), text_value(metadata, "pre")
    if kind == "gemma4" or (kind == "gpt2" and pre in PIECES and pre != "sarvam-moe"):
        return True  # as in llama.cpp: early files of Gemma 4 deny it by mistake
    flag = metadata.get(PREFIX + "add_bos_token")
    default = rule.adds_bos if rule is not None else kind == "llama"
    return flag if isinstance(flag, bool) else default


def _frame_texts(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let encoding a text put these tokens before and behind it.

    In llama.cpp (b11549) ``add_sep_token`` concerns reranking and BERT's vocabularies alone.
    """
    # Under names of their own: in a template some characters of a spelling mean something.
    special = [
        {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]}
        for name, token in (("bos", bos), ("eos", eos))
        if token is not None
    ]
    pieces = f"{'' if bos is None else 'bos '}$A{'' if eos is None else ' eos'}"
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Token -> id; of doubled tokens (paddings) the first counts."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _byte_level(
    tokens: list[str], merges: list[str], rule: SplitRule, where: str
) -> tokenizers.Tokenizer:
    pairs, whole_words = _pairs(merges, where), rule.whole_words
    backend = _backend(models.BPE, where, _vocabulary(tokens), pairs, ignore_merges=whole_words)
    backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: list[str], where: str) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ModelLoadError(f"{where} has a merge that joins nothing: {merge[:40]!r}")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _ranked(tokens: list[str], metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """The merges of pieces, which some files list and others tell by scores."""
    if text_value(metadata, "model") != "llama":
        return _pairs(string_list(metadata, "merges", where), where)
    scores = metadata.get(PREFIX + "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{where} has {len(tokens)} tokens, but not as many scores")
    return merges_from_scores(_vocabulary(tokens), scores)


def _scores_that_tie(
    tokens: list[str],
    types: list[Any],
    merges: list[tuple[str, str]],
    metadata: Mapping[str, Any],
) -> dict[str, float] | None:
    """The score of each piece, if merges cannot say the same."""
    vocabulary, scores = _vocabulary(tokens), metadata[PREFIX + "scores"]
    whole = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and _SPACE not in token)
    }
    joined = {left + right for left, right in merges} - whole
    if not scores_tie({piece: scores[vocabulary[piece]] for piece in joined}):
        return None
    return {piece: scores[index] for piece, index in vocabulary.items() if piece not in whole}


def _sentence_piece(
    tokens: list[str], merges: list[tuple[str, str]], metadata: Mapping[str, Any], where: str
) -> tokenizers.Tokenizer:
    unknown = role_id(metadata, "unknown_token_id")
    named = tokens[unknown] if unknown is not None and unknown < len(tokens) else None
    options = {"unk_token": named, "fuse_unk": True, "byte_fallback": True}
    backend = _backend(models.BPE, where, _vocabulary(tokens), merges, **options)
    spaces = normalizers.Replace(" ", _SPACE)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(PREFIX + "add_space_prefix", text_value(metadata, "model") == "llama"):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        undo.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    if text_value(metadata, "model") != "llama":  # listed merges reach over no end of a line
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence(undo)
    return backend


def _backend(kind: Any, where: str, *args: Any, **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(kind(*args, **options))
    except Exception as error:  # the library's own class
        raise ModelLoadError(f"{where} has a vocabulary that does not fit: {error}") from error


def _special(
    metadata: Mapping[str, Any], tokens: list[str], types: list[Any], *, splits: bool
) -> list[AddedToken]:
    """Tokens that are matched whole before any merging.

    Args:
        splits: the vocabulary spells bytes. In others "▁" is a space, and user-defined tokens
            with spaces come about by merging.
    """
    name = str(metadata.get("general.name", "")).lower()
    is_phi3 = text_value(metadata, "model") == "llama" and (
        any(part in name for part in _PHI3)
        or metadata.get("general.architecture") in _PHI3_ARCHITECTURES
    )
    mask = _LEFT_STRIPPED.get(text_value(metadata, "pre"))
    found = []
    for token, kind in zip(tokens, types, strict=True):
        special = kind in (UNKNOWN, CONTROL)
        if token and (special or (kind == USER_DEFINED and (splits or _SPACE not in token))):
            options = {
                "lstrip": token == mask,
                "rstrip": is_phi3 and token not in _PHI3_KEEPS_SPACE,
            }
            found.append(AddedToken(token, normalized=False, special=special, **options))
    return found


def _add_special(backend: tokenizers.Tokenizer, found: list[AddedToken]) -> None:
    backend.add_special_tokens([token for token in found if token.special])
    backend.add_tokens([token for token in found if not token.special])


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    ids = {role: role_id(metadata, key) for role, key in _ROLES.items()}
    return {role: tokens[i] for role, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    return {
        name.removeprefix(key).removeprefix(".") or "default": value
        for name, value in metadata.items()
        if (name == key or name.startswith(key + ".")) and isinstance(value, str)
    }
