"""Whole forwards of a backend of row ops. Owns what goes to its device and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from paceline.backends.rows.recurrent_batch import recurrent_batch
from paceline.backends.rows.row_batch import Batch, adapted_rows, build_batch
from paceline.backends.rows.row_ops import AddedLayers, AddedPart, Tensor
from paceline.backends.rows.rows import Rows
from paceline.backends.rows.tensor_kv import TensorKV
from paceline.backends.rows.tensor_states import TensorStates
from paceline.models.backend import AdaptedLayers, LowRank, StateSpan, Taps, WeightPart
from paceline.models.decoder import Decoder
from paceline.request.span import Span
from paceline.tensors.arrays import Array, Floats, floats


class RowForward:
    """See :class:`~paceline.models.backend.Forward`."""

    grows_trees = False

    def __init__(
        self, decoder: Decoder, memory: TensorKV, states: TensorStates | None, row_multiple: int
    ) -> None:
        self._config, self._rows = decoder.config, Rows(decoder)
        self._memory, self._states, self._row_multiple = memory.layers, states, row_multiple
        self.chosen_experts: list[Array] = []

    experts_fetched = 0

    @property
    def experts_read(self) -> int:
        return sum(len(np.unique(ids)) for ids in self.chosen_experts)

    def pack(
        self,
        spans: Sequence[Span],
        block_tables: Sequence[Sequence[int]],
        states: Sequence[StateSpan] = (),
        adapters: Sequence[Any] = (),
    ) -> Batch:
        batch = build_batch(spans, block_tables, self._memory, self._row_multiple, self._config)
        if self._states is not None:
            batch.attention.recurrent = recurrent_batch(spans, states, self._states)
        if adapters:
            device = batch.input_ids.device
            found = adapted_rows(spans, adapters)
            batch.adapters = [(torch.tensor(rows, device=device), each) for rows, each in found]
        return batch

    def adapter(self, layers: AdaptedLayers) -> AddedLayers:
        return [
            {name: [self._added(each) for each in parts] for name, parts in layer.items()}
            for layer in layers
        ]

    def _added(self, part: LowRank) -> AddedPart:
        outputs = slice(part.first, part.first + len(part.up))
        pack = self._rows.ops.pack_linear
        down, up = (
            pack([WeightPart.stored(floats(each))], each.shape[1], None)
            for each in (part.down, part.up)
        )
        return AddedPart(outputs, down, up, part.scale)

    @torch.inference_mode()
    def logits(self, batch: Batch, taps: Taps, inputs: Floats | None) -> Floats:
        return _to_host(self._logits(batch, taps, inputs))

    @torch.inference_mode()
    def greedy(self, batch: Batch, taps: Taps, inputs: Floats | None) -> list[int]:
        logits = self._logits(batch, taps, inputs)
        if not len(logits):
            return []
        # Of equal ones torch may return any; a NaN counts as the largest.
        best = logits.amax(dim=1, keepdim=True)
        columns = torch.arange(logits.shape[1], device=logits.device)
        lowest = torch.where(logits == best, columns, logits.shape[1]).amin(dim=1)
        tokens: list[int] = torch.where(best[:, 0].isfinite(), lowest, -1).tolist()
        return tokens

    @torch.inference_mode()
    def write_kv(self, batch: Batch, inputs: Floats) -> None:
        self._rows.write_kv(batch.positions, self._padded(inputs, batch), batch.attention)

    def grow(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("trees grow in one call on the native kernels alone")

    def _logits(self, batch: Batch, taps: Taps, inputs: Floats | None) -> Tensor:
        read = None if inputs is None else self._padded(inputs, batch)
        wanted = dict[int, Tensor]()

        def take(layer: int, x: Tensor) -> None:
            if layer in taps.layers:
                wanted[layer] = x[: batch.num_rows]

        hidden = self._rows.hidden(
            batch.input_ids, batch.positions, batch.attention, read, take, batch.adapters
        )
        routed = [each.ids[: batch.num_rows] for each in self._rows.routed]
        self.chosen_experts = [ids.numpy(force=True) for ids in routed]
        for index, layer in enumerate(taps.layers):
            taps.features[:, index] = _to_host(wanted[layer])
        return self._of_sampled(hidden, batch)

    def _of_sampled(self, hidden: Tensor, batch: Batch) -> Tensor:
        count = len(batch.sample_rows)
        if count == 0:
            return hidden.new_empty(0, self._config.num_logits)
        if count == batch.num_rows:  # every row is wanted, and they are padded already
            return self._rows.logits(hidden)[:count]
        rows = torch.tensor(batch.sample_rows, device=hidden.device)
        padding = -count % self._row_multiple
        picked = torch.nn.functional.pad(hidden.index_select(0, rows), (0, 0, 0, padding))
        return self._rows.logits(picked)[:count]

    def _padded(self, inputs: Floats, batch: Batch) -> Tensor:
        rows = np.zeros((len(batch.input_ids), inputs.shape[1]), np.float32)
        rows[: len(inputs)] = inputs
        return torch.from_numpy(rows).to(self._memory[0].device)


def _to_host(x: Tensor) -> Floats:
    array: Floats = x.float().numpy(force=True)
    return array
