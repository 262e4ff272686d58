"""Parallel drafts on the toy model, whose masks say nothing of use unless a test makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import SpeculativeConfig
from paceline.models.backend import PackedBatch
from paceline.proposers.draft_model.proposer import ParallelDraftProposer
from paceline.request.span import Span
from tests.toy import VOCAB, toy_runner

MASK = VOCAB - 1


def parallel_config(**options: Any) -> SpeculativeConfig:
    options = {"min_accept_prob": 0.0, "deterministic": True, "num_speculative_tokens": 4} | options
    return SpeculativeConfig("parallel_draft", model="toy", **options)


def parallel_drafter(
    runner: ModelRunner | None = None, num_blocks: int = 100, noise: float = 0.3, **options: Any
) -> ParallelDraftProposer:
    if runner is None:
        runner = toy_runner(num_blocks=num_blocks, prefix_caching=False, noise=noise)
    runner.kv.poison_free()
    return ParallelDraftProposer(parallel_config(**options), runner, MASK)


class KnowingRunner(ModelRunner):
    """Computes as its model does, and then answers each sampled row with known logits.

    Args:
        known: ``[positions, vocab]``: of the row at each position, whatever it read.
    """

    def __init__(self, known: torch.Tensor, inner: ModelRunner) -> None:
        super().__init__(inner.decoder, inner.kv)
        self._known = known
        self.spans: Sequence[Span] = ()

    def pack(self, spans: Sequence[Span], adapters: Sequence[Any] = ()) -> PackedBatch:
        self.spans = spans
        return super().pack(spans, adapters)

    def forward(self, batch: PackedBatch, greedy: bool = False) -> ForwardResult:
        result = super().forward(batch, greedy)
        rows = [span.start + row for span in self.spans for row in span.sample_rows]
        return ForwardResult(self._known[rows], result.offsets)
