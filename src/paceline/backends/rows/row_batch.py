"""Spans to the tensors that a backend of row ops needs. Owns the packing, knows no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from paceline.backends.rows.row_ops import AddedLayers, AttentionBatch, AttentionGroup
from paceline.models.backend import BLOCK_SIZE, slots_of
from paceline.models.config import ModelConfig
from paceline.request.span import Span

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
        adapters: rows, and what is added to the layers' linears for them.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    num_rows: int
    attention: AttentionBatch
    sample_rows: list[int]
    sample_offsets: list[int]
    adapters: Sequence[tuple[torch.Tensor, AddedLayers]] = ()


@cache
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
    """Per-row columns, gathered span by span.

    Attributes:
        slots: the KV slots of the row's sequence, by position.
        lasts: the last position that the row sees, its own or that of its block's last row.
        block_rows: of blocks, how many rows of its own come before it.
        displaced: for rows of a tree, ancestors that are not where their position says:
            row to (position, slot) pairs.
    """

    are_blocks: bool
    tokens: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    write_slots: list[int] = field(default_factory=list)
    slots: list[Ints] = field(default_factory=list)
    block_rows: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    displaced: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, span: Span, slots: Ints) -> None:
        cached = span.num_cached
        first = len(self.tokens) - cached  # row of node 0, were it computed
        begin, end = span.start + cached, span.start + len(span.token_ids)
        self.tokens.extend(span.token_ids[cached:] if cached else span.token_ids)
        self.write_slots.extend(slots[begin:end].tolist())
        self.slots.extend([slots] * (end - begin))
        if span.is_chain:
            self.positions.extend(range(begin, end))
        else:
            assert not self.are_blocks, "a block is no tree"
            self._add_tree(span, slots, first)
        if self.are_blocks:
            self.block_rows.extend(range(end - begin))
        own = self.positions[len(self.lasts) :]
        self.lasts.extend([end - 1] * len(own) if self.are_blocks else own)
        self.samples.extend([first + node for node in span.sample_rows])
        self.offsets.append(len(self.samples))

    def _add_tree(self, span: Span, slots: Ints, first: int) -> None:
        start = span.start
        paths: list[list[int]] = []
        for node, parent in enumerate(span.parents):
            path = [*paths[parent], node] if parent >= 0 else [node]
            paths.append(path)
            if node < span.num_cached:
                continue
            self.positions.append(start + len(path) - 1)
            self.displaced[first + node] = [
                (start + depth, int(slots[start + ancestor]))
                for depth, ancestor in enumerate(path)
                if ancestor != depth
            ]


# The loops over rows below fill few, small slices: fewer kernels to warm up than one fancy index,
# which is what counts right after a forward has emptied the caches.


def _group(rows: _Rows, members: list[int], lanes: int, config: ModelConfig) -> AttentionGroup:
    window = config.attention.sliding_window
    slots = np.zeros((len(members), lanes), dtype=np.int64)
    mask = np.full((len(members), 1, 1, lanes), -np.inf, dtype=np.float32)
    sliding = mask.copy() if window else None
    for at, row in enumerate(members):
        position, end = rows.positions[row], rows.lasts[row] + 1
        slots[at, :end] = rows.slots[row][:end]
        mask[at, 0, 0, :end] = 0.0
        if sliding is not None:
            stop = end if config.entry.sliding_sees_ahead else position + 1
            sliding[at, 0, 0, config.attention.first_in_window(position) : stop] = 0.0
        for displaced, slot in rows.displaced.get(row, ()):
            slots[at, displaced] = slot
    return AttentionGroup(
        rows=torch.from_numpy(np.array(members)),
        slots=torch.from_numpy(slots),
        mask=torch.from_numpy(mask),
        sliding_mask=None if sliding is None else torch.from_numpy(sliding),
    )


def _groups(rows: _Rows, config: ModelConfig) -> list[AttentionGroup]:
    by_class: dict[int, list[int]] = {}
    for row, last in enumerate(rows.lasts):
        by_class.setdefault(lane_class(last + 1), []).append(row)
    return [_group(rows, members, lanes, config) for lanes, members in by_class.items()]


def build_batch(
    spans: Sequence[Span],
    block_tables: Sequence[Sequence[int]],
    memory: Sequence[torch.Tensor],
    row_multiple: int,
    config: ModelConfig,
) -> Batch:
    """Pack spans whose KV slots are reserved.

    Args:
        spans: at least one, each with at least one node to compute.
        block_tables: the blocks of each span's sequence.
        memory: keys and values, as :class:`AttentionBatch` has them.
        row_multiple: the backend's padding.
        config: of the model, which says what rows see.
    """
    rows = _Rows(config.entry.reads_blocks)
    for span, table in zip(spans, block_tables, strict=True):
        rows.add(span, slots_of(table))
    count = len(rows.tokens)
    padding = [0] * (-count % row_multiple)
    columns = torch.from_numpy(
        np.array([rows.tokens + padding, rows.positions + padding, rows.write_slots + padding])
    )
    groups = _groups(rows, config)
    block_rows = torch.tensor(rows.block_rows + padding) if rows.are_blocks else None
    device = memory[0].device
    if columns.device != device:
        columns = columns.to(device)
        groups = [group.to(device) for group in groups]
        block_rows = None if block_rows is None else block_rows.to(device)
    return Batch(
        input_ids=columns[0],
        positions=columns[1],
        num_rows=count,
        attention=AttentionBatch(memory, columns[2, :count], groups, None, block_rows),
        sample_rows=rows.samples,
        sample_offsets=rows.offsets,
    )


def adapted_rows(
    spans: Sequence[Span], adapters: Sequence[AddedLayers | None]
) -> list[tuple[list[int], AddedLayers]]:
    """The rows of each adapter, which one per span says, or None."""
    found: dict[int, tuple[list[int], AddedLayers]] = {}
    first = 0
    for span, adapter in zip(spans, adapters, strict=True):
        end = first + len(span.token_ids) - span.num_cached
        if adapter is not None:
            found.setdefault(id(adapter), ([], adapter))[0].extend(range(first, end))
        first = end
    return list(found.values())
