"""Toy vocabularies, and draft models of another vocabulary than the toy target's."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models

from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.models.decoder import Decoder
from paceline.proposers.draft_model.heterogeneous import (
    HeterogeneousProposer,
    ShadowDrafter,
    shadow_config,
)
from paceline.proposers.draft_model.translation import Vocabulary, VocabularyPair
from paceline.text.tokenizer import Tokenizer
from tests.arrays import arrays
from tests.toy import TOY, VOCAB, draft_config, toy_ops, toy_runner, toy_tensors

EOS_TEXT = "</s>"
LETTERS = ascii_letters[: VOCAB - 1]
MERGES = ("cd", "de", "ab", "abcd", "gh", "ii")


def toy_tokenizer(pieces: Sequence[str], **special_tokens: str) -> Tokenizer:
    """Token i is piece i. Pieces of several letters are merged from pieces before them."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        if piece not in special_tokens.values() and len(piece) > 1:
            half = next(
                i for i in range(len(piece) - 1, 0, -1) if piece[:i] in ids and piece[i:] in ids
            )
            merges.append((piece[:half], piece[half:]))
    backend = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token=special_tokens.get("unk_token"))
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(special_tokens.values()))
    return Tokenizer(backend, special_tokens=special_tokens)


def toy_vocabulary(pieces: Sequence[str], **special_tokens: str) -> Vocabulary:
    special_tokens = special_tokens or {"eos_token": EOS_TEXT}
    return Vocabulary(toy_tokenizer(pieces, **special_tokens), VOCAB)


def letters() -> Vocabulary:
    """The toy target's tokens as single letters; its EOS is token 0."""
    return toy_vocabulary([EOS_TEXT, *LETTERS])


def merging() -> Vocabulary:
    """The toy target's tokens as letters and pairs of letters."""
    return toy_vocabulary([EOS_TEXT, *LETTERS[:30], *MERGES, "ef", "fg", "abc", "xy"])


def other() -> Vocabulary:
    """A draft's tokens: fewer letters, other merges, and another order."""
    specials = {"unk_token": "<unk>", "eos_token": "<end>"}
    return toy_vocabulary(
        ["<unk>", "<end>", *reversed(LETTERS[:26]), *MERGES, "hi", "bcd"], **specials
    )


def reversed_letters() -> Vocabulary:
    """The same letters as other tokens."""
    return toy_vocabulary([EOS_TEXT, *reversed(LETTERS)])


def foreign_drafter(
    pair: VocabularyPair, runner: ModelRunner | None = None, **options: Any
) -> HeterogeneousProposer:
    runner = runner or toy_runner(prefix_caching=False, noise=0.2)
    runner.kv.poison_free()
    config = draft_config(use_heterogeneous_vocab=True, **options)
    drafter = ShadowDrafter(shadow_config(config), runner, pair, config.tree_branching)
    return HeterogeneousProposer(config, drafter, pair)


def reversed_self(num_blocks: int = 100) -> ModelRunner:
    """The toy target with the tokens of :func:`reversed_letters`."""
    tensors = toy_tensors()
    order = torch.tensor([0, *range(VOCAB - 1, 0, -1)])
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][order]
    ops = toy_ops("float32")
    memory = ops.kv_memory(TOY, num_blocks, ops.default_kv_dtype)
    decoder = Decoder(TOY, arrays(tensors), ops, TOY.max_position)
    return ModelRunner(decoder, KVCache(memory, prefix_caching=False))


def close_pair() -> VocabularyPair:
    return VocabularyPair(letters(), reversed_letters())


def far_pair(
    target: Vocabulary | None = None,
    draft: Vocabulary | None = None,
    replacements: Sequence[tuple[str, str]] = (),
) -> VocabularyPair:
    """Two vocabularies between which texts cross and no tokens."""
    pair = VocabularyPair(target or merging(), draft or other(), replacements)
    pair.is_close = False
    return pair
