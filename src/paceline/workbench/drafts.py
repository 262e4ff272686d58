"""A draft model's drafts for traces: made once, kept in a file, and replayed from there.

A draft at a place of a trace depends on the tokens before it alone, so any policy can be replayed
over drafts that the model made once. What is kept is the growth before its best nodes are chosen. A
tree of fewer nodes or levels, or with a higher least probability, expands only nodes that the
largest one expands, in the same order: what outranks a node of the small tree is in both. So the
same growth, fed with recorded candidates, ends in the tree that it would have had with the model.

Knows neither how drafts are recorded (:mod:`paceline.workbench.drafts_recording`) nor how they are
stored (:mod:`paceline.workbench.drafts_store`).
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
from paceline.proposers.base import TargetInfo
from paceline.proposers.draft_model.drafter import Candidates, Drafter
from paceline.proposers.draft_model.loading import load_draft
from paceline.request import Request
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.sampler import SamplingRow
from paceline.span import ROOT, Span
from paceline.workbench.drafts_key import check_vocabulary, drafts_key
from paceline.workbench.drafts_recording import BATCH, record_drafts
from paceline.workbench.drafts_store import RecordedDrafts, read_drafts, write_drafts
from paceline.workbench.traces import Trace

log = logging.getLogger(__name__)
FOLDER = "drafts"


class CachedDrafts(Drafter):
    """Drafts as the draft model would, out of what was recorded of it; nothing is forwarded.

    Only where its KV cache is full does the model itself draft less.

    Args:
        config: how to draft; its trees no larger than those recorded.
        drafts: of the traces.
        trace_of: for each request, by its id, the place of its trace among the traces.

    Attributes:
        num_forwards, num_rows: what the draft model would have been asked for.

    Raises:
        ConfigError: drafts of this configuration are not among those recorded.
    """

    def __init__(
        self, config: SpeculativeConfig, drafts: RecordedDrafts, trace_of: Mapping[int, int]
    ) -> None:
        drafts.key.check_covers(config)
        super().__init__(config, KVCache(_NoMemory(), prefix_caching=False), drafts.key.max_len)
        self.name = config.method
        self.num_forwards = 0
        self.num_rows = 0
        self._recorded = drafts
        self._trace_of = trace_of
        self._places: dict[int, _Place] = {}

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._places.pop(request.request_id, None)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Sequence[Candidates]:
        self.num_forwards += 1
        self.num_rows += sum(len(span.token_ids) - span.num_cached for span in spans)
        return [self._place(row.request).below(row.path) for row in rows]

    def _place(self, request: Request) -> _Place:
        position = request.num_output_tokens
        place = self._places.get(request.request_id)
        if place is None or place.position != position:
            trace = self._trace_of[request.request_id]
            place = _Place(position, *self._recorded.candidates(trace, position))
            self._places[request.request_id] = place
        return place


class _Place:
    """What was recorded at one position of a trace, found by the path that leads to it."""

    __slots__ = ("_children", "_probs", "_tokens", "position")

    def __init__(
        self, position: int, tokens: list[int], parents: list[int], probs: list[float]
    ) -> None:
        self.position = position
        self._tokens = tokens
        self._probs = probs
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)

    def below(self, path: Sequence[int]) -> Candidates:
        tokens, node = self._tokens, ROOT
        for token in path:
            node = next(child for child in self._children[node] if tokens[child] == token)
        children = self._children.get(node, ())
        return [tokens[child] for child in children], [self._probs[child] for child in children]


class _NoMemory:
    """KV memory for the books alone, and more of it than a replay needs."""

    num_blocks = 1 << 16

    def move(self, source: Any, target: Any) -> None: ...

    def fill(self, slots: Any, value: float) -> None: ...


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
        ConfigError, ModelLoadError: the draft model cannot be used.
    """
    check_vocabulary(traces, meta, target)
    key = drafts_key(traces, meta, config, target)
    path = Path(folder) / FOLDER / f"{key.digest}.safetensors"
    if path.exists():
        try:
            return read_drafts(path, key, [len(trace.output_token_ids) for trace in traces])
        except TraceError as error:
            log.warning("recorded drafts are ignored and made again: %s", error)
    roomy = dataclasses.replace(target, max_num_seqs=BATCH)

    def record() -> RecordedDrafts:
        runner = load_draft(config, roomy)
        return record_drafts(key, config, runner, traces, meta, advance)

    drafts = COMPUTE.call(record)
    write_drafts(path, drafts)
    return drafts
