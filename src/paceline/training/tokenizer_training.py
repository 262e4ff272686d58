"""Byte-level BPE tokenizers from text. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import TrainingError
from paceline.writing import write_text

END_OF_TEXT = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
PAD = "<|pad|>"


def train_tokenizer(
    texts: Iterable[str], folder: Path, vocab_size: int, chat_tokens: bool = True
) -> None:
    """Learn merges and write ``tokenizer.json`` and ``tokenizer_config.json``.

    Every byte has a token, so that any text can be written; ``<|endoftext|>`` is token 0.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, *(CHAT_TOKENS if chat_tokens else ()), PAD]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    text = tokenizer.to_str(pretty=True)
    write_text(folder / "tokenizer.json", text, TrainingError, make_folder=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
    }
    text = json.dumps(settings, indent=2) + "\n"
    write_text(folder / "tokenizer_config.json", text, TrainingError)
