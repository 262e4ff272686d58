"""``train_lm``: a small decoder on text files, from scratch or continued.

Owns the recipe; the loop, the data and the files are its neighbours'.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from paceline.core.errors import TrainingError
from paceline.core.files import write_text
from paceline.models.weights import check_whole_head
from paceline_lab.train.card import Rows, TrainingResult, texts_of, training_card
from paceline_lab.train.checkpoint import FILE_NAME as STATE
from paceline_lab.train.checkpoint import remove_state
from paceline_lab.train.configs import LMTrainingConfig, TrainingConfig
from paceline_lab.train.data import (
    TokenDocuments,
    Windows,
    pack,
    read_documents,
    split_held_out,
    tokenize,
)
from paceline_lab.train.model_files import (
    TrainableModel,
    check_output,
    load_model,
    load_tokenizer,
    new_model,
    save_model,
    vocabulary_size,
)
from paceline_lab.train.surgery import hybridise, upcycle
from paceline_lab.train.trainer import (
    DecoderTask,
    TrainingData,
    computing_on,
    cross_entropy,
    run_training,
    spent,
)


@dataclass(frozen=True, slots=True)
class LMTrainingResult(TrainingResult):
    """Of a language model's training; losses are in nats per token on the whole held-out set.

    They are NaN where nothing is held out.
    """

    held_out_before: float
    held_out_after: float

    @property
    def figures(self) -> Rows:
        losses = f"{self.held_out_after:.3f} ({self.held_out_before:.3f} before)"
        return [("held-out loss (nats per token)", losses)]


def train_lm(config: LMTrainingConfig) -> LMTrainingResult:
    """Train a language model and write it in the Hugging Face layout.

    Interrupted at any moment, the same call continues where the last saved state was.

    Raises:
        TrainingError: texts, sizes, a saved state or the output folder cannot be used.
        ConfigError: the continued model's configuration cannot be used.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = check_output(config.output, config.overwrite)
    tokenizer_folder = _tokenizer_folder(config, folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    model = _initial_model(config, tokenizer)
    separator = separator_id(model)
    documents = tokenize(read_documents(config.text, config.exclude, config.stdlib), tokenizer)
    train, held_out = split_held_out(documents, config.held_out_tokens, config.seed)
    data = training_data(train, held_out, config, separator)
    with computing_on(config.device):
        model = model.to(config.device)
        task = DecoderTask(model, data, cross_entropy, config)
        progress = run_training(task, config, fingerprint(config, documents, model), "train lm")
    losses = [loss for _, _, loss in progress.history] or [float("nan")]
    result = LMTrainingResult(
        **spent(config, model, progress), held_out_before=losses[0], held_out_after=losses[-1]
    )
    card = training_card(
        config,
        result,
        model.config,
        trained_on=texts_of(config),
        tokens=f"{len(train.tokens):,} for training, {result.train_tokens:,} read with "
        f"repetitions; {len(held_out.tokens):,} held out by document",
        begun_from=Path(config.init).name if config.init else "random weights",
        training="cross-entropy",
    )
    save_model(folder, model, tokenizer_folder, config.weights_dtype, card, config.init)
    remove_state(folder)
    return result


def _tokenizer_folder(config: LMTrainingConfig, folder: Path) -> Path:
    if config.init or config.tokenizer:
        return Path(config.init or config.tokenizer or "")
    if not ((folder / STATE).is_file() and (folder / "tokenizer.json").is_file()):
        texts = (d.text for d in read_documents(config.text, config.exclude, config.stdlib))
        train_tokenizer(texts, folder, config.vocab_size, config.chat_tokens)
    return folder


def _initial_model(config: LMTrainingConfig, tokenizer: Any) -> TrainableModel:
    if config.init:
        model = load_model(config.init, hybrid=True)
        check_whole_head(config.init, model.config)
        return _grown(model, config)
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise TrainingError(f"the tokenizer has no {END_OF_TEXT}, which separates documents")
    return _grown(new_model(config.shape, vocabulary_size(tokenizer), end, config.seed), config)


def _grown(model: TrainableModel, config: LMTrainingConfig) -> TrainableModel:
    """A dense model as the mixture or the hybrid that is asked for; others stay."""
    shape = config.shape
    if shape.num_experts and not model.config.mlp.experts:
        return upcycle(model, shape, config.seed)
    if shape.layers and model.config.recurrent is None:
        return hybridise(model, shape.layers, config.seed)
    return model


def separator_id(model: TrainableModel) -> int:
    """The token between documents, the first end of sequence; ``TrainingError`` without one."""
    ids = model.config.eos_token_ids
    if not ids:
        raise TrainingError("the model has no eos_token_id, which separates documents")
    return ids[0]


def training_data(
    train: TokenDocuments, held_out: TokenDocuments, config: TrainingConfig, separator: int
) -> TrainingData:
    """Windows over both splits; the held-out ones in a fixed order."""
    windows = Windows(train, config.seq_len, separator, config.seed)
    fixed = np.zeros((0, config.seq_len + 1), np.int32)
    if len(held_out):
        fixed = pack(held_out, np.arange(len(held_out)), config.seq_len, separator)
    return TrainingData(windows, fixed)


def fingerprint(config: TrainingConfig, documents: TokenDocuments, model: TrainableModel) -> str:
    """Names everything that a continued run must share with the one it continues."""
    digest = xxhash.xxh3_128()
    digest.update(repr(sorted(config.fixed_options().items())).encode())
    digest.update(documents.tokens.tobytes())
    digest.update(documents.offsets.tobytes())
    digest.update(repr([(n, tuple(p.shape)) for n, p in sorted(model.params.items())]).encode())
    return digest.hexdigest()


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
