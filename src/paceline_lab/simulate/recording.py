"""Records drafts of models and heads along traces, one true token at a time, in a file.

A draft at a place of a trace depends on the tokens before it alone, so any policy can be replayed
over drafts that the model made once. What is kept is the growth before its best nodes are chosen. A
tree of fewer nodes or levels, or with a higher least probability, expands only nodes that the
largest one expands, in the same order: what outranks a node of the small tree is in both. So the
same growth, fed with recorded candidates, ends in the tree that it would have had with the model.

Of drafts that one forward makes at once the candidates of every depth are kept, those of each below
the likeliest of the one before: what a mask's row says depends on the tokens before the draft
alone, and not on how many masks follow it.

A head drafts from the target's hidden states, which no trace holds: its target reads the traces
beside it. A head that rested for a while and began anew amid a request, as the planner may have it,
drafts from less than was recorded.

Of a draft of another vocabulary its own tokens are kept, before they are translated. How it reads a
text does not depend on the steps in which it arrived, as long as its context holds all of it.
Beyond that the oldest half is forgotten at a step of its own, and what the draft says then depends
on which: such traces are refused.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.build.build import open_runner, target_info
from paceline.cache.block_pool import blocks_for
from paceline.cache.model_runner import ModelRunner
from paceline.config import MAX_TREE_NODES, SpeculativeConfig
from paceline.config.speculative import ForwardingConfig, HeadConfig
from paceline.core.errors import ConfigError, TraceError
from paceline.engine.threads import COMPUTE
from paceline.models.backend import BLOCK_SIZE
from paceline.proposers.base import DraftBudget, TargetInfo
from paceline.proposers.base.growth import Growth
from paceline.proposers.base.parallel import ParallelDrafter
from paceline.proposers.draft_model import EXPANSION, foreign_runner
from paceline.proposers.draft_model.heterogeneous import (
    MORE,
    SPARE,
    HeterogeneousProposer,
    ShadowDrafter,
    pace,
    shadow_config,
)
from paceline.proposers.draft_model.loading import load_draft
from paceline.proposers.draft_model.proposer import (
    DraftModelProposer,
    ParallelDraftProposer,
    needed_mask_token,
)
from paceline.proposers.draft_model.translation import VocabularyPair
from paceline.proposers.heads import build_head
from paceline.proposers.heads.checkpoint import HeadCheckpoint
from paceline.proposers.heads.proposer import HeadDrafter
from paceline.request.request import Request
from paceline.request.span import DraftTree, Span
from paceline.request.traces import Trace
from paceline_lab.simulate.recorded_drafts import (
    DraftsKey,
    HeadTarget,
    RecordedDrafts,
    check_vocabulary,
    draft_source,
    drafts_key,
    read_drafts,
    write_drafts,
)
from paceline_lab.trace.requests import trace_request

log = logging.getLogger(__name__)
Config = TypeVar("Config", bound=SpeculativeConfig)
FOLDER = "drafts"
BATCH = 16
"""Traces that are recorded side by side."""
CHUNK = 256
"""Most tokens of a trace that a head's target reads at a time."""
ENDLESS = 1 << 40
"""Tokens that a recorded request may still emit, so that no prompt is too long to be read."""


def cached_drafts(
    folder: str | Path,
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    config: ForwardingConfig,
    target: TargetInfo,
    advance: Callable[[int], None] = lambda done: None,
    running: HeadTarget | None = None,
) -> RecordedDrafts:
    """The drafts for traces: out of a file or, where there is none, by the draft model.

    Args:
        folder: of the traces, beside which recordings are kept.
        meta: of the traces.
        config: of the draft model, with the largest trees that are wanted.
        target: what the draft model has to fit to.
        advance: told how many output tokens are done, on another thread.
        running: the target, where the drafts are a head's.

    Raises:
        TraceError: the traces are not the target's, or the folder cannot be written.
        ConfigError, ModelLoadError: the draft model cannot be used, or its drafts depend on more
            than the tokens before them.
    """
    check_vocabulary(traces, meta, target)
    source = draft_source(config, target)
    key = drafts_key(traces, meta, config, target, source, running)
    path = Path(folder) / FOLDER / f"{key.digest}.safetensors"
    if path.exists():
        try:
            return dataclasses.replace(read_drafts(path, key), pair=source.pair)
        except TraceError as error:
            log.warning("recorded drafts are ignored and made again: %s", error)
    roomy = dataclasses.replace(target, max_num_seqs=BATCH)

    def record() -> RecordedDrafts:
        if source.head is not None:
            assert running is not None
            assert isinstance(config, HeadConfig)
            recorder: Recorder = HeadRecorder.opened(config, source.head, running)
        elif source.pair is None:
            recorder = Recorder(config, load_draft(config, roomy))
        else:
            runner = foreign_runner(source.checkpoint, config, roomy)
            recorder = ForeignRecorder(config, runner, source.pair)
        return record_drafts(key, recorder, traces, meta, advance)

    drafts = COMPUTE.call(record)
    write_drafts(path, drafts)
    return dataclasses.replace(drafts, pair=source.pair)


def record_all(
    wanted: Sequence[SpeculativeConfig], record: Callable[[ForwardingConfig], RecordedDrafts]
) -> Callable[[ForwardingConfig], RecordedDrafts]:
    """Recorded drafts of every configuration of a draft model, found by it.

    Configurations whose trees are parts of the same largest ones share a recording.
    """
    recordings = {
        _kind(config): record(config)
        for config in widest(each for each in wanted if isinstance(each, ForwardingConfig))
    }
    return lambda config: recordings[_kind(config)]


def widest(configs: Iterable[Config]) -> list[Config]:
    """Of configurations that differ in size alone the largest, whose drafts hold the others'."""
    widest_of_kind: dict[Config, Config] = {}
    for config in configs:
        kind = _kind(config)
        widest_of_kind[kind] = _wider(widest_of_kind.get(kind, config), config)
    return list(widest_of_kind.values())


def _kind(config: Config) -> Config:
    """Equal for configurations that differ in the size of their trees alone."""
    children = config.tree_branching
    return dataclasses.replace(
        config,
        num_speculative_tokens=1,
        max_tree_nodes=children if children > 1 else 0,
        max_branching=children,
        min_accept_prob=0.0,
    )


def _wider(one: Config, two: Config) -> Config:
    return dataclasses.replace(
        one,
        num_speculative_tokens=max(one.num_speculative_tokens, two.num_speculative_tokens),
        max_tree_nodes=max(one.max_tree_nodes, two.max_tree_nodes),
        min_accept_prob=min(one.min_accept_prob, two.min_accept_prob),
    )


@dataclass(slots=True)
class _Tape:
    """One trace while it is recorded; the request holds the tokens before the next position."""

    request: Request
    output: list[int]
    num_blocks: int
    trees: list[DraftTree] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.trees) == len(self.output)

    def add(self, tree: DraftTree) -> None:
        """Keep what was grown, and move on by one token."""
        self.request.token_ids.append(self.output[len(self.trees)])
        self.trees.append(tree)


class Recorder:
    """Runs a draft model whose tokens are the target's, to be recorded.

    Args:
        config: the largest drafts.

    Attributes:
        grow: what drafts are chosen from, as
            :meth:`~paceline.proposers.base.drafter.Drafter.grow` says.
        finish: forgets a request.
        num_blocks: of its KV cache.

    Raises:
        ConfigError: a parallel draft was asked for, and the model is none.
    """

    grow: Callable[[Sequence[Request], DraftBudget], list[Growth | None]]
    finish: Callable[[Request], None]

    def __init__(self, config: ForwardingConfig, runner: ModelRunner) -> None:
        self.config, self.num_blocks = config, runner.kv.pool.num_blocks
        self._open(runner)

    def _open(self, runner: ModelRunner) -> None:
        if self.config.method == "parallel_draft":
            mask_token = needed_mask_token(self.config, runner)
            parallel = ParallelDraftProposer(self.config, runner, mask_token)
            parallel.keeps_levels = True
            proposer: DraftModelProposer = parallel
        else:
            proposer = DraftModelProposer(self.config, runner)
        self.grow, self.finish = proposer.grow, proposer.finish

    def most_slots(self, num_tokens: int) -> int:
        """KV slots that a trace takes with its drafts; a level forwards fewer nodes than a tree."""
        return num_tokens + self.config.tree_nodes * self.config.num_speculative_tokens

    def forwards(self) -> tuple[float, float]:
        """See :class:`~paceline_lab.simulate.recorded_drafts.RecordedDrafts`; known at the end."""
        return 1.0, 1.0


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
    trees = [tree for tape in tapes for tree in tape.trees]

    def joined(name: str, dtype: str) -> NDArray[Any]:
        return np.array([value for tree in trees for value in getattr(tree, name)], dtype)

    return {
        "positions": np.cumsum([0, *(len(tape.trees) for tape in tapes)], dtype=np.int64),
        "offsets": np.cumsum([0, *map(len, trees)], dtype=np.int64),
        "token_ids": joined("token_ids", "i4"),
        "parents": joined("parents", "i4"),
        "accept_probs": joined("accept_probs", "f8"),
    }


class HeadRecorder(Recorder):
    """Runs a head beside its target, which reads each trace as far as the head drafts from.

    Rows of a forward do not depend on their company, so the hidden states are those of any run.

    Args:
        config: the largest drafts.
        drafter: the head, built for ``target``.
        target: its KV cache keeps no prefixes.
    """

    def __init__(self, config: HeadConfig, drafter: HeadDrafter, target: ModelRunner) -> None:
        self.config = config
        self._drafter, self._target = drafter, target
        if isinstance(drafter, ParallelDrafter):
            drafter.keeps_levels = True
        self.num_blocks = min(each.kv.pool.num_blocks for each in (target, drafter.runner))

    @classmethod
    def opened(cls, config: HeadConfig, head: HeadCheckpoint, running: HeadTarget) -> HeadRecorder:
        """Load the target and, on it, the head."""
        checkpoint = running.info.checkpoint
        assert checkpoint is not None
        built = dataclasses.replace(
            running.config,
            speculative=(config,),
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
            pipeline_parallel_size=1,
        )
        target, left = open_runner(checkpoint, built, running.ops)
        drafter = build_head(head, config, target_info(checkpoint, built, left, target))
        return cls(config, drafter, target)

    def grow(self, requests: Sequence[Request], budget: DraftBudget) -> list[Growth | None]:
        for request in requests:
            if request.request_id not in self._target.kv:
                self._target.kv.open(request.request_id)
        while lacking := [request for request in requests if self._lacks(request)]:
            self._read(lacking)
        return self._drafter.grow(requests, budget)

    def finish(self, request: Request) -> None:
        self._drafter.finish(request)
        self._target.kv.free(request.request_id)

    def _lacks(self, request: Request) -> int:
        """Tokens that the target has yet to read; the last one begins a step of its own."""
        return len(request.token_ids) - 1 - self._target.kv[request.request_id].length

    def _read(self, requests: Sequence[Request]) -> None:
        """One forward of the target over what requests lack, or over as much as a step may read."""
        kv, spans = self._target.kv, list[Span]()
        for request in requests:
            start, count = kv[request.request_id].length, min(self._lacks(request), CHUNK)
            if not kv.reserve(request.request_id, count, certain=count):
                raise ConfigError(
                    f"the target's KV cache has no room for trace {request.request_id}: raise "
                    "--kv-cache-memory"
                )
            chunk = request.token_ids[start : start + count]
            spans.append(Span.chunk(request.request_id, start, chunk, sample=False))
        # Asked of every request, as before any forward.
        wanted = [self._drafter.follows(request) for request in requests]
        self._target.taps = tuple(self._drafter.taps)
        features = self._target.forward(self._target.pack(spans), greedy=True).features
        assert features is not None
        for request, span, is_wanted in zip(requests, spans, wanted, strict=True):
            count = len(span.token_ids)
            kv.commit(request.request_id, range(count))
            if is_wanted:
                self._drafter.read(request, span.start, features[:count])
            features = features[count:]


class ForeignRecorder(Recorder):
    """Runs a draft model of another vocabulary, and counts how much it writes."""

    def __init__(self, config: ForwardingConfig, runner: ModelRunner, pair: VocabularyPair) -> None:
        self._drafter = _GrownShadows(shadow_config(config), runner, pair, config.tree_branching)
        self._proposer = HeterogeneousProposer(config, self._drafter, pair)
        self._paces: list[tuple[float, float]] = []
        super().__init__(config, runner)

    def _open(self, runner: ModelRunner) -> None:
        self._max_len = runner.decoder.max_len
        self.grow, self.finish = self._grow, self._proposer.finish

    def most_slots(self, num_tokens: int) -> int:
        nodes = min(MAX_TREE_NODES, self.config.tree_nodes * EXPANSION * SPARE + MORE)
        levels = self.config.num_speculative_tokens * EXPANSION + MORE
        return min(EXPANSION * num_tokens, self._max_len) + nodes * levels

    def _grow(self, requests: Sequence[Request], budget: DraftBudget) -> list[Growth | None]:
        self._drafter.grown = {}
        self._proposer.propose(requests, budget)
        for request in requests:
            translation = self._drafter.shadows[request.request_id].translation
            if not translation.is_whole:
                raise ConfigError(
                    f"trace {request.request_id} is longer than the context of the draft model of "
                    f"another vocabulary, {self._drafter.max_len} of its tokens: its drafts depend "
                    "on the steps in which the text came, and are not recorded. Leave it out, or "
                    "measure it with paceline run MODEL --compare"
                )
            ratio, more = pace(translation)
            self._paces.append((math.ceil(ratio) + more, ratio))
        return [self._drafter.grown.get(request.request_id) for request in requests]

    def forwards(self) -> tuple[float, float]:
        first, further = np.mean(self._paces or [(1.0, 1.0)], axis=0).tolist()
        return first, further


class _GrownShadows(ShadowDrafter):
    """Keeps what its trees are chosen from; raises where there is no room for one."""

    grown: dict[int, Growth]
    """By request; its reader empties it before each call."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        """No trees: nobody verifies them."""
        for request, growth in zip(requests, self.grow(requests, budget), strict=True):
            if growth is not None:
                self.grown[request.request_id] = growth
        return [DraftTree() for _ in requests]

    def _reserve(self, growth: Growth, drafted: int) -> bool:
        if super()._reserve(growth, drafted):
            return True
        raise ConfigError(
            f"the draft model's KV cache has no room for the drafts of trace "
            f"{growth.request.request_id}: raise --kv-cache-memory"
        )
