"""Drafts of models for traces: made once, kept in a file, and replayed from there.

A draft at a place of a trace depends on the tokens before it alone, so any policy can be replayed
over drafts that the model made once. What is kept is the growth before its best nodes are chosen. A
tree of fewer nodes or levels, or with a higher least probability, expands only nodes that the
largest one expands, in the same order: what outranks a node of the small tree is in both. So the
same growth, fed with recorded candidates, ends in the tree that it would have had with the model.

Owns which recorder and which replay a kind of draft takes, and which configurations share a
recording; how each drafts is the affair of ``drafts_recording`` and ``drafts_cached``,
``drafts_parallel`` and ``drafts_foreign``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.engine.compute_thread import COMPUTE
from paceline.errors import TraceError
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.draft_model.build import foreign_runner
from paceline.proposers.draft_model.growth import branching
from paceline.proposers.draft_model.loading import load_draft
from paceline.workbench.drafts_cached import CachedDrafts
from paceline.workbench.drafts_foreign import cached_foreign_drafts, foreign_recorder
from paceline.workbench.drafts_key import DraftSource, check_vocabulary, draft_source, drafts_key
from paceline.workbench.drafts_parallel import CachedParallelDrafts, parallel_recorder
from paceline.workbench.drafts_recording import BATCH, Recorder, level_recorder, record_drafts
from paceline.workbench.drafts_store import RecordedDrafts, read_drafts, write_drafts
from paceline.workbench.traces import Trace

log = logging.getLogger(__name__)
FOLDER = "drafts"


def cached_proposer(
    config: SpeculativeConfig, drafts: RecordedDrafts, trace_of: Mapping[int, int]
) -> Proposer:
    """A proposer whose drafts are those of a model, out of what was recorded of it.

    Args:
        config: how to draft; its trees no larger than those recorded.
        drafts: of the traces.
        trace_of: for each request, by its id, the place of its trace among the traces.

    Raises:
        ConfigError: drafts of this configuration are not among those recorded.
    """
    drafts.key.check_covers(config)
    if drafts.pair is not None:
        return cached_foreign_drafts(config, drafts, trace_of, drafts.pair)
    kind = CachedParallelDrafts if config.method == "parallel_draft" else CachedDrafts
    return kind(config, drafts, trace_of)


def cached_drafts(
    folder: str | Path,
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    config: SpeculativeConfig,
    target: TargetInfo,
    advance: Callable[[int], None] = lambda done: None,
) -> RecordedDrafts:
    """The drafts for traces: out of a file or, where there is none, by the draft model.

    Args:
        folder: of the traces, beside which recordings are kept.
        meta: of the traces.
        config: of the draft model, with the largest trees that are wanted.
        target: what the draft model has to fit to.
        advance: told how many output tokens are done, on another thread.

    Raises:
        TraceError: the traces are not the target's, or the folder cannot be written.
        ConfigError, ModelLoadError: the draft model cannot be used, or its drafts depend on more
            than the tokens before them.
    """
    check_vocabulary(traces, meta, target)
    source = draft_source(config, target)
    key = drafts_key(traces, meta, config, target, source)
    path = Path(folder) / FOLDER / f"{key.digest}.safetensors"
    if path.exists():
        try:
            lengths = [len(trace.output_token_ids) for trace in traces]
            return dataclasses.replace(read_drafts(path, key, lengths), pair=source.pair)
        except TraceError as error:
            log.warning("recorded drafts are ignored and made again: %s", error)
    roomy = dataclasses.replace(target, max_num_seqs=BATCH)

    def record() -> RecordedDrafts:
        recorder = _recorder(config, roomy, source)
        return record_drafts(key, recorder, traces, meta, advance)

    drafts = COMPUTE.call(record)
    write_drafts(path, drafts)
    return dataclasses.replace(drafts, pair=source.pair)


def _recorder(config: SpeculativeConfig, target: TargetInfo, source: DraftSource) -> Recorder:
    if source.pair is not None:
        runner = foreign_runner(source.checkpoint, config, target)
        return foreign_recorder(config, runner, source.pair)
    make = parallel_recorder if config.method == "parallel_draft" else level_recorder
    return make(config, load_draft(config, target))


def record_all(
    wanted: Sequence[SpeculativeConfig], record: Callable[[SpeculativeConfig], RecordedDrafts]
) -> Callable[[SpeculativeConfig], RecordedDrafts]:
    """Recorded drafts of every configuration of a draft model, found by it.

    Configurations whose trees are parts of the same largest ones share a recording.

    Args:
        record: makes or reads one.
    """
    widest: dict[SpeculativeConfig, SpeculativeConfig] = {}
    for config in wanted:
        if config.needs_forwards:
            kind = _kind(config)
            widest[kind] = _wider(widest.get(kind, config), config)
    found = {kind: record(config) for kind, config in widest.items()}
    return lambda config: found[_kind(config)]


def _kind(config: SpeculativeConfig) -> SpeculativeConfig:
    """Equal for configurations that differ in the size of their trees alone."""
    children = branching(config)
    return dataclasses.replace(
        config,
        num_speculative_tokens=1,
        max_tree_nodes=children if children > 1 else 0,
        max_branching=children,
        min_accept_prob=0.0,
    )


def _wider(one: SpeculativeConfig, two: SpeculativeConfig) -> SpeculativeConfig:
    return dataclasses.replace(
        one,
        num_speculative_tokens=max(one.num_speculative_tokens, two.num_speculative_tokens),
        max_tree_nodes=max(one.max_tree_nodes, two.max_tree_nodes),
        min_accept_prob=min(one.min_accept_prob, two.min_accept_prob),
    )
