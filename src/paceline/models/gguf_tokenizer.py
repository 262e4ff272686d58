"""The tokenizer in a GGUF file's metadata. Knows the keys of the format, no tensors.

Two kinds are built: byte-level BPE (``gpt2``) from its merges, and SentencePiece BPE from its
scores (``llama``) or its merges (``gemma4``). How text is split before byte-level merging is only
named in the file; the rules for the names are facts about the models' own tokenizers and kept in a
table here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.fim import GGUF_ROLES
from paceline.models.tokenizer import Tokenizer
from paceline.models.tokenizer_files import backend_from_json

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    **GGUF_ROLES,
}
# Ends of a turn that files often fail to list beside their one eos_token_id.
_TURN_ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<turn|>",
}
_GEMMA_ENDS = {"<|tool_response>"}  # what Gemma 4 hands over with after calls of tools
# Where these end a turn, as in gpt-oss, "<|end|>" ends one of several messages in it.
_HARMONY_ENDS = {"<|return|>", "<|call|>"}
_SPACE = "▁"
_MAX_TOKENS = 1 << 22

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Words end where small letters are followed by capital ones.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str | tuple[str, ...]] = {
    "llama3": f"{_ENDINGS}|" + _WORDS % r"\p{N}{1,3}",
    "qwen2": f"{_ENDINGS}|" + _WORDS % r"\p{N}",
    "qwen35": f"{_ENDINGS}|"  # marks belong to words
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": _CASED % ("", "", r"\p{N}"),
    "gpt-4o": _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?", r"\p{N}{1,3}"),
    "digits": "",
    "gpt2": "",
    "seed-coder": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek-v3": (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK),
}
# But words of the vocabulary are merged like all others, and no BOS comes first.
_SPLITS["glm4"] = _SPLITS["llama3"]
_SPLIT_NAMES = {
    **dict.fromkeys(("gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), "qwen2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    "tekken": "tekken",
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), "glm4"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), "deepseek-v3"),
    "seed-coder": "seed-coder",
    "exaone4": "gpt2",
    "stablelm2": "qwen2",
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("lfm2", "falcon-h1", "pixtral"), "llama3"),
    "qwen35": "qwen35",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """Build the tokenizer; None where the file has no vocabulary.

    Raises:
        UnsupportedModelError: its kind, or its way of splitting text, is not supported.
        ModelLoadError: a list is missing or does not fit the others.
    """
    if _PREFIX + "tokens" not in metadata:
        logger.warning("%s has no vocabulary: token ids alone can be given and got, no text", where)
        return None
    tokens = _strings(metadata, "tokens", where)
    if not 0 < len(tokens) <= _MAX_TOKENS:
        raise ModelLoadError(f"{where} has a vocabulary of {len(tokens)} tokens")
    kind, split = _text(metadata, "model"), _split_rule(metadata)
    types = metadata.get(_PREFIX + "token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelLoadError(f"{where} has {len(tokens)} tokens, but not as many token types")
    ready_made = metadata.get("tokenizer.huggingface.json")
    if isinstance(ready_made, str):
        backend = backend_from_json(ready_made, where)
    elif kind == "gpt2":
        backend = _byte_level(tokens, _strings(metadata, "merges", where), split, where)
    elif kind in ("llama", "gemma4"):
        backend = _sentence_piece(tokens, metadata, where)
    else:
        raise UnsupportedModelError(
            f"{where} has a tokenizer of kind {kind or 'unknown'!r}; supported are gpt2, llama and "
            "gemma4"
        )
    _add_special(backend, tokens, types)
    flag = metadata.get(_PREFIX + "add_bos_token")
    default = kind != "gpt2" or split in ("llama3", "tekken")
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(metadata, tokens),
        eos_token_ids=end_ids(metadata),
        chat_templates=_templates(metadata),
        add_bos_token=flag if isinstance(flag, bool) else default,
    )


def bos_id(metadata: Mapping[str, Any]) -> int | None:
    """The id of the token that begins a text, if there is one."""
    return _role_id(metadata, "bos_token_id")


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a text or a turn."""
    ids = [_role_id(metadata, f"{role}_token_id") for role in ("eos", "eot", "eom")]
    tokens, types = (metadata.get(_PREFIX + key) for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        control = {token: i for i, (token, kind) in pairs if kind == _CONTROL}
        in_harmony = control.keys() >= _HARMONY_ENDS
        ends = _TURN_ENDS - {"<|end|>"} | _HARMONY_ENDS if in_harmony else _TURN_ENDS
        ids = [i for i in ids if not in_harmony or i != control.get("<|end|>")]
        ids += sorted(i for token, i in control.items() if token in ends)
        if _text(metadata, "model") == "gemma4":  # which some files do not call a control token
            ids += [i for i, token in enumerate(tokens) if token in _GEMMA_ENDS]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _role_id(metadata: Mapping[str, Any], key: str) -> int | None:
    # SentencePiece models have fixed ids where the file names none.
    fixed = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    default = fixed.get(key) if _text(metadata, "model") == "llama" else None
    value = metadata.get(_PREFIX + key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(_PREFIX + key)
    return value if isinstance(value, str) else ""


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelLoadError(f"{where} has no list of strings {_PREFIX}{key}")
    return value


def _split_rule(metadata: Mapping[str, Any]) -> str:
    name = _text(metadata, "pre")
    if _text(metadata, "model") != "gpt2":
        return "gpt2"
    if not name:
        logger.warning("the GGUF file does not say how text is split into words; using GPT-2's way")
        return "gpt2"
    if name not in _SPLIT_NAMES:
        raise UnsupportedModelError(
            f"the GGUF file splits text in the way {name[:40]!r}; supported are "
            f"{', '.join(_SPLIT_NAMES)}"
        )
    return _SPLIT_NAMES[name]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Token -> id; of doubled tokens (paddings) the first counts."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _byte_level(
    tokens: list[str], merges: list[str], split: str, where: str
) -> tokenizers.Tokenizer:
    pairs = _pairs(merges, where)
    whole_words = split in ("llama3", "tekken")
    backend = _backend(models.BPE, where, _vocabulary(tokens), pairs, ignore_merges=whole_words)
    rule = _SPLITS[split]
    patterns = [rule] if isinstance(rule, str) and rule else list(rule)
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
    ]
    if split == "digits":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns))
    if split in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
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


def _ranked(
    tokens: list[str], vocabulary: Mapping[str, int], metadata: Mapping[str, Any], where: str
) -> list[tuple[str, str]]:
    """The merges of pieces, which some files list and others tell by scores."""
    if _text(metadata, "model") == "gemma4":
        return _pairs(_strings(metadata, "merges", where), where)
    scores = metadata.get(_PREFIX + "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{where} has {len(tokens)} tokens, but not as many scores")
    return merges_from_scores(vocabulary, scores)


def _sentence_piece(
    tokens: list[str], metadata: Mapping[str, Any], where: str
) -> tokenizers.Tokenizer:
    vocabulary = _vocabulary(tokens)
    unknown = _role_id(metadata, "unknown_token_id")
    named = tokens[unknown] if unknown is not None and unknown < len(tokens) else None
    merges = _ranked(tokens, vocabulary, metadata, where)
    options = {"unk_token": named, "fuse_unk": True, "byte_fallback": True}
    backend = _backend(models.BPE, where, vocabulary, merges, **options)
    spaces = normalizers.Replace(" ", _SPACE)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_PREFIX + "add_space_prefix", _text(metadata, "model") == "llama"):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        undo.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(undo)
    return backend


def _backend(kind: Any, where: str, *args: Any, **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(kind(*args, **options))
    except Exception as error:  # the library's own class
        raise ModelLoadError(f"{where} has a vocabulary that does not fit: {error}") from error


def _add_special(backend: tokenizers.Tokenizer, tokens: list[str], types: list[Any]) -> None:
    """Tokens that are matched whole before any merging."""
    control, user = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL) and token:
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED and token and _SPACE not in token:
            user.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(control)
    backend.add_tokens(user)


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    ids = {role: _role_id(metadata, key) for role, key in _ROLES.items()}
    return {role: tokens[i] for role, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    return {
        name.removeprefix(key).removeprefix(".") or "default": value
        for name, value in metadata.items()
        if (name == key or name.startswith(key + ".")) and isinstance(value, str)
    }


_MAX_PIECE = 1024  # splitting a piece is quadratic in its length


def merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs in the order in which they merge.

    SentencePiece joins the neighbours whose union has the highest score; so each split of a piece
    into two pieces is a rule that ranks by the piece's score, ties by the pieces' ids.

    Raises:
        ModelLoadError: a piece is absurdly long.
    """
    rules: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        if len(piece) > _MAX_PIECE:
            raise ModelLoadError(f"the vocabulary has a token of {len(piece)} characters")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                rules.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    rules.sort()
    return [(left, right) for *_, left, right in rules]
