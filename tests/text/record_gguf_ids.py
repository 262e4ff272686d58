"""Records the ids that llama.cpp makes of many texts, by every way of cutting them.

Run ``python -m tests.text.record_gguf_ids`` in an environment with ``xllamacpp`` (whose library
exports llama.cpp's functions), ``gguf`` and ``tokenizers``. It is no test.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import ctypes
import json
import lzma
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.structured.llama_grammars import ModelParams
from tests.text.gguf_cases import BYTE_LEVEL, FILE, PIECES, metadata_of

NUM_TEXTS = 400
WORDS = (
    *("the", "The", "quick", "fox", "over", "naïve", "café", "Straße", "don't", "it's", "WE'LL"),
    *("I've", "you'RE", "he'd", "rock'n'roll", "getUserName", "XMLHttpRequest", "snake_case"),
    *("HelloWorld", "iPhone", "x=[12345];", "it's $5.00", "a+b<=c", "foo(bar, baz)", "i++"),
    *("1", "12", "123", "1234", "12345", "1234567", "3.14159", "0x1F", "1,000,000", "2024-01-31"),
    *(
        "٣٤٥",
        "Ⅷ",
        "½",
        "x²",
        "日本語",
        "テキスト",
        "ひらがな",
        "中文文本",
        "你好，世界。",
        "한국어",
        "안녕",
    ),
    *("привет", "Мир", "ёлка", "γειά", "Ωmega", "שלום", "مرحبا", "ไทย", "ÉCOLE", "éÉ", "ǅ"),
    *("!", "?", "...", "!!!", "—", "“quoted”", "«»", "@user", "#tag", "$", "%", "^", "&&", "||"),
    *("~", "`code`", "```", "**bold**", "//", "/*", "*/", "->", "=>", "::", "{}", "[]", "<h1>"),
    *("</h1>", "http://a.b/c?d=e&f=1", "C:\\dir", "{'k': 1}", '{"a":[1,2]}', "😀", "🎉🎉", "👩‍💻"),
    *("€", "£5", "∑x", "√", "©", "™", "…", "、", "。", "！", "（", "）", "ｆｕｌｌ", "１２３"),
    *("<|user|>", "<｜tool▁calls▁begin｜>", "<s>", "IMGIMGABZ", "<sentinel:12>", "'s", "'", "S'S"),
)
GAPS = (
    *(
        "",
        "",
        " ",
        " ",
        " ",
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "    ",
        "\n",
        "\n\n",
        "\r\n",
        " \n",
        "\n ",
    ),
    *("\t", "\t\t", " " * 7, " " * 15, " " * 16, " " * 33, "\u00a0", "\u3000", "\n\n\n  ", "-" * 9),
)
MARKED = ("e\u0301te\u0301", "नमस्ते दुनिया", "สวัสดี", "বাংলা", "  12", "x\u0308Y 34", "தமிழ் a\u0300B")


def texts() -> list[str]:
    """Words and gaps in every mixture; the last hundred hold marks of other scripts too."""
    draw = random.Random(20260101)
    found = [*WORDS, *MARKED, *sorted({gap for gap in GAPS if gap})]
    while len(found) < NUM_TEXTS:
        words = WORDS if len(found) < NUM_TEXTS - 60 else (*WORDS, *MARKED * 4)
        parts = [draw.choice(words) + draw.choice(GAPS) for _ in range(draw.randint(2, 9))]
        found.append("".join(parts))
    return found


def byte_vocabulary(sample: list[str]) -> dict[str, Any]:
    """Byte-level BPE whose merges reach over all borders, so that each cut shows in the ids."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(sample, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {"<s>": 3, "<|user|>": 3, "<｜tool▁calls▁begin｜>": 4}
    tokens += [
        token
        for token in ("Ġfox", "getUserName", "æĹ¥æľ¬èªŀ", "Ġ12345", "ĠÐ¼Ð¸ÑĢ", *special)
        if token not in tokens
    ]
    types = [special.get(token, 1) for token in tokens]
    ids = {"bos_token_id": tokens.index("!"), "eos_token_id": tokens.index("!")}
    merges = [" ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "merges": merges, "token_type": types, **ids}


def piece_vocabulary(sample: list[str]) -> dict[str, Any]:
    """SentencePiece's kind of BPE; runs of spaces are pieces of some lengths."""
    backend = tokenizers.Tokenizer(models.BPE())
    words = [text.replace(" ", "▁") for text in sample if "▁" not in text]
    trainer = trainers.BpeTrainer(vocab_size=1100, show_progress=False)
    backend.train_from_iterator(words, trainer)
    model = json.loads(backend.to_str())["model"]
    made = sorted(model["vocab"], key=model["vocab"].__getitem__)
    made += [run for n in (2, 3, 4, 5, 8, 14, 16) if (run := "▁" * n) not in made]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>"]
    special += ["<|endoftext|>"]
    made = [piece for piece in made if piece not in special and piece != "<h1>"]
    tokens = [*special, "<h1>", *made]
    types = [2, 3, 4, *[6] * 256, 3, 3, 4, *[1] * len(made)]
    merges = [" ".join(merge) for merge in model["merges"]]
    ranks = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}
    scores = [0.0] * len(special) + [-1000.0] + [-float(ranks.get(p, 2000 + len(p))) for p in made]
    return {"tokens": tokens, "token_type": types, "scores": scores, "merges": merges}


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    numbers = {"block_count": 1, "context_length": 128, "embedding_length": 64}
    numbers |= {"feed_forward_length": 64, "attention.head_count": 4}
    for key, number in numbers.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """The functions of llama.cpp that read a vocabulary."""

    def __init__(self) -> None:
        spec = find_spec("xllamacpp")
        assert spec is not None
        assert spec.origin is not None
        library = next(Path(spec.origin).parent.glob("xllamacpp*.so"))
        self._llama = llama = ctypes.CDLL(str(library))
        llama.llama_model_default_params.restype = ModelParams
        llama.llama_model_load_from_file.restype = ctypes.c_void_p
        llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
        llama.llama_model_get_vocab.restype = ctypes.c_void_p
        llama.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        llama.llama_model_free.argtypes = [ctypes.c_void_p]
        llama.llama_vocab_is_eog.restype = ctypes.c_bool
        llama.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int]
        llama.llama_tokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_bool, ctypes.c_bool),
        ]
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda *_: None
        )
        llama.llama_log_set(self._quiet, None)
        llama.llama_backend_init()

    @contextmanager
    def vocabulary(self, path: Path) -> Iterator[Any]:
        params = self._llama.llama_model_default_params()
        params.vocab_only = True
        model = self._llama.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp refuses {path}")
        yield self._llama.llama_model_get_vocab(model)
        self._llama.llama_model_free(model)

    def encode(self, vocabulary: Any, text: str) -> list[int]:
        data = text.encode()
        buffer = (ctypes.c_int * (len(data) * 2 + 16))()
        count = self._llama.llama_tokenize(
            vocabulary, data, len(data), buffer, len(buffer), False, True
        )
        return buffer[:count]

    def ends(self, vocabulary: Any, size: int) -> list[int]:
        return [i for i in range(size) if self._llama.llama_vocab_is_eog(vocabulary, i)]


def main() -> None:
    sample, llama = texts(), LlamaCpp()
    vocabularies = {"bytes": byte_vocabulary(sample), "pieces": piece_vocabulary(sample)}
    variants: list[list[list[int]]] = [[] for _ in sample]
    cases: dict[str, list[int]] = {}
    for case in (*BYTE_LEVEL, *PIECES):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            write_vocabulary(path, metadata_of(case, vocabularies))
            with llama.vocabulary(path) as vocabulary:
                found = [llama.encode(vocabulary, text) for text in sample]
        for known, ids in zip(variants, found, strict=True):
            if ids not in known:
                known.append(ids)
        cases[case] = [known.index(ids) for known, ids in zip(variants, found, strict=True)]
    origin = f"xllamacpp {version('xllamacpp')}"
    document = {"origin": origin, "texts": sample, "vocabularies": vocabularies}
    text = json.dumps(document | {"variants": variants, "cases": cases}, separators=(",", ":"))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{FILE}: {FILE.stat().st_size} bytes by {origin}", file=sys.stderr)


if __name__ == "__main__":
    main()
