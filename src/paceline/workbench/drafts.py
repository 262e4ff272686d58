"""Drafts out of a recording instead of a model. Knows neither files nor how they are recorded.

A replay grows its trees from as many of the recorded levels as it asks for. With a draft of another
vocabulary it translates the texts of its requests and the trees as the proposer does, and only the
forwards come out of the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from paceline.cache.kv_cache import KVCache
from paceline.config.speculative import ForwardingConfig
from paceline.proposers.base import Proposer
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.estimates import Candidates
from paceline.proposers.base.parallel import ParallelDrafter
from paceline.proposers.draft_model.heterogeneous import HeterogeneousProposer, shadow_config
from paceline.proposers.draft_model.shadows import Shadow, ShadowDrafter
from paceline.request.request import Request
from paceline.request.span import ROOT, Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.workbench.drafts_store import RecordedDrafts

NOWHERE = ROOT - 1


def cached_proposer(
    config: ForwardingConfig, drafts: RecordedDrafts, places: Sequence[int]
) -> Proposer:
    """A proposer whose drafts are those of a model, out of what was recorded of it.

    Args:
        config: how to draft; its trees no larger than those recorded.
        drafts: of the traces.
        places: of each request, by its id: which of the recorded traces it is.

    Raises:
        ConfigError: drafts of this configuration are not among those recorded.
    """
    drafts.key.check_covers(config)
    if drafts.pair is not None:
        drafter = _CachedShadows(shadow_config(config), drafts, places)
        return HeterogeneousProposer(config, cast(ShadowDrafter, drafter), drafts.pair)
    kind = CachedParallelDrafts if config.method == "parallel_draft" else CachedDrafts
    return kind(config, drafts, places)


class CachedDrafts(Drafter):
    """Drafts as the draft model would, out of what was recorded of it; nothing is forwarded.

    Only where its KV cache is full does the model itself draft less. Arguments are those of
    :func:`cached_proposer`.

    Attributes:
        num_forwards, num_rows: what the draft model would have been asked for.
    """

    num_forwards = 0
    num_rows = 0

    def __init__(
        self, config: ForwardingConfig, drafts: RecordedDrafts, places: Sequence[int]
    ) -> None:
        super().__init__(config, KVCache(_NoMemory(), prefix_caching=False), drafts.key.max_len)
        self.name = config.method
        self._recorded = drafts
        self._trace_of = places
        self._places: dict[int, Place] = {}

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._places.pop(request.request_id, None)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        self.num_forwards += 1
        self.num_rows += sum(len(span.token_ids) - span.num_cached for span in spans)
        return [self.place(row.request).below(row.path) for row in rows]

    def position(self, request: Request) -> int:
        """How many output tokens of its trace a request holds."""
        return request.num_output_tokens

    def place(self, request: Request) -> Place:
        position = self.position(request)
        place = self._places.get(request.request_id)
        if place is None or place.position != position:
            trace = self._trace_of[request.request_id]
            place = Place(position, *self._recorded.candidates(trace, position))
            self._places[request.request_id] = place
        return place


class Place:
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
        return self._candidates(node)

    def _candidates(self, node: int) -> Candidates:
        children = self._children.get(node, ())
        return [self._tokens[child] for child in children], [
            self._probs[child] for child in children
        ]

    def levels(self, count: int) -> list[Candidates]:
        """What was kept of each depth, each below the likeliest of the one before."""
        found, node = list[Candidates](), ROOT
        for _ in range(count):
            found.append(self._candidates(node))
            node = next(iter(self._children.get(node, ())), NOWHERE)
        return found


class _NoMemory:
    """KV memory for the books alone, and more of it than a replay needs."""

    num_blocks = 1 << 16

    def move(self, source: Any, target: Any) -> None: ...

    def fill(self, slots: Any, value: float) -> None: ...


class CachedParallelDrafts(ParallelDrafter, CachedDrafts):
    """Drafts as the parallel draft would, out of what was recorded of it."""

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        depths = [self._depths[row.request.request_id] for row in rows]
        self.num_forwards += 1
        self.num_rows += sum(len(span.token_ids) for span in spans) + sum(depths) - len(depths)
        places = (self.place(row.request) for row in rows)
        found = zip(places, depths, strict=True)
        return [level for place, depth in found for level in place.levels(depth)]


class _CachedShadows(CachedDrafts):
    """Drafts for shadows; a place of a trace is where the real request is."""

    def __init__(
        self, config: ForwardingConfig, drafts: RecordedDrafts, places: Sequence[int]
    ) -> None:
        super().__init__(config, drafts, places)
        self.shadows: dict[int, Shadow] = {}

    def position(self, request: Request) -> int:
        return self.shadows[request.request_id].real.num_output_tokens
