"""One forward of one model over packed spans. Owns a decoder and its KV; knows no sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from paceline.models.decoder import Decoder
from paceline.models.ops.base import PackedBatch, RowOps
from paceline.models.taps import NO_TAPS, Taps
from paceline.runtime.batch import Batch, build_batch
from paceline.runtime.kv_cache import KVCache
from paceline.span import Span

NO_LOGITS = torch.empty(0, 0)


@dataclass(slots=True)
class ForwardResult:
    """What the forward says about the sampled rows.

    Attributes:
        logits: ``[samples, num_logits]`` float32; span ``i`` owns rows ``offsets[i]`` up to
            ``offsets[i + 1]``. Empty where only the arg-max was asked for and the backend needs no
            logits for that.
        offsets: one more entry than there were spans.
        argmax: each row's best token, -1 where a logit is not finite; None where logits are given.
        features: float32 ``[rows, taps, hidden_size]``, what :attr:`ModelRunner.taps` asked for;
            None where it asked for nothing. A row for each node that was computed, spans in order:
            a span's first ``num_cached`` nodes have none.
    """

    logits: torch.Tensor
    offsets: Sequence[int]
    argmax: Sequence[int] | None = None
    features: torch.Tensor | None = None


class ModelRunner:
    """Runs spans through a decoder; the spans' slots must be reserved in :attr:`kv`.

    Attributes:
        taps: hidden states that forwards return, as :mod:`paceline.models.taps` counts them.
    """

    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self.decoder = decoder
        self.kv = kv
        self.taps: tuple[int, ...] = ()
        self._whole = decoder.ops.whole_forward(decoder, kv.memory)
        self.num_forwards = 0
        self.num_rows = 0
        self.seconds = 0.0

    def pack(self, spans: Sequence[Span]) -> PackedBatch:
        if self._whole is not None:
            return self._whole.pack(spans, self.kv.block_tables([s.request_id for s in spans]))
        return build_batch(spans, self.kv, self._row_multiple, self.decoder.config)

    @property
    def _row_multiple(self) -> int:
        return cast(RowOps, self.decoder.ops).row_multiple

    def forward(
        self, batch: PackedBatch, greedy: bool = False, inputs: torch.Tensor | None = None
    ) -> ForwardResult:
        """Write the KV of every row and return the logits of the sampled ones.

        Args:
            greedy: nobody needs more of the logits than their arg-max.
            inputs: float32 ``[num_rows, hidden_size]``, hidden states that the rows of a decoder
                with an entry (:mod:`paceline.models.entry`) take in; None for any other decoder.
        """
        began = time.perf_counter()
        taps = self._room(batch) if self.taps else NO_TAPS
        argmax, logits = None, NO_LOGITS
        if greedy and self._whole is not None:
            argmax = self._whole.greedy(batch, taps, inputs)
        else:
            logits = self._forward(batch, taps, inputs)
        self.num_forwards += 1
        self.num_rows += batch.num_rows
        self.seconds += time.perf_counter() - began
        features = taps.features if self.taps else None
        return ForwardResult(logits, batch.sample_offsets, argmax, features)

    @property
    def grows_trees(self) -> bool:
        """Whether :meth:`grow` can be called: only the native kernels can."""
        return self._whole is not None

    def grow(
        self, batch: Any, inputs: torch.Tensor | None, growths: Sequence[Any], **options: Any
    ) -> Sequence[Any]:
        """Read a batch and grow draft trees below its sampled rows, in one native call.

        Args:
            inputs: as :meth:`forward` takes them; below, a node reads the first of :attr:`taps`
                of its parent.
            growths, options: what ``csrc/bind_grow.cpp`` describes.
        """
        began = time.perf_counter()
        assert self._whole is not None
        tap = self.taps[0] if self.taps else 0
        forwards, rows, grown = self._whole.grow(batch, inputs, tap, growths, **options)
        self.num_forwards += forwards
        self.num_rows += rows
        self.seconds += time.perf_counter() - began
        return grown

    @torch.inference_mode()
    def write_kv(self, batch: Any, inputs: torch.Tensor) -> None:
        """Write the KV of rows of hidden states, which all layers of a ``dflash`` decoder read
        unchanged. The batch says where they go; its tokens are not read.

        Args:
            inputs: float32 ``[num_rows, hidden_size]``.
        """
        began = time.perf_counter()
        if self._whole is not None:
            self._whole.write_kv(batch, inputs)
        else:
            inputs = _padded(inputs, batch)
            self.decoder.write_kv(batch.positions, inputs, batch.attention)
        self.num_rows += batch.num_rows
        self.seconds += time.perf_counter() - began

    def _room(self, batch: PackedBatch) -> Taps:
        c, device = self.decoder.config, self.decoder.ops.device
        return Taps.of(self.taps, batch.num_rows, c.num_layers, c.hidden_size, device)

    @torch.inference_mode()
    def _forward(self, batch: Any, taps: Taps, inputs: torch.Tensor | None) -> torch.Tensor:
        if self._whole is not None:
            return self._whole.forward(batch, taps, inputs)
        if inputs is not None:
            inputs = _padded(inputs, batch)
        hidden = self.decoder.hidden(
            batch.input_ids, batch.positions, batch.attention, taps, inputs
        )
        return self._logits(hidden, batch)

    def _logits(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        count = len(batch.sample_rows)
        if count == 0:
            return hidden.new_empty(0, self.decoder.config.num_logits)
        if count == batch.num_rows:  # every row is wanted, and they are padded already
            return self.decoder.logits(hidden)[:count]
        rows = torch.tensor(batch.sample_rows, device=hidden.device)
        padding = -count % self._row_multiple
        picked = torch.nn.functional.pad(hidden.index_select(0, rows), (0, 0, 0, padding))
        return self.decoder.logits(picked)[:count]


def _padded(inputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.pad(inputs, (0, 0, 0, len(batch.input_ids) - len(inputs)))
