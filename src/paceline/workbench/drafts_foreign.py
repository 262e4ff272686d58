"""Recording and replaying drafts by a model of another vocabulary.

What is kept are the draft's own tokens, before they are translated: a replay translates the texts
of its requests and the trees as the proposer does, and only the forwards come out of the recording.
How the draft reads a text does not depend on the steps in which it arrived, as long as the draft's
context holds all of it. Beyond that the oldest half is forgotten at a step of its own, and what the
draft says then depends on which: such traces are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from paceline.config import MAX_TREE_NODES, SpeculativeConfig
from paceline.errors import ConfigError
from paceline.proposers.base import DraftBudget
from paceline.proposers.draft_model.build import EXPANSION
from paceline.proposers.draft_model.growth import Growth, branching
from paceline.proposers.draft_model.heterogeneous import (
    MORE,
    SPARE,
    HeterogeneousProposer,
    pace,
    shadow_config,
)
from paceline.proposers.draft_model.shadows import Shadow, ShadowDrafter
from paceline.proposers.draft_model.vocabulary import VocabularyPair
from paceline.request import Request
from paceline.runtime.model_runner import ModelRunner
from paceline.span import DraftTree
from paceline.workbench.drafts_cached import CachedDrafts
from paceline.workbench.drafts_recording import Recorder
from paceline.workbench.drafts_store import RecordedDrafts


def cached_foreign_drafts(
    config: SpeculativeConfig,
    drafts: RecordedDrafts,
    trace_of: Mapping[int, int],
    pair: VocabularyPair,
) -> HeterogeneousProposer:
    """Drafts as the model of another vocabulary would, out of what was recorded of it."""
    drafter = _CachedShadows(shadow_config(config), drafts, trace_of)
    return HeterogeneousProposer(config, cast(ShadowDrafter, drafter), pair)


class _CachedShadows(CachedDrafts):
    """Drafts for shadows; a place of a trace is where the real request is."""

    def __init__(
        self, config: SpeculativeConfig, drafts: RecordedDrafts, trace_of: Mapping[int, int]
    ) -> None:
        super().__init__(config, drafts, trace_of)
        self.shadows: dict[int, Shadow] = {}

    def position(self, request: Request) -> int:
        return self.shadows[request.request_id].real.num_output_tokens


def foreign_recorder(
    config: SpeculativeConfig, runner: ModelRunner, pair: VocabularyPair
) -> Recorder:
    """Records a draft model of another vocabulary."""
    recording = _Recording(config, runner, pair)
    return Recorder(
        config,
        recording.grow,
        recording.finish,
        runner.kv.pool.num_blocks,
        lambda num_tokens: _most_slots(config, num_tokens, runner.decoder.max_len),
        recording.forwards,
    )


def _most_slots(config: SpeculativeConfig, num_tokens: int, max_len: int) -> int:
    """KV of a text and of the levels below it, each of which forwards fewer nodes than a tree."""
    nodes = min(MAX_TREE_NODES, config.tree_nodes * EXPANSION * SPARE + MORE)
    levels = config.num_speculative_tokens * EXPANSION + MORE
    return min(EXPANSION * num_tokens, max_len) + nodes * levels


class _Recording:
    """The proposer with shadows whose growths are kept, and how much they wrote."""

    def __init__(
        self, config: SpeculativeConfig, runner: ModelRunner, pair: VocabularyPair
    ) -> None:
        shadows = _GrownShadows(shadow_config(config), runner, pair, branching(config))
        self._drafter = shadows
        self._proposer = HeterogeneousProposer(config, shadows, pair)
        self._count = 0
        self._sums = [0.0, 0.0]
        self.finish = self._proposer.finish

    def grow(self, requests: Sequence[Request], budget: DraftBudget) -> list[Growth | None]:
        """What the draft's tokens are chosen from, for each request."""
        self._drafter.grown = {}
        self._proposer.propose(requests, budget)
        for request in requests:
            translation = self._drafter.shadows[request.request_id].translation
            if not translation.is_whole:
                raise ConfigError(
                    f"trace {request.request_id} is longer than the context of the draft model of "
                    f"another vocabulary, {self._drafter.max_len} of its tokens: its drafts depend "
                    "on the steps in which the text came, and are not recorded. Leave it out, or "
                    "measure it with paceline run --compare"
                )
            ratio, more = pace(translation)
            self._count += 1
            self._sums[0] += math.ceil(ratio) + more
            self._sums[1] += ratio
        return [self._drafter.grown.get(request.request_id) for request in requests]

    def forwards(self) -> tuple[float, float]:
        """Mean forwards for a draft's first level, and for each further one."""
        count = max(1, self._count)
        return (self._sums[0] / count, self._sums[1] / count) if self._count else (1.0, 1.0)


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

    def _reserve(self, growth: Growth) -> bool:
        if super()._reserve(growth):
            return True
        raise ConfigError(
            f"the draft model's KV cache has no room for the drafts of trace "
            f"{growth.request.request_id}: raise --kv-cache-memory"
        )
