"""One forward of one model over packed spans. Owns a decoder and its KV; knows no sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.models.decoder import Decoder
from paceline.runtime.batch import Batch, build_batch
from paceline.runtime.kv_cache import KVCache
from paceline.span import Span


@dataclass(slots=True)
class ForwardResult:
    """Logits of the sampled rows.

    Attributes:
        logits: ``[samples, vocab]`` float32; span ``i`` owns rows ``offsets[i]:offsets[i + 1]``.
        offsets: one more entry than there were spans.
    """

    logits: torch.Tensor
    offsets: list[int]


class ModelRunner:
    """Runs spans through a decoder; the spans' slots must be reserved in :attr:`kv`."""

    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self.decoder = decoder
        self.kv = kv
        self.num_forwards = 0
        self.num_rows = 0
        self.seconds = 0.0

    def pack(self, spans: Sequence[Span]) -> Batch:
        config = self.decoder.config
        return build_batch(spans, self.kv, self.decoder.ops.row_multiple, config.sliding_window)

    def forward(self, batch: Batch) -> ForwardResult:
        """Write the KV of every row and return the logits that were asked for."""
        began = time.perf_counter()
        logits = self._forward(batch)
        self.num_forwards += 1
        self.num_rows += batch.num_rows
        self.seconds += time.perf_counter() - began
        return ForwardResult(logits, batch.sample_offsets)

    @torch.inference_mode()
    def _forward(self, batch: Batch) -> torch.Tensor:
        hidden = self.decoder.hidden(batch.input_ids, batch.positions, batch.attention)
        return self._logits(hidden, batch)

    def _logits(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        count = len(batch.sample_rows)
        if count == 0:
            return hidden.new_empty(0, self.decoder.config.vocab_size)
        if count == batch.num_rows:  # every row is wanted, and they are padded already
            return self.decoder.logits(hidden)[:count]
        rows = torch.tensor(batch.sample_rows, device=hidden.device)
        padding = -count % self.decoder.ops.row_multiple
        picked = torch.nn.functional.pad(hidden.index_select(0, rows), (0, 0, 0, padding))
        return self.decoder.logits(picked)[:count]
