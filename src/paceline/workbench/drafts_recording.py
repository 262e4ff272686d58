"""Records a draft model's drafts along traces, one true token at a time. Knows no files."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError
from paceline.models.ops.base import BLOCK_SIZE
from paceline.proposers.base import DraftBudget
from paceline.proposers.draft_model import DraftModelProposer
from paceline.proposers.draft_model.growth import Growth
from paceline.request import Request
from paceline.runtime.kv_cache import blocks_for
from paceline.runtime.model_runner import ModelRunner
from paceline.span import DraftTree
from paceline.workbench.drafts_key import DraftsKey
from paceline.workbench.drafts_store import RecordedDrafts
from paceline.workbench.trace_requests import trace_request
from paceline.workbench.traces import Trace

BATCH = 16
"""Traces that are recorded side by side."""
ENDLESS = 1 << 40
"""Tokens that a recorded request may still emit, so that no prompt is too long to be read."""


@dataclass(slots=True)
class _Tape:
    """One trace while it is recorded; the request holds the tokens before the next position."""

    request: Request
    output: list[int]
    num_blocks: int
    counts: array[int] = field(default_factory=lambda: array("i"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    parents: array[int] = field(default_factory=lambda: array("i"))
    accept_probs: array[float] = field(default_factory=lambda: array("d"))

    @property
    def is_done(self) -> bool:
        return len(self.counts) == len(self.output)

    def add(self, tree: DraftTree) -> None:
        """Keep what was grown, and move on by one token."""
        self.request.token_ids.append(self.output[len(self.counts)])
        self.counts.append(len(tree))
        self.token_ids.extend(tree.token_ids)
        self.parents.extend(tree.parents)
        self.accept_probs.extend(tree.accept_probs)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Who drafts while being recorded.

    Attributes:
        config: the largest drafts.
        grow: what drafts are chosen from, as
            :meth:`~paceline.proposers.draft_model.drafter.Drafter.grow` says.
        finish: forgets a request.
        num_blocks: of its KV cache.
        most_slots: from a trace's tokens to KV slots that it takes with its drafts, at most.
        forwards: see :class:`~paceline.workbench.drafts_store.RecordedDrafts`; known at the end.
    """

    config: SpeculativeConfig
    grow: Callable[[Sequence[Request], DraftBudget], list[Growth | None]]
    finish: Callable[[Request], None]
    num_blocks: int
    most_slots: Callable[[int], int]
    forwards: Callable[[], tuple[float, float]] = lambda: (1.0, 1.0)


def level_recorder(config: SpeculativeConfig, runner: ModelRunner) -> Recorder:
    """Records a draft model that drafts level by level."""
    return recorder_of(DraftModelProposer(config, runner), runner)


def recorder_of(proposer: DraftModelProposer, runner: ModelRunner) -> Recorder:
    """Records a proposer whose tokens are the target's."""
    config = proposer.config
    # Each level forwards fewer nodes than a tree has.
    drafted = config.tree_nodes * config.num_speculative_tokens
    return Recorder(
        config,
        proposer.grow,
        proposer.finish,
        runner.kv.pool.num_blocks,
        lambda num_tokens: num_tokens + drafted,
    )


def record_drafts(
    key: DraftsKey,
    recorder: Recorder,
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    advance: Callable[[int], None],
) -> RecordedDrafts:
    """Let a draft model draft at every position of every trace.

    Call it where models run.

    Args:
        key: what the result is of.
        recorder: runs the draft model.
        advance: told how many positions are done.

    Raises:
        TraceError: the traces do not say how they were sampled.
        ConfigError: the draft's KV cache has no room for a trace with its drafts.
    """
    tapes = [_tape(i, trace, meta, recorder) for i, trace in enumerate(traces)]
    waiting = deque(tape for tape in tapes if not tape.is_done)
    running: list[_Tape] = []
    done = 0
    while waiting or running:
        _admit(waiting, running, recorder.num_blocks - 1)
        done += _step(recorder, running)
        advance(done)
        for tape in running:
            if tape.is_done:
                recorder.finish(tape.request)
        running = [tape for tape in running if not tape.is_done]
    return RecordedDrafts(key, **_joined(tapes), forwards=recorder.forwards())


def _tape(index: int, trace: Trace, meta: Mapping[str, Any], recorder: Recorder) -> _Tape:
    request = trace_request(index, trace, meta)
    request.max_len = ENDLESS
    output = trace.output_token_ids.tolist()
    return _Tape(request, output, blocks_for(recorder.most_slots(len(trace.token_ids))))


def _admit(waiting: deque[_Tape], running: list[_Tape], num_blocks: int) -> None:
    """Begin as many traces as fit: a draft that found no room would be cut short."""
    free = num_blocks - sum(tape.num_blocks for tape in running)
    while waiting and len(running) < BATCH and waiting[0].num_blocks <= free:
        free -= waiting[0].num_blocks
        running.append(waiting.popleft())
    if not running:
        raise ConfigError(
            f"the draft model's KV cache holds {num_blocks * BLOCK_SIZE} tokens; a trace with its "
            f"drafts takes {waiting[0].num_blocks * BLOCK_SIZE}: raise --kv-cache-memory"
        )


def _step(recorder: Recorder, tapes: Sequence[_Tape]) -> int:
    """Draft for all; returns how many positions were done. Who still reads waits."""
    config, count = recorder.config, len(tapes)
    budget = DraftBudget([config.tree_nodes] * count, [config.num_speculative_tokens] * count)
    growths = recorder.grow([tape.request for tape in tapes], budget)
    ready = 0
    for tape, growth in zip(tapes, growths, strict=True):
        if growth is None:  # no room in the draft's context
            tape.add(DraftTree())
        elif growth.num_levels:
            tape.add(growth.tree)
        else:
            continue
        ready += 1
    return ready


def _joined(tapes: Sequence[_Tape]) -> dict[str, Any]:
    """The arrays of all traces, one after another."""

    def joined(name: str, dtype: str) -> NDArray[Any]:
        parts = [np.frombuffer(getattr(tape, name), dtype) for tape in tapes]
        return np.concatenate([np.empty(0, dtype), *parts])

    counts = joined("counts", "i4").astype(np.int64)
    return {
        "positions": np.cumsum([0, *(len(tape.counts) for tape in tapes)], dtype=np.int64),
        "offsets": np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        "token_ids": joined("token_ids", "i4"),
        "parents": joined("parents", "i4"),
        "accept_probs": joined("accept_probs", "f8"),
    }
