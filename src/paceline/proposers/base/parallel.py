"""Trees out of the candidates of several depths that one forward names at once.

No row of such a forward knows what the rows before it chose, so every node of a depth has the same
candidates, and the tree is made of their most probable combinations. Owns that choice, and the mask
tokens by whose rows some drafts name candidates. Where else these come from is the affair of
subclasses, how a draft keeps up with its requests that of :mod:`paceline.proposers.base.drafter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice

from paceline.planner.drafts import Prices
from paceline.proposers.base import DraftBudget
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Candidates, Growth
from paceline.request.request import Request
from paceline.request.span import ROOT, DraftTree, Span
from paceline.sampling.logit_edits import SamplingRow


class ParallelDrafter(Drafter):
    """Trees out of levels that are all there at once. Subclasses say where these come from."""

    name = "parallel_draft"
    costs_levels = False
    keeps_levels = False
    """Grow what trees are chosen from, as :func:`stacked` has it, in the place of a tree."""

    _depths: dict[int, int]
    """By request, of the drafts that are being made."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        growths = self.grow(requests, budget)
        return [DraftTree() if growth is None else growth.tree for growth in growths]

    def _read(self, growths: Sequence[Growth]) -> tuple[list[Growth], list[Span]]:
        self._depths = {
            growth.request.request_id: min(growth.max_depth, growth.max_nodes) for growth in growths
        }
        return super()._read(growths)

    def _draft(self, growths: list[Growth], spans: Sequence[Span], prices: Prices) -> None:
        Drafter._draft(self, growths, spans, prices)
        for span in spans:  # slots of rows beyond the known tokens
            self._kv.rollback(span.request_id)

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
        if self.keeps_levels:
            return stacked(levels)
        return likeliest_tree(levels, max_nodes, self.config.min_accept_prob, self.name)


class MaskDrafter(ParallelDrafter):
    """Behind the tokens that it lacks the draft reads mask tokens, one for each further level.

    The row of each predicts what stands there, whatever stands before it. Their KV is never kept.
    """

    _mask_token: int

    def _masked(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> tuple[list[Span], list[SamplingRow]]:
        """The spans with masks behind those that are sampled, and how each row is ranked."""
        owners = iter(rows)
        masked, ranked = list[Span](), list[SamplingRow]()
        for span in spans:
            if span.sample_rows:
                row = next(owners)
                span = self._with_masks(span)
                ranked += further_rows(row, self._mask_token, len(span.sample_rows))
            masked.append(span)
        return masked, ranked

    def _with_masks(self, span: Span) -> Span:
        """The span, then as many masks as the draft may have further tokens and there is room."""
        known, request_id = len(span.token_ids), span.request_id
        masks = self._depths[request_id] - 1
        if not self._kv.reserve(request_id, masks):
            masks = 0
        self._depths[request_id] = 1 + masks
        tokens = [*span.token_ids, *[self._mask_token] * masks]
        rows = range(known - 1, known + masks)
        return Span(request_id, span.start, tokens, range(-1, len(tokens) - 1), rows)


def further_rows(row: SamplingRow, mask_token: int, count: int) -> list[SamplingRow]:
    """How candidates of ``count`` depths are ranked, ``row`` being that of the first.

    Which tokens come before those of a further depth is not known; the noise goes by their number.
    """
    paths = ([mask_token] * depth for depth in range(1, count))
    further = (SamplingRow(row.request, path, row.params) for path in paths)
    return [row, *further][:count]


def likeliest_tree(
    levels: Sequence[Candidates], max_nodes: int, min_prob: float, origin: str = ""
) -> DraftTree:
    """The ``max_nodes`` likeliest nodes of the tree in which every node of a depth branches alike.

    Args:
        levels: by depth, the tokens that any node there may carry and their estimates, descending.
        min_prob: nodes less likely to be reached and accepted are left out.
        origin: of all nodes.
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
    tree.origins = [origin] * len(tree)
    return tree


def stacked(levels: Sequence[Candidates]) -> DraftTree:
    """All that trees are made of: each level's candidates below the first of the level before.

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
