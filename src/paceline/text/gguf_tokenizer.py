"""The tokenizer in a GGUF file's metadata: an encoder from its lists. Knows no tensors.

Two kinds are built: byte-level BPE (``gpt2``) from its merges, and SentencePiece BPE from its
scores (``llama``) or its merges (``gemma4``). Owns the keys that describe a vocabulary, the tokens
that end a text, and the rules by which text is split before byte-level merging.

A file only names its rule (``tokenizer.ggml.pre``). The names are llama.cpp's (b11549), and each
rule is that of the model's own tokenizer, or a shorter one that gives the same tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.text.fim import GGUF_ROLES
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
    added = _special(metadata, tokens, types, splits=rule is not None)
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
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
    # llama.cpp's add_sep_token (b11549) concerns reranking and BERT's vocabularies alone.
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
    if rule.composes:
        backend.normalizer = normalizers.NFC()
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

    ``splits`` says that the vocabulary spells bytes. In others "▁" is a space, and user-defined
    tokens with spaces come about by merging.
    """
    name = str(metadata.get("general.name", "")).lower()
    is_phi3 = text_value(metadata, "model") == "llama" and (
        any(part in name for part in _PHI3)
        or metadata.get("general.architecture") in _PHI3_ARCHITECTURES
    )
    mask = _LEFT_STRIPPED.get(text_value(metadata, "pre"))
    matched_whole = []
    for token, kind in zip(tokens, types, strict=True):
        special = kind in (UNKNOWN, CONTROL)
        if token and (special or (kind == USER_DEFINED and (splits or _SPACE not in token))):
            options = {
                "lstrip": token == mask,
                "rstrip": is_phi3 and token not in _PHI3_KEEPS_SPACE,
            }
            matched_whole.append(AddedToken(token, normalized=False, special=special, **options))
    return matched_whole


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


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Steps that cut a text, each step every part that the steps before have left.

    Attributes:
        patterns: regular expressions; what one matches becomes a part, and so does what lies
            between two matches.
        whole_words: a part that is one of the tokens becomes that token, whatever the merges say.
        adds_bos: a text begins with the BOS token unless the file says otherwise.
        composes: the text is brought into Unicode's form NFC first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> Any:
        """The steps of the backend that split a text and spell its bytes."""
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(numbers: str, spaces: str = _SPACES) -> str:
    """Words with one character before them, numbers, other signs, white space."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{spaces}"


def _cased(endings: str, numbers: str) -> str:
    """Words that end where small letters are followed by capital ones; marks belong to words."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{endings}|"
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{endings}|"
        rf"{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = f"{_ENDINGS}|" + _words(r"\p{N}{1,3}")
_QWEN2 = f"{_ENDINGS}|" + _words(r"\p{N}")
_THREE_DIGITS = r"\p{N}{1,3}"
# Groups of three from the right. What lies before the first group stays in one part with it.
_GROUPED_DIGITS = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_EAST_ASIAN = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_CODE_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK = rf"{_CODE_SIGN}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_IDEOGRAPHS = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, but for some small alphabets and those of mathematics.
_DEEPSEEK_LETTERS = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}]]"
)
_DEEPSEEK_SIGNS = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_LONG_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_STOPS = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|"
    r"[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    r"[\u3105-\u312f]+|" + _EAST_ASIAN
)
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f"
    r"\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    r"\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

# The second of Kimi's classes leaves out Han characters, which are words of their own.
_KIMI = (
    r"\p{Han}+|[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^\p{Han}]]+" + _ENDINGS + "?|"
    rf"{_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UNCASED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+" + _ENDINGS + "?"
_UNCASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

_RULES: dict[tuple[str, ...], SplitRule] = {
    ("", "default"): SplitRule(
        (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    (
        *("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
        *("exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe"),
        *("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
    ): SplitRule((_GPT2,)),
    (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        "mellum2",
    ): SplitRule((r"\p{N}", _GPT2)),
    (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        *("midm-2.0", "jina-v5-nano"),
    ): SplitRule((_LLAMA3,), whole_words=True, adds_bos=True),
    ("glm4", "glm5"): SplitRule((_LLAMA3,), whole_words=True),
    ("chatglm-bpe", "dbrx", "smaug-bpe"): SplitRule((_LLAMA3,)),
    ("minicpm5",): SplitRule((_THREE_DIGITS, f"{_ENDINGS}|" + _words(r"\p{N}+")), whole_words=True),
    (*("qwen2", "deepseek-r1-qwen", "f2llmv2", "megrez", "hunyuan", "stablelm2"),): SplitRule(
        (_QWEN2,), composes=True
    ),
    ("grok-2", "kormo", "solar-open"): SplitRule((_QWEN2,)),
    ("laguna",): SplitRule((r"[^\n]+|\n+", _QWEN2)),
    ("ufakzeka",): SplitRule((_words(r"\p{N}"),)),
    ("qwen35",): SplitRule(  # marks belong to words
        (
            f"{_ENDINGS}|"
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
        ),
        composes=True,
    ),
    ("jais-2",): SplitRule(
        (f"{_ENDINGS}|" + _words(_THREE_DIGITS, rf"\s*[\r\n]+|{_LONG_SPACES}|\s"),)
    ),
    ("seed-coder",): SplitRule(
        (rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",)
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): SplitRule(
        (f"{_ENDINGS}|" + _words(r"\p{N}", r"\s*[\r\n]|\s+(?!\S)|\s+"),)
    ),
    ("exaone-moe",): SplitRule(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("tekken",): SplitRule((_cased("", r"\p{N}"),), whole_words=True, adds_bos=True),
    ("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"): SplitRule(
        (_cased(f"{_ENDINGS}?", _THREE_DIGITS),)
    ),
    ("granite-embed-multi-97m",): SplitRule(
        (_cased(f"{_ENDINGS}?", _THREE_DIGITS),), whole_words=True
    ),
    ("kimi-k2",): SplitRule((_KIMI,)),
    ("youtu",): SplitRule(
        (_YOUTU_SCRIPTS, rf"{_UNCASED}|\p{{N}}|{_UNCASED_REST}"), whole_words=True
    ),
    ("tiny_aya", "cohere2moe"): SplitRule(
        (_GROUPED_DIGITS, f"{_UNCASED}|{_THREE_DIGITS}|{_UNCASED_REST}")
    ),
    ("deepseek-llm",): SplitRule(
        (
            *(r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}+", rf"\s?{_DEEPSEEK_SIGNS}+", r"\s+\z"),
            *(_IDEOGRAPHS, r"\p{N}+"),
        )
    ),
    ("deepseek-coder",): SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): SplitRule(
        (_THREE_DIGITS, _EAST_ASIAN, _DEEPSEEK)
    ),
    ("spark2_5",): SplitRule(
        (
            *(_THREE_DIGITS, _EAST_ASIAN),
            rf"{_CODE_SIGN}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    ("afmoe",): SplitRule((_GROUPED_DIGITS, _AFMOE_SCRIPTS, _DEEPSEEK)),
    ("falcon",): SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("bloom", "poro-chat", "gpt3-finnish"): SplitRule((_STOPS,)),
    ("viking",): SplitRule((_STOPS, r"\p{N}")),
    ("superbpe",): SplitRule((r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))")),
    ("chameleon",): SplitRule(
        (
            *("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}"),
            *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        ),
        adds_bos=True,
    ),
}
_BY_NAME = {name: rule for names, rule in _RULES.items() for name in names}
PIECES = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Names of vocabularies of SentencePiece's kind whose merges are listed: a text is not split."""
_REFUSED = {
    "whitespace": "lower-cases a text and drops its white space, which decoding cannot undo"
}


def split_rule(name: str) -> SplitRule:
    """The rule of a name; an empty one stands for a file that names none. ``UnsupportedModelError``
    where the name is unknown, or its rule cannot be followed.
    """
    if name in ("", "default"):
        logger.warning(
            "the GGUF file does not say how text is split into words; following llama.cpp's rule "
            "for such files, which need not be the model's own"
        )
    if name in _REFUSED:
        raise UnsupportedModelError(
            f"the GGUF file splits text in the way {name!r}, which {_REFUSED[name]}; convert a "
            "model with another tokenizer"
        )
    if name not in _BY_NAME:
        raise UnsupportedModelError(
            f"the GGUF file splits text in the way {name[:40]!r}; supported: "
            f"{', '.join(sorted((_BY_NAME.keys() | PIECES) - {''}))}"
        )
    return _BY_NAME[name]


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
    ends = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        special = kind in (UNKNOWN, CONTROL)
        if (token in _WORDLIKE_ENDS and special) or (
            token in _MARKED_ENDS and (special or kind == USER_DEFINED)
        ):
            ends[token] = index
    return ends


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
    """The strings under a key of the vocabulary; ``ModelLoadError`` where there is no such list."""
    value = metadata.get(PREFIX + key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelLoadError(f"{where} has no list of strings {PREFIX}{key}")
    return value
