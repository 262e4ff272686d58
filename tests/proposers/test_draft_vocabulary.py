"""Which drafts fit to a target's vocabulary: padded otherwise, other tokens, no tokenizer."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.cache.kv_cache import KVCache
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.models.decoder import Decoder
from paceline.proposers import build_proposers
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.draft_model.heterogeneous import HeterogeneousProposer
from paceline.proposers.draft_model.loading import PaddedRunner
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.text.tokenizer import Tokenizer
from tests.arrays import arrays
from tests.proposers.drive import Target, make_request, propose
from tests.proposers.self_drafts import native
from tests.proposers.vocabularies import letters, merging, other
from tests.toy import TOY, USUAL, VOCAB, draft_config, toy_folder, toy_ops, toy_runner, toy_tensors

PROMPT = [5, 9, 2, 7, 45, 30, 11]


# --- equal vocabularies, padded to different sizes ----------------------------------------------


def padded_self(size: int, dtype: str = USUAL) -> DraftModelProposer:
    """The toy target with more rows, which win wherever they may, or without its last ones."""
    config = dataclasses.replace(TOY, vocab_size=size)
    tensors = toy_tensors()
    own = tensors["model.embed_tokens.weight"]
    table = own.new_zeros(size, own.shape[1])
    table[:VOCAB] = own[:size]
    table[VOCAB:] = 3 * own[: max(0, size - VOCAB)]
    tensors["model.embed_tokens.weight"] = table
    ops = toy_ops(dtype)
    kv = KVCache(ops.kv_memory(TOY, 100, ops.default_kv_dtype), prefix_caching=False)
    decoder = Decoder(config, arrays(tensors), ops, TOY.max_position)
    return DraftModelProposer(draft_config(), PaddedRunner(decoder, kv, VOCAB))


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {46: -1.0}}]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("native-float32", marks=native)])
def test_what_only_a_wider_draft_has_is_never_drafted(dtype: str, sampling: dict[str, Any]) -> None:
    model, proposer = Target(toy_runner(dtype)), padded_self(VOCAB + 9, dtype)
    request = make_request(1, PROMPT, **sampling)
    for _ in range(6):
        draft, result = model.step(proposer, request)
        assert result.num_accepted == len(draft) == 4


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {46: 30.0}}]
)
def test_what_a_narrower_draft_has_not_is_read_as_something_else(sampling: dict[str, Any]) -> None:
    model, proposer = Target(toy_runner()), padded_self(VOCAB - 9)
    request = make_request(1, PROMPT, **sampling)
    drafted = [model.step(proposer, request)[0] for _ in range(6)]
    assert all(len(draft) for draft in drafted)
    assert max(token for draft in drafted for token in draft.token_ids) < VOCAB - 9


# --- from a folder ------------------------------------------------------------------------------


def draft_folder(folder: Path, tokenizer: Tokenizer) -> Path:
    toy_folder(folder)
    tokenizer.save(folder)
    return folder


def built(
    folder: Path,
    target: Tokenizer | None,
    vocab_size: int = VOCAB,
    method: str = "draft_model",
    **options: Any,
) -> Proposer:
    info = TargetInfo(
        vocab_size,
        target.fingerprint if target else None,
        device="cpu",
        max_model_len=64,
        max_num_seqs=2,
        kv_bytes=1 << 20,
        backend="reference",
        tokenizer=target,
    )
    options = {"min_accept_prob": 0.0} | options
    config = SpeculativeConfig(method, str(folder), dtype="float32", **options)
    (proposer,) = build_proposers([config], info, strict=True)
    return proposer


@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB, VOCAB + 16])
@pytest.mark.parametrize("flag", [False, True])
def test_the_same_tokens_may_be_padded(tmp_path: Path, size: int, flag: bool) -> None:
    folder = draft_folder(tmp_path, merging().tokenizer)
    proposer = built(folder, merging().tokenizer, size, use_heterogeneous_vocab=flag)
    assert isinstance(proposer, DraftModelProposer)
    (tree,) = propose(proposer, make_request(1, [3, 4, size - 1]))
    tree.validate(size)
    assert len(tree)


def test_other_tokens_need_to_be_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = draft_folder(tmp_path, other().tokenizer)
    with pytest.raises(ConfigError, match="name it by --draft, which translates"):
        built(folder, letters().tokenizer)
    with pytest.raises(ConfigError, match="parallel_draft needs a draft of the target's vocab"):
        built(folder, letters().tokenizer, method="parallel_draft")
    with pytest.raises(ConfigError, match="48 tokens and the target 50"):
        built(folder, None, 50)
    with caplog.at_level(logging.WARNING):
        proposer = built(folder, merging().tokenizer, use_heterogeneous_vocab=True)
    assert "has another vocabulary than the target: what it drafts is translated" in caplog.text
    assert isinstance(proposer, HeterogeneousProposer)
    (tree,) = propose(proposer, make_request(1, [3, 4, 3]))
    tree.validate(VOCAB)


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path, other().tokenizer)
    with pytest.raises(ConfigError, match="without tokenizers a draft model needs as many"):
        built(folder, None, VOCAB + 1, use_heterogeneous_vocab=True)


def test_a_draft_without_a_tokenizer(tmp_path: Path) -> None:
    """It drafts where the target has none either, and as many tokens; it cannot translate."""
    folder = toy_folder(tmp_path)
    assert isinstance(built(folder, None), DraftModelProposer)
    with pytest.raises(ConfigError, match="without tokenizers a draft model needs as many"):
        built(folder, None, VOCAB + 1)
    with pytest.raises(ConfigError, match=f"{folder.name} has no tokenizer, .* copy the target's"):
        built(folder, letters().tokenizer)
    with pytest.raises(ConfigError, match=f"{folder.name} has no tokenizer, .* copy the target's"):
        built(folder, letters().tokenizer, use_heterogeneous_vocab=True)
