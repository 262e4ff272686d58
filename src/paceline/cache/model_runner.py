"""One forward of one model over packed spans. Owns a decoder and its KV; knows no sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from paceline.cache.kv_cache import KVCache
from paceline.models.backend import NO_TAPS, AdaptedLayers, KVMemory, PackedBatch, Taps
from paceline.models.decoder import Decoder
from paceline.request.span import Span
from paceline.tensors.arrays import Array, Floats

NO_LOGITS: Floats = np.empty((0, 0), np.float32)


@dataclass(slots=True)
class ForwardResult:
    """What the forward says about the sampled rows.

    Attributes:
        logits: ``[samples, num_logits]``; span ``i`` owns rows ``offsets[i]`` up to
            ``offsets[i + 1]``. Empty where only the arg-max was asked for.
        offsets: one more entry than there were spans.
        argmax: each row's best token, -1 where a logit is not finite; None where logits are given.
        features: ``[rows, taps, hidden_size]``, what :attr:`ModelRunner.taps` asked for;
            None where it asked for nothing. A row for each node that was computed, spans in order:
            a span's first ``num_cached`` nodes have none.
        experts_read: pairs of a layer and an expert that it read, each counted once.
        experts_fetched: of these, those that were not in memory.
    """

    logits: Floats
    offsets: Sequence[int]
    argmax: Sequence[int] | None = None
    features: Floats | None = None
    experts_read: int = 0
    experts_fetched: int = 0


class ModelRunner:
    """Runs spans through a decoder; the spans' slots must be reserved in :attr:`kv`.

    Args:
        memory: where the layers find keys and values by the slots of ``kv``; None: in its own.

    Attributes:
        taps: hidden states that forwards return, as :class:`~paceline.models.backend.Taps` counts.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, memory: KVMemory | None = None) -> None:
        self.decoder = decoder
        self.kv = kv
        self.taps: tuple[int, ...] = ()
        # The first layers of a hybrid may all be attention.
        self._states = kv.states if decoder.config.recurrent else None
        states = self._states and self._states.memory
        self._forward = decoder.ops.forward(decoder, memory or kv.memory, states)
        self._is_mixture = decoder.config.mlp.experts is not None
        self.num_forwards = 0
        self.num_rows = 0
        self.seconds = 0.0

    def pack(self, spans: Sequence[Span], adapters: Sequence[Any] = ()) -> PackedBatch:
        """Pack spans, whose adapters are one per span or None, or none at all."""
        ids = [*map(attrgetter("request_id"), spans)]
        states = () if self._states is None else self._states.spans(ids)
        return self._forward.pack(spans, self.kv.block_tables(ids), states, adapters)

    def adapter(self, layers: AdaptedLayers) -> Any:
        """Prepare an adapter for :meth:`pack`."""
        return self._forward.adapter(layers)

    def forward(
        self, batch: PackedBatch, greedy: bool = False, inputs: Floats | None = None
    ) -> ForwardResult:
        """Write the KV of every row and return the logits of the sampled ones.

        Args:
            greedy: only the arg-max of the logits is needed.
            inputs: ``[num_rows, hidden_size]``, hidden states that the rows of a decoder
                with an entry (:meth:`DecoderReader.entry
                <paceline.models.decoder_reader.DecoderReader.entry>`) take in; None for any other.
        """
        began = time.perf_counter()
        taps = self._room(batch) if self.taps else NO_TAPS
        argmax, logits = None, NO_LOGITS
        if greedy:
            argmax = self._forward.greedy(batch, taps, inputs)
        else:
            logits = self._forward.logits(batch, taps, inputs)
        self.num_forwards += 1
        self.num_rows += batch.num_rows
        self.seconds += time.perf_counter() - began
        features = taps.features if self.taps else None
        result = ForwardResult(logits, batch.sample_offsets, argmax, features)
        if self._is_mixture:
            result.experts_read = self._forward.experts_read
            result.experts_fetched = self._forward.experts_fetched
        return result

    @property
    def chosen_experts(self) -> list[Array]:
        """Experts of each row of the latest forward, ``[rows, per_token]`` of each layer that is a
        mixture."""
        return self._forward.chosen_experts

    @property
    def grows_trees(self) -> bool:
        """Whether :meth:`grow` can be called: only the native kernels can."""
        return self._forward.grows_trees

    def grow(
        self, batch: Any, inputs: Floats | None, growths: Sequence[Any], **options: Any
    ) -> Sequence[Any]:
        """Read a batch and grow draft trees below its sampled rows, in one native call.

        Args:
            inputs: as :meth:`forward` takes them; below, a node reads the first of :attr:`taps`
                of its parent.
            growths, options: what ``csrc/bind/grow.cpp`` describes.
        """
        began = time.perf_counter()
        tap = self.taps[0] if self.taps else 0
        forwards, rows, grown = self._forward.grow(batch, inputs, tap, growths, **options)
        self.num_forwards += forwards
        self.num_rows += rows
        self.seconds += time.perf_counter() - began
        return grown

    def write_kv(self, batch: Any, inputs: Floats) -> None:
        """Write the KV of rows of hidden states, which all layers of a ``dflash`` decoder read
        unchanged. The batch says where they go; its tokens are not read.

        Args:
            inputs: ``[num_rows, hidden_size]``.
        """
        began = time.perf_counter()
        self._forward.write_kv(batch, inputs)
        self.num_rows += batch.num_rows
        self.seconds += time.perf_counter() - began

    def _room(self, batch: PackedBatch) -> Taps:
        c = self.decoder.config
        return Taps.of(self.taps, batch.num_rows, c.num_layers, c.hidden_size)
