"""What the target makes of traces, computed where it is asked for. Knows no head and no files.

On a GPU a forward of the target takes less time than reading its features from a disk would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from paceline.backends.rows.rows import Rows as Decoder
from paceline.request.traces import Trace
from paceline.training.heads.batches import Rows, join_rows
from paceline.training.heads.features import likeliest
from paceline.training.heads.initial import TargetWeights
from paceline.training.ops import PackedBatch, TrainingOps, differentiable_decoder

Tensor = torch.Tensor
FORWARD_TOKENS = 1 << 16
LOGITS = 1 << 28  # that exist at once


class LiveFeatures:
    """Reads traces' rows by number, as :class:`~paceline.training.heads.features.FeatureFiles`."""

    def __init__(
        self,
        weights: TargetWeights,
        traces: Sequence[Trace],
        taps: tuple[int, ...],
        dtype: str,
        device: str,
    ) -> None:
        self._traces, self._taps = traces, taps
        tensors = {name: tensor.to(device) for name, tensor in weights.all().items()}
        longest = max(len(trace.token_ids) for trace in traces)
        with torch.no_grad():
            self._decoder: Decoder = differentiable_decoder(
                weights.config, tensors, TrainingOps(dtype), longest
            )

    def __call__(self, numbers: Sequence[int]) -> Rows:
        return join_rows([self._forward(part) for part in self._parts(numbers)])

    def _parts(self, numbers: Sequence[int]) -> Iterator[list[Trace]]:
        """Consecutive traces, padded together to at most so many tokens."""
        part, widest = list[Trace](), 0
        for trace in (self._traces[number] for number in numbers):
            widest = max(widest, len(trace.token_ids))
            if part and widest * (len(part) + 1) > FORWARD_TOKENS:
                yield part
                part, widest = [], len(trace.token_ids)
            part.append(trace)
        yield part

    @torch.no_grad()
    def _forward(self, traces: Sequence[Trace]) -> Rows:
        count, width = len(traces), max(len(trace.token_ids) for trace in traces) - 1
        tokens = np.zeros((count, width), np.int64)
        known, wanted = (np.zeros((count, width), bool) for _ in range(2))
        for row, trace in enumerate(traces):
            length = len(trace.token_ids) - 1  # nothing is drafted after the last token
            tokens[row, :length] = trace.token_ids[:-1]
            known[row, : length - 1] = True
            wanted[row, trace.prompt_len : length] = True
        ids = torch.as_tensor(tokens).flatten()
        features = list[Tensor]()
        keep = torch.as_tensor(known).flatten().nonzero().squeeze(1)

        def take(layer: int, x: Tensor) -> None:
            if layer in self._taps:
                features.append(x[keep].float())

        batch = PackedBatch(count, width)
        hidden = self._decoder.hidden(ids, torch.arange(width).repeat(count), batch, take=take)
        hidden = hidden[torch.as_tensor(wanted).flatten()]
        parts = hidden.split(LOGITS // self._decoder.config.vocab_size)
        best = [likeliest(self._decoder.logits(part).float()) for part in parts]
        top_ids, logprobs = (torch.cat(each) for each in zip(*best, strict=True))
        return Rows(torch.cat(features, dim=1), top_ids, logprobs.exp())
