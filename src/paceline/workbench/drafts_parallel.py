"""Recording and replaying drafts that one forward makes at once.

What a mask's row says depends on the tokens before the draft alone, and not on how many masks
follow it; so the candidates of every depth are kept, those of each below the likeliest of the one
before. A replay grows its trees from as many depths as it asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.config import SpeculativeConfig
from paceline.proposers.draft_model.drafter import Candidates
from paceline.proposers.draft_model.parallel import (
    ParallelDrafter,
    ParallelDraftProposer,
    needed_mask_token,
)
from paceline.runtime.model_runner import ModelRunner
from paceline.runtime.sampler import SamplingRow
from paceline.span import ROOT, DraftTree, Span
from paceline.workbench.drafts_cached import CachedDrafts
from paceline.workbench.drafts_recording import Recorder, recorder_of


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


def parallel_recorder(config: SpeculativeConfig, runner: ModelRunner) -> Recorder:
    """Records a parallel draft; raises :class:`ConfigError` where the model is none."""
    mask_token = needed_mask_token(config, runner)
    return recorder_of(_EveryLevel(config, runner, mask_token), runner)


class _EveryLevel(ParallelDraftProposer):
    """Keeps what every depth had to choose from, in the place of a tree."""

    def _tree(self, levels: Sequence[Candidates], max_nodes: int) -> DraftTree:
        return _stacked(levels)


def _stacked(levels: Sequence[Candidates]) -> DraftTree:
    """Each level's candidates below the first of the level before.

    What comes after one without a chance has none either, and nothing is reached below a level
    without any.
    """
    tree, parent = DraftTree(), ROOT
    for tokens, estimates in levels:
        first = len(tree)
        for token, estimate in zip(tokens, estimates, strict=True):
            if not estimate > 0.0:  # also true for NaN
                break
            tree.token_ids.append(token)
            tree.parents.append(parent)
            tree.accept_probs.append(estimate)
        if len(tree) == first:
            break
        parent = first
    return tree
