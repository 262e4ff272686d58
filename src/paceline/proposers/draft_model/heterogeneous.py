"""Drafts by a model of another vocabulary. Owns no text and no KV: it joins those who do.

For each request a shadow is kept: a request whose tokens are the draft's, for the same text
(:mod:`paceline.proposers.draft_model.translation`). An ordinary draft model drafts for the shadows,
and its trees are translated back (:mod:`paceline.proposers.draft_model.tree_translation`).

Where the vocabularies are close and the text ends in the same tokens on both sides, the tokens that
both have are drafted as those of the target: ranked by its rules and with its noise. Elsewhere a
token of the draft is none that the target samples, so that its noise, penalties and grammar say
nothing about it; the draft then ranks by its own logits.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (2025), for matching texts and for the common tokens; masks for what has
still to be written, and trees, are not from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.config.speculative import MAX_SPECULATIVE_TOKENS, MAX_TREE_NODES, ForwardingConfig
from paceline.planner.drafts import Prices
from paceline.proposers.base import DraftBudget, Proposer
from paceline.proposers.draft_model.proposer import NAME
from paceline.proposers.draft_model.shadows import Shadow, ShadowDrafter
from paceline.proposers.draft_model.translation import Translation
from paceline.proposers.draft_model.tree_translation import translate
from paceline.proposers.draft_model.vocabulary import VocabularyPair
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree

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
