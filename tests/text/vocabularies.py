"""Small tokenizers of each kind, made on the spot."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from paceline.text.tokenizer import Tokenizer

TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def main():\n    print('héllo wörld')\n    return 12345\n",
    "日本語のテキスト、中文文本 and €5 — naïve café 😀🎉",
] * 4


@functools.cache
def byte_level_json() -> str:
    """Byte-level BPE as GPT-2 and its descendants have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend.to_str()


@functools.cache
def byte_fallback_json() -> str:
    """SentencePiece-like BPE as Llama 2 has it: unknown characters become byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz,.é", "th", "▁th", "▁the", "er", "▁a", "an", "and"]
    vocabulary = {token: i for i, token in enumerate(tokens + pieces)}
    merges = [
        ("t", "h"),
        ("▁", "th"),
        ("▁th", "e"),
        ("e", "r"),
        ("▁", "a"),
        ("a", "n"),
        ("an", "d"),
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in tokens[:3]]
    )
    return backend.to_str()


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"})


def byte_fallback() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_fallback_json())
    begin_texts(backend, "<s>")
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def begin_texts(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Let encoding a text begin with a token of the vocabulary."""
    token = (bos, backend.token_to_id(bos))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[token]
    )


def save_tokenizer(folder: Path, tokenizer_json: str, **config: object) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
