"""Spans to the flat arrays of one forward. Owns the packing, knows neither weights nor sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.ops.base import AttentionBatch, AttentionGroup
from paceline.runtime.block_pool import BLOCK_SIZE
from paceline.runtime.kv_cache import KVCache
from paceline.span import Span

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """One forward.

    Attributes:
        input_ids, positions: ``[rows]``, padded to the backend's row multiple.
        num_rows: rows that are real.
        attention: where rows write and what they see.
        sample_rows: rows whose logits are needed, ``[samples]``, spans in order.
        sample_offsets: where each span's samples begin; one more entry than spans.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    num_rows: int
    attention: AttentionBatch
    sample_rows: Ints
    sample_offsets: list[int]


def lane_class(tokens: int) -> int:
    """Key lanes of a row that sees ``tokens`` positions: 1, 2, 3, 4, 6, 8, 12, ... tiles.

    A function of the row's own position alone, so that its attention always has the same shape.
    """
    tiles = -(-tokens // BLOCK_SIZE)
    power = 1 << (tiles - 1).bit_length()
    three_quarters = power // 4 * 3
    return (three_quarters if three_quarters >= tiles else power) * BLOCK_SIZE


@dataclass(slots=True)
class _Rows:
    """Per-row columns, gathered span by span."""

    tokens: list[int]
    positions: list[int]
    write_slots: list[int]
    span_index: list[int]
    samples: list[int]
    offsets: list[int]
    # KV slots of ancestors that are not where their position says: (row, position, slot)
    displaced: list[tuple[int, int, int]]


def _gather_rows(spans: Sequence[Span], kv: KVCache) -> _Rows:
    rows = _Rows([], [], [], [], [], [0], [])
    for index, span in enumerate(spans):
        cached = span.num_cached
        first = len(rows.tokens) - cached  # row of node 0, were it computed
        begin, end = span.start + cached, span.start + len(span.token_ids)
        slots = kv[span.request_id].slots
        rows.tokens.extend(span.token_ids[cached:] if cached else span.token_ids)
        rows.write_slots.extend(slots[begin:end].tolist())
        rows.span_index.extend([index] * (end - begin))
        if span.is_chain:
            rows.positions.extend(range(begin, end))
        else:
            _gather_tree(rows, span, slots, first)
        rows.samples.extend([first + node for node in span.sample_rows])
        rows.offsets.append(len(rows.samples))
    return rows


def _gather_tree(rows: _Rows, span: Span, slots: Ints, first: int) -> None:
    start = span.start
    paths: list[list[int]] = []
    for node, parent in enumerate(span.parents):
        path = [*paths[parent], node] if parent >= 0 else [node]
        paths.append(path)
        if node < span.num_cached:
            continue
        rows.positions.append(start + len(path) - 1)
        for depth, ancestor in enumerate(path):
            if ancestor != depth:
                slot = int(slots[start + ancestor])
                rows.displaced.append((first + node, start + depth, slot))


def _visible_slots(rows: _Rows, last: int, spans: Sequence[Span], kv: KVCache) -> Ints:
    """``[rows, lanes]``: the slot of every position, for rows whose last position is ``last``."""
    lanes = lane_class(last + 1)
    by_span = np.zeros((len(spans), lanes), dtype=np.int64)
    for index, span in enumerate(spans):
        slots = kv[span.request_id].slots[:lanes]
        by_span[index, : len(slots)] = slots
    visible = by_span[rows.span_index]
    if rows.displaced:
        row, position, slot = zip(*rows.displaced, strict=True)
        visible[row, position] = slot
    return visible


def _group(
    picked: Ints, visible: Ints, positions: Ints, window: int, device: torch.device
) -> AttentionGroup:
    lanes = np.arange(visible.shape[1])
    own = positions[:, None]
    hidden = lanes > own
    visible[hidden] = 0
    sliding = None
    if window:
        sliding = _mask(hidden | (lanes <= own - window)).to(device)
    return AttentionGroup(
        rows=torch.from_numpy(picked).to(device),
        slots=torch.from_numpy(visible).to(device),
        mask=_mask(hidden).to(device),
        sliding_mask=sliding,
    )


def _mask(hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
    mask = np.zeros(hidden.shape, dtype=np.float32)
    mask[hidden] = -np.inf
    return torch.from_numpy(mask[:, None, None])


def _groups(
    rows: _Rows, positions: Ints, spans: Sequence[Span], kv: KVCache, window: int
) -> list[AttentionGroup]:
    device = kv.memory.device
    visible = _visible_slots(rows, max(rows.positions), spans, kv)
    if lane_class(min(rows.positions) + 1) == visible.shape[1]:  # as in most decode steps
        return [_group(np.arange(len(positions)), visible, positions, window, device)]
    classes = np.asarray([lane_class(position + 1) for position in rows.positions])
    groups = []
    for lanes in np.unique(classes):
        picked = np.flatnonzero(classes == lanes)
        seen = np.ascontiguousarray(visible[picked, :lanes])
        groups.append(_group(picked, seen, positions[picked], window, device))
    return groups


def build_batch(spans: Sequence[Span], kv: KVCache, row_multiple: int, window: int = 0) -> Batch:
    """Pack spans whose KV slots are reserved.

    Args:
        spans: at least one, each with at least one node to compute.
        kv: the cache in which the spans' sequences live.
        row_multiple: the backend's padding.
        window: the model's sliding window, 0 for none.
    """
    rows = _gather_rows(spans, kv)
    count = len(rows.tokens)
    padding = [0] * (-count % row_multiple)
    positions = np.array(rows.positions, dtype=np.int64)
    device = kv.memory.device
    return Batch(
        input_ids=_tensor(rows.tokens + padding, device),
        positions=_tensor(rows.positions + padding, device),
        num_rows=count,
        attention=AttentionBatch(
            cache=kv.memory,
            write_slots=_tensor(rows.write_slots, device),
            groups=_groups(rows, positions, spans, kv, window),
        ),
        sample_rows=np.array(rows.samples, dtype=np.int64),
        sample_offsets=rows.offsets,
    )


def _tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
