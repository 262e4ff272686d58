"""Drafts of several tokens by one forward of a model that was trained for it (PARD).

Behind the tokens that the draft lacks it reads mask tokens, one for each further token; the row of
each predicts what stands there, whatever stands before it. The KV of masks is never kept. Since no
row knows what the rows before it chose, every node of a depth has the same candidates, and the tree
is made of their most probable combinations. Owns the masks and that choice; how the draft keeps up
with its requests is the affair of :mod:`paceline.proposers.base.drafter`.

Source: An et al., PARD, arXiv 2504.18583.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError
from paceline.policy.prices import Prices
from paceline.proposers.base import DraftBudget, TargetInfo
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.estimates import Candidates
from paceline.proposers.base.growth import Growth
from paceline.proposers.draft_model.loading import load_draft
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.request import Request
from paceline.runtime.logit_edits import SamplingRow
from paceline.runtime.model_runner import ModelRunner
from paceline.span import ROOT, DraftTree, Span

NAME = "parallel_draft"


class ParallelDrafter(Drafter):
    """Trees out of levels that are all there at once. Subclasses say where these come from."""

    name = NAME
    costs_levels = False

    _depths: dict[int, int]
    """By request, of the drafts that are being made."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        growths = self.grow(requests, budget)
        return [DraftTree() if growth is None else growth.tree for growth in growths]

    def _read(self, growths: Sequence[Growth]) -> tuple[list[Growth], Iterable[Candidates]]:
        self._depths = {
            growth.request.request_id: min(growth.max_depth, growth.max_nodes) for growth in growths
        }
        return super()._read(growths)

    def _add_levels(
        self, growths: list[Growth], candidates: Iterable[Candidates], prices: Prices
    ) -> None:
        """All levels are there already, whatever a further one would have to promise."""
        rows = iter(candidates)
        for growth in growths:
            levels = list(islice(rows, self._depths[growth.request.request_id]))
            growth.tree = self._tree(levels, growth.max_nodes)
            growth.num_levels = len(levels)

    def _tree(self, levels: Sequence[Candidates], max_nodes: int) -> DraftTree:
        """What is drafted out of the candidates of every depth."""
        return likeliest_tree(levels, max_nodes, self.config.min_accept_prob)


class ParallelDraftProposer(ParallelDrafter, DraftModelProposer):
    """See the module's docstring.

    Args:
        config: how to draft.
        runner: the draft model with a KV cache of its own, without prefix caching.
        mask_token: what it reads where a token is not known.
    """

    def __init__(self, config: SpeculativeConfig, runner: ModelRunner, mask_token: int) -> None:
        super().__init__(config, runner)
        self._mask_token = mask_token

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        """Of each row and, behind it, of the masks that follow it."""
        owners = iter(rows)
        packed, ranked = list[Span](), list[SamplingRow]()
        for span in spans:
            if span.sample_rows:
                row = next(owners)
                span = self._with_masks(span)
                # Which tokens come before a mask's is not known; the noise goes by their number.
                paths = ([self._mask_token] * depth for depth in range(1, len(span.sample_rows)))
                ranked += [row, *(SamplingRow(row.request, path, row.params) for path in paths)]
            packed.append(span)
        return super()._candidates(packed, ranked)

    def _with_masks(self, span: Span) -> Span:
        """The span, then as many masks as the draft may have further tokens and there is room."""
        known, request_id = len(span.token_ids), span.request_id
        masks = self._depths[request_id] - 1
        if not self._kv.reserve(request_id, known + masks):
            masks = 0
        self._depths[request_id] = 1 + masks
        tokens = [*span.token_ids, *[self._mask_token] * masks]
        rows = range(known - 1, known + masks)
        return Span(request_id, span.start, tokens, range(-1, len(tokens) - 1), rows)


def likeliest_tree(levels: Sequence[Candidates], max_nodes: int, min_prob: float) -> DraftTree:
    """The ``max_nodes`` likeliest nodes of the tree in which every node of a depth branches alike.

    Args:
        levels: by depth, the tokens that any node there may carry and their estimates, descending.
        min_prob: nodes less likely to be reached and accepted are left out.
    """
    tree = DraftTree()
    # Nodes that may come next, likeliest first: (-path probability, parent, depth, rank).
    heap: list[tuple[float, int, int, int]] = []

    def offer(above: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(levels) and rank < len(levels[depth][0]):
            path_prob = above * levels[depth][1][rank]
            if path_prob >= min_prob and path_prob > 0.0:  # neither is true for NaN
                heappush(heap, (-path_prob, parent, depth, rank))

    above = {ROOT: 1.0}
    offer(1.0, ROOT, 0, 0)
    while heap and len(tree) < max_nodes:
        negative, parent, depth, rank = heappop(heap)
        node = len(tree)
        tokens, estimates = levels[depth]
        tree.token_ids.append(tokens[rank])
        tree.parents.append(parent)
        tree.accept_probs.append(estimates[rank])
        above[node] = -negative
        offer(above[node], node, depth + 1, 0)
        offer(above[parent], parent, depth, rank + 1)
    tree.origins = [NAME] * len(tree)
    return tree


def build(config: SpeculativeConfig, target: TargetInfo) -> ParallelDraftProposer:
    """Load the draft that a configuration names.

    Raises:
        ModelLoadError: it cannot be read.
        ConfigError: it does not fit to the target, or is no parallel draft.
    """
    runner = load_draft(config, target)
    return ParallelDraftProposer(config, runner, needed_mask_token(config, runner))


def needed_mask_token(config: SpeculativeConfig, runner: ModelRunner) -> int:
    """What a draft reads where a token is not known; raises :class:`ConfigError` without any."""
    mask_token = runner.decoder.config.mask_token_id
    if mask_token is None:
        raise ConfigError(
            f"{config.model} is no parallel draft: its config.json has neither pard_token nor "
            'ptd_token_id. Use method "draft_model", or train one with '
            "paceline train draft --parallel"
        )
    return mask_token
