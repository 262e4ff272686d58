"""Several residual streams, row by row in torch, and gates of which few stay. Imports torch.

A row's bits must not depend on what shares its forward: sums over streams are added one after
another, all others run over one row's last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import cast

import torch
import torch.nn.functional as F

from paceline.backends.rows.row_ops import RowOps, Tensor
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.weights import AltUpLayer, Layer

LEAST_SQUARE = 1e-5
"""Of a stream's mean square, before it is divided by its root."""


def spread(decoder: Decoder, x: Tensor) -> Tensor | None:
    """The streams ``[rows, streams, hidden]`` of embeddings; None where a model has one stream.

    Further ones have the embedding's root mean square.
    """
    if decoder.altup is None:
        return None
    ops = cast(RowOps, decoder.ops)
    others = (ops.row_linear(x, each) for each in decoder.altup.spread)
    return torch.stack([x, *(_as_large(each, x) for each in others)], dim=1)


def gathered(decoder: Decoder, streams: Tensor) -> Tensor:
    """The mean of all streams, each with the first one's root mean square."""
    assert decoder.altup is not None
    ops, first, *others = cast(RowOps, decoder.ops), *streams.unbind(1)
    pairs = zip(others, decoder.altup.gather, strict=True)
    found = [first, *(_as_large(ops.row_linear(x.contiguous(), w), first) for x, w in pairs)]
    return _total(found) / len(found)


def predicted(
    layer: Layer, streams: Tensor, config: ModelConfig, ops: RowOps
) -> tuple[Tensor, Tensor]:
    """All streams as a layer expects them, and the active one."""
    count, active = streams.shape[1], _active(config)
    assert layer.altup is not None
    scores = _scores(layer.altup, streams[:, active], count, config, ops)
    weights = _small(scores, layer.altup.predict).view(-1, count, count)
    sums = [
        _total(weights[:, k, j, None] * streams[:, j] for j in range(count)) for k in range(count)
    ]
    streams = streams + torch.stack(sums, dim=1)
    return streams, streams[:, active].contiguous()


def corrected(layer: Layer, streams: Tensor, x: Tensor, config: ModelConfig, ops: RowOps) -> Tensor:
    """All streams after a layer that made ``x`` of the active one."""
    count = streams.shape[1]
    assert layer.altup is not None
    shares = _small(_scores(layer.altup, x, count, config, ops), layer.altup.correct) + 1.0
    change = x - streams[:, _active(config)]
    return change.unsqueeze(1) * shares.unsqueeze(2) + streams


def low_rank(layer: Layer, read: Tensor, config: ModelConfig, ops: RowOps) -> Tensor:
    """What a layer's attention has beside it, of the rows that it reads."""
    assert layer.altup is not None
    found = ops.row_linear(ops.row_linear(read, layer.altup.left), layer.altup.right)
    return read + ops.rms_norm(found, layer.altup.norm, config.norms.eps)


def sparse(gate_up: Tensor, deviations: float) -> Tensor:
    """Gates and ups ``[rows, 2 * width]``, gates lowered by a bound of their row and cut at 0."""
    if deviations == -math.inf:
        return gate_up
    gate, up = gate_up.chunk(2, dim=1)
    mean = gate.mean(dim=1, keepdim=True)
    deviation = (gate - mean).square().mean(dim=1, keepdim=True).sqrt()
    return torch.cat((F.relu(gate - (mean + deviation * deviations)), up), dim=1)


def _active(config: ModelConfig) -> int:
    assert config.altup is not None
    return config.altup.active


def _scores(weights: AltUpLayer, x: Tensor, count: int, config: ModelConfig, ops: RowOps) -> Tensor:
    """What a row says of its streams, ``[rows, streams]``."""
    normed = ops.rms_norm(x, weights.router_norm, config.norms.eps)
    return ops.softcap(_small(normed, weights.router, count), 1.0)


def _small(x: Tensor, flat: Tensor, outputs: int = 0) -> Tensor:
    """A linear with so few outputs that each is a sum over a row by itself."""
    weights = flat.view(outputs or -1, x.shape[1])
    return torch.stack([(x * row).sum(dim=1) for row in weights], dim=1)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return reduce(add, parts)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """Rows of ``x`` with the root mean square of those of ``other``."""
    size = x.square().mean(dim=1, keepdim=True).clamp_min(LEAST_SQUARE).sqrt()
    return x * other.square().mean(dim=1, keepdim=True).sqrt() / size
