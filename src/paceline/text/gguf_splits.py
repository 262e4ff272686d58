"""How a text is split before byte-level merging. Knows the names that GGUF files give such rules.

A file only names its rule (``tokenizer.ggml.pre``). The names are llama.cpp's (b11549), and each
rule is that of the model's own tokenizer. At capital letters some of llama.cpp's rules do not cut
where the model's own does. No merge joins pieces there, so the tokens are the same, and the table
has the shorter rule. Where llama.cpp cuts off marks that belong to a word, the table has the
model's own rule.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from paceline.core.errors import UnsupportedModelError

logger = logging.getLogger(__name__)


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

    def normalizer(self) -> Any:
        """The step of the backend that comes before splitting, or None."""
        return normalizers.NFC() if self.composes else None

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
    """The rule of a name; an empty one stands for a file that names none.

    Raises:
        UnsupportedModelError: the name is unknown, or its rule cannot be followed.
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
