"""Drafts by a model of another vocabulary. Owns no text and no KV: it joins those who do.

For each request a shadow is kept: a request whose tokens are the draft's, for the same text
(:mod:`paceline.proposers.draft_model.translation`). An ordinary draft model drafts for the shadows,
and its trees are translated back.

Where the vocabularies are close and the text ends in the same tokens on both sides, the tokens that
both have are drafted as those of the target: ranked by its rules and with its noise. Elsewhere a
token of the draft is none that the target samples, so that its noise, penalties and grammar say
nothing about it; the draft then ranks by its own logits.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (2025), for matching texts and for the common tokens; masks for what has
still to be written, and trees, are not from there.

Every path of the draft is a text, and the target's tokens for it a path of the new tree. A token of
the target is reached when the draft's text reaches its end: its probability is that of the draft's
node that gets there, or the sum over the nodes of different paths that do. The last tokens of a
path, which what follows could still change, are left out: of the first of them 5 to 8 in 100 were
right between models with vocabularies of 2048, 512 and 105 tokens, of the settled ones 37 to 73.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import MAX_SPECULATIVE_TOKENS, MAX_TREE_NODES, ForwardingConfig
from paceline.planner.drafts import Prices
from paceline.proposers.base import DraftBudget, Proposer
from paceline.proposers.base.drafter import Drafter, grammar_mask
from paceline.proposers.base.growth import LOGIT_BLUR, RANKED, Candidates, acceptance_estimates
from paceline.proposers.draft_model.proposer import NAME, DraftModelProposer
from paceline.proposers.draft_model.translation import Translation, VocabularyPair
from paceline.request.request import Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import ROOT, DraftTree, Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import rank_candidates
from paceline.tensors.arrays import Floats

MORE = 2
"""Tokens of the draft beyond those of a translated tree: it writes the end of the text again, and
the last of its tokens settles the one before."""
ALTERNATIVES = 3
"""Least branching of what the draft writes, also where a chain is asked for: that the target ended
a token here excludes texts in which it would have gone on."""
SPARE = 2
"""Nodes that are drafted for one that is verified, were both of one vocabulary."""
ROOM = 64
"""Tokens of the draft's context, a quarter of it at most, that are left for drafting."""


class HeterogeneousProposer(Proposer):
    """See the module's docstring."""

    name = NAME
    costs_forwards = True

    def __init__(
        self, config: ForwardingConfig, drafter: ShadowDrafter, pair: VocabularyPair
    ) -> None:
        self.config = config
        self._pair = pair
        self._is_chain = config.tree_branching == 1
        self._drafter = drafter
        self._shadows = drafter.shadows
        self._limit = drafter.max_len - min(ROOM, drafter.max_len // 4)

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft model so far."""
        return self._drafter.num_forwards

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = [DraftTree() for _ in requests]
        limits = {}
        for place, request in enumerate(requests):
            nodes = min(budget.max_nodes[place], self.config.tree_nodes)
            depth = min(budget.max_depth[place], self.config.num_speculative_tokens)
            if nodes > 0 and depth > 0:
                limits[place] = self._follow(request), nodes, depth
        drafts = self._draft(limits, budget.prices)
        for (place, (shadow, nodes, depth)), draft in zip(limits.items(), drafts, strict=True):
            least = self.config.min_accept_prob
            trees[place] = translate(
                shadow.translation, draft, nodes, depth, least, is_chain=self._is_chain
            )
        return trees

    def _draft(self, limits: dict[int, tuple[Shadow, int, int]], prices: Prices) -> list[DraftTree]:
        """Trees of the draft's tokens, as many as the target's tokens are likely to take."""
        ratios, all_nodes, depths = [], [], []
        for shadow, nodes, depth in limits.values():
            ratio, more = pace(shadow.translation)
            ratios.append(ratio)
            all_nodes.append(math.ceil(nodes * ratio * (SPARE if more else 1)) + more)
            depths.append(math.ceil(depth * ratio) + more)
        requests = [shadow.request for shadow, _, _ in limits.values()]
        if prices.nodes:
            prices = _per_draft_token(prices, list(limits), ratios)
        return self._drafter.propose(requests, DraftBudget(all_nodes, depths, prices))

    def observe(self, request: Request, result: VerifyResult) -> None:
        if request.request_id in self._shadows:
            self._drafter.observe(self._follow(request).request, result)

    def finish(self, request: Request) -> None:
        shadow = self._shadows.pop(request.request_id, None)
        if shadow is not None:
            self._drafter.finish(shadow.request)

    def lag(self, request: Request) -> int:
        shadow = self._shadows.get(request.request_id)
        taken, lag = 0, 0
        if shadow is not None:
            taken = len(shadow.translation.tokens)
            lag = len(shadow.request.token_ids) - self._drafter.num_held(shadow.request)
        return lag + min(len(request.token_ids) - taken, self._limit)

    def context_length(self, request: Request) -> int:
        """The request's length, unless what was translated or read is not the request's."""
        shadow = self._shadows.get(request.request_id)
        if shadow is None:
            return len(request.token_ids)
        taken = shadow.translation.tokens
        if self._drafter.context_length(shadow.request) < len(shadow.request.token_ids):
            return 0
        for at, token in enumerate(taken):
            if at >= len(request.token_ids) or request.token_ids[at] != token:
                return at
        return len(request.token_ids)

    def _follow(self, request: Request) -> Shadow:
        """The request's shadow, brought up to the request's tokens."""
        shadow = self._shadows.get(request.request_id)
        if shadow is None:
            copy = replace(request, token_ids=[], constraint=None, stop_checker=None)
            shadow = Shadow(request, copy, Translation(self._pair, self._limit))
            self._shadows[request.request_id] = shadow
        translation = shadow.translation
        if len(translation.tokens) < len(request.token_ids):
            self._drafter.rewind(shadow.request, translation.update(request.token_ids))
            shadow.request.token_ids = translation.view
        further = math.ceil(request.remaining * translation.ratio) + 1
        shadow.request.max_len = len(translation.view) + further
        return shadow


def pace(translation: Translation) -> tuple[float, int]:
    """Tokens that the draft writes for one of the target, and how many beyond those."""
    return (1.0, 0) if translation.is_direct else (translation.ratio, MORE)


def shadow_config(config: ForwardingConfig) -> ForwardingConfig:
    """How the draft model drafts in its own tokens: as far as any budget may say."""
    return replace(
        config,
        num_speculative_tokens=MAX_SPECULATIVE_TOKENS,
        max_tree_nodes=MAX_TREE_NODES,
        max_branching=max(ALTERNATIVES, config.max_branching),
    )


def _per_draft_token(prices: Prices, places: Sequence[int], ratios: Sequence[float]) -> Prices:
    """What a level of the draft's tokens must promise.

    It brings a share of a token of the target only, so that its price counts for more; and what is
    known of how likely tokens of the target are accepted says so much less about it.
    """

    def estimate(index: int, depth: int, prob: float) -> float:
        share = 1 / ratios[index]
        known = prices.estimate(places[index], math.ceil(depth * share), prob)
        return prob * float((known / prob) ** share)

    mean = sum(ratios) / max(1, len(ratios))
    return Prices(prices.nodes, prices.level * mean, estimate)


@dataclass(slots=True)
class _TranslatedNode:
    """A node of the new tree; ``reached_by`` are the draft's nodes that get to its end."""

    token: int
    parent: int
    depth: int
    reached_by: set[int] = field(default_factory=set)


def translate(
    translation: Translation,
    draft: DraftTree,
    max_nodes: int,
    max_depth: int,
    min_prob: float,
    *,
    is_chain: bool = False,
) -> DraftTree:
    """The target's tree for a draft.

    Args:
        draft: in the draft's vocabulary, below what the translation has it read.
        min_prob: nodes less likely than this to be reached and accepted are left out.
        is_chain: of siblings the likeliest alone is kept.
    """
    if translation.is_direct:
        tokens = [translation.pair.to_target[token] for token in draft.token_ids]
        return replace(draft, token_ids=tokens)
    nodes, probs = _nodes(translation, draft), draft.path_probs()
    tree = DraftTree()
    reached: list[float] = []
    for node in nodes:
        above = 1.0 if node.parent < 0 else reached[node.parent]
        reached.append(min(above, sum(probs[each] for each in sorted(node.reached_by))))
        tree.token_ids.append(node.token)
        tree.parents.append(node.parent)
        tree.accept_probs.append(reached[-1] / above if above > 0.0 else 0.0)
        tree.origins.append(NAME)
    kept: list[int] = []
    for i in sorted(range(len(nodes)), key=lambda i: -reached[i]):
        follows = not is_chain or nodes[i].parent == (kept[-1] if kept else ROOT)
        if follows and reached[i] >= min_prob and nodes[i].depth <= max_depth:
            kept.append(i)
    return tree.select(kept[:max_nodes])


def _nodes(translation: Translation, draft: DraftTree) -> list[_TranslatedNode]:
    """The target's tokens for all paths, one node for the same token below the same node."""
    nodes: list[_TranslatedNode] = []
    index: dict[tuple[int, int], int] = {}
    for path in _paths(draft):
        parent = ROOT
        for depth, (token, reaching) in enumerate(_walk(translation, draft, path), 1):
            at = index.get((parent, token))
            if at is None:
                at = index[parent, token] = len(nodes)
                nodes.append(_TranslatedNode(token, parent, depth))
            nodes[at].reached_by.add(reaching)
            parent = at
    return nodes


def _paths(draft: DraftTree) -> list[list[int]]:
    """The nodes from the root to each leaf."""
    paths = []
    for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = draft.parents[node]
        paths.append(path[::-1])
    return paths


def _walk(translation: Translation, draft: DraftTree, path: list[int]) -> list[tuple[int, int]]:
    """Target tokens of one path, and the draft's node that gets to the end of each."""
    pair = translation.pair
    text, reach, special = b"", [], None
    for node in path:
        piece = pair.draft.piece(draft.token_ids[node])
        if piece is None:
            special = pair.to_target.get(draft.token_ids[node]), node
            break
        text += piece
        reach.append((len(text), node))
    skipped = len(translation.pending)
    rest = translation.continuation(text[skipped:])
    written = rest.ends[-1] if rest.ends else 0
    is_ended = special is not None and written == len(text) - skipped
    count = len(rest.tokens) if is_ended else rest.settled
    steps, at = [], 0
    for token, end in zip(rest.tokens[:count], rest.ends, strict=False):
        while reach[at][0] < end + skipped:
            at += 1
        steps.append((token, reach[at][1]))
    if is_ended and special is not None and special[0] is not None:
        steps.append((special[0], special[1]))
    return steps


GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Shadow:
    """A request as the draft sees it; ``request.token_ids`` is the translation's view."""

    real: Request
    request: Request
    translation: Translation


class ShadowDrafter(DraftModelProposer):
    """A draft model for shadows.

    Args:
        config: how to draft, in tokens of the draft.
        runner: the draft model with a KV cache of its own, without prefix caching.
        pair: its vocabulary and the target's.
        direct_branching: most children of a node that is drafted as a token of the target.
    """

    _draft = Drafter._draft  # its candidates are not ranked by logits alone

    def __init__(
        self,
        config: ForwardingConfig,
        runner: ModelRunner,
        pair: VocabularyPair,
        direct_branching: int,
    ) -> None:
        super().__init__(config, runner)
        self._direct_branching = direct_branching
        self.shadows: dict[int, Shadow] = {}
        self._pair = pair
        self._draft_of = {old: new for new, old in pair.to_target.items()}
        shared = list(self._draft_of.items())
        ids = np.array(shared, np.int64).reshape(-1, 2)
        self._target_ids, self._draft_ids = ids.T

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        logits = self._runner.forward(self._runner.pack(spans)).logits
        head = self._runner.decoder.pruned_head
        if rows and head is not None:
            logits = head.by_token(logits)
        by_row: dict[int, Candidates] = {}
        is_direct = [self._translation(row).is_direct for row in rows]
        for kind, rank in ((True, self._rank_directly), (False, self._rank_texts)):
            at = [i for i, each in enumerate(is_direct) if each is kind]
            if at:
                by_row |= zip(at, rank(logits[at], [rows[i] for i in at]), strict=True)
        return [by_row[i] for i in range(len(rows))]

    def _translation(self, row: SamplingRow) -> Translation:
        return self.shadows[row.request.request_id].translation

    def _rank_directly(self, logits: Floats, rows: Sequence[SamplingRow]) -> Iterable[Candidates]:
        """By the target's rules and noise, among the tokens that both have."""
        whole = np.full((len(logits), len(self._pair.target.pieces)), -np.inf, np.float32)
        whole[:, self._target_ids] = logits[:, self._draft_ids]
        count = self._direct_branching
        rows = [self._real_row(row) for row in rows]
        tokens, scores = rank_candidates(whole, rows, max(count, RANKED))
        estimates = acceptance_estimates(rows, scores)[:, :count]
        for ranked, likely in zip(tokens[:, :count].tolist(), estimates.tolist(), strict=True):
            known = [place for place, token in enumerate(ranked) if token in self._draft_of]
            yield [self._draft_of[ranked[i]] for i in known], [likely[i] for i in known]

    def _real_row(self, row: SamplingRow) -> SamplingRow:
        real = self.shadows[row.request.request_id].real
        path = [self._pair.to_target[token] for token in row.path]
        return SamplingRow(real, path, row.params, grammar_mask(real, path))

    def _rank_texts(self, logits: Floats, rows: Sequence[SamplingRow]) -> Iterable[Candidates]:
        """By the draft's own logits, among the tokens that write what has to be written."""
        count = self.config.tree_branching
        plain = [SamplingRow(row.request, row.path, GREEDY, self._mask(row)) for row in rows]
        tokens, scores = rank_candidates(logits, plain, max(count, RANKED))
        # The target draws its token without regard to this order, the more evenly the hotter.
        heat = np.asarray([max(1.0, row.sampling.temperature / LOGIT_BLUR) for row in rows])
        estimates = acceptance_estimates(plain, scores / heat[:, None])[:, :count]
        return zip(tokens[:, :count].tolist(), estimates.tolist(), strict=True)

    def _mask(self, row: SamplingRow) -> bytes:
        written = self._pair.draft.written(row.path)
        return self._pair.mask(self._translation(row).pending[len(written) :])
