"""The differentiable backend computes what the engine's backend computes, for every flag."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline_lab.train.ops import CachedBatch, TrainingOps, dense_hidden, differentiable_decoder
from tests.lab.train.reference import reference_logits
from tests.toy import TOY, toy_tensors

TOKENS = torch.randint(0, TOY.vocab_size, (3, 48), generator=torch.Generator().manual_seed(0))
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"attention.sliding_window": 7},
    "alternating": {"attention.sliding_window": 7, "attention.sliding_layers": (True, False)},
    "softcap": {
        "attention.softcap": 2.0,
        "multipliers.logits_softcap": 3.0,
        "mlp.activation": "gelu_tanh",
    },
    "both": {"attention.softcap": 2.0, "attention.sliding_window": 5},
    "multipliers": {
        "multipliers.embedding": 3.0,
        "multipliers.residual": 0.5,
        "multipliers.logits_divisor": 2.0,
    },
    "norms": {"norms.plus_one": True, "attention.qk_norm": False},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_logits_are_the_engines(flags: dict[str, Any]) -> None:
    config = TOY.with_traits(flags)
    tensors = toy_tensors(config=config)
    with torch.no_grad():
        decoder = differentiable_decoder(config, tensors, TrainingOps(), TOKENS.shape[1])
        logits = decoder.logits(dense_hidden(decoder, TOKENS)).view(*TOKENS.shape, -1)
    for row, tokens in zip(logits, TOKENS, strict=True):
        expected = reference_logits(config, tensors, tokens)
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_growing_in_pieces_changes_nothing(flags: dict[str, Any]) -> None:
    config = TOY.with_traits(flags)
    tensors = toy_tensors(config=config)
    with torch.no_grad():
        decoder = differentiable_decoder(config, tensors, TrainingOps(), TOKENS.shape[1])
        whole = dense_hidden(decoder, TOKENS).view(*TOKENS.shape, -1)
        batch = CachedBatch(config, TOKENS.shape[0], TOKENS.shape[1], torch.float32)
        pieces = []
        for piece in TOKENS.split([5, 1, 1, 13, 28], dim=1):
            rows = decoder.hidden(piece.reshape(-1), batch.grow(piece.shape[1]), batch)
            pieces.append(rows.view(*piece.shape, -1))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-4)
