"""Runs the proposers of one engine and contains their failures. Knows no particular proposer.

A proposer that raises or returns something that is not a tree loses that step's draft, starts over
with the requests concerned, and is switched off after :data:`MAX_FAILURES` failures in a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.config import SpeculativeConfig
from paceline.errors import ProposerError
from paceline.metrics import EngineStats
from paceline.policy.planner import DraftLimits
from paceline.proposers.base import DraftBudget, Proposer, merge
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

log = logging.getLogger(__name__)
MAX_FAILURES = 3
ENOUGH_TOKENS = 1.0
NOTHING = DraftLimits(0, 0)


@dataclass(slots=True)
class _Entry:
    proposer: Proposer
    failures: int = 0

    @property
    def config(self) -> SpeculativeConfig:
        return self.proposer.config


class Drafting:
    """The proposers that are on."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        vocab_size: int,
        stats: Callable[[], EngineStats],
    ) -> None:
        self._vocab_size = vocab_size
        self._stats = stats
        self._past_forwards = 0
        self._entries: list[_Entry] = []
        self._widest: dict[tuple[str, ...] | None, DraftLimits] = {}
        self.replace(proposers)

    def replace(self, proposers: Sequence[Proposer]) -> None:
        """Let other proposers draft from now on; the free ones are asked first."""
        self._past_forwards = self.num_forwards
        free_first = sorted(proposers, key=lambda proposer: proposer.costs_forwards)
        self._entries = [_Entry(proposer) for proposer in free_first]
        self._widest.clear()

    @property
    def is_on(self) -> bool:
        return bool(self._entries)

    @property
    def proposers(self) -> list[Proposer]:
        return [entry.proposer for entry in self._entries]

    @property
    def num_forwards(self) -> int:
        """Draft model forwards, those of proposers that are off by now included."""
        return self._past_forwards + sum(map(_forwards, self.proposers))

    def limits(self, request: Request) -> DraftLimits:
        """What a request may draft in this step, over all proposers."""
        wish = request.params.speculative
        widest = (
            self._limits_of(tuple(wish.methods) if wish.methods is not None else None)
            if wish.enabled
            else NOTHING
        )
        # The bonus token is always emitted, so one of the remaining tokens needs no draft.
        depth = min(widest.max_depth, request.remaining - 1)
        if wish.num_speculative_tokens is not None:
            depth = min(depth, wish.num_speculative_tokens)
        if depth == widest.max_depth:
            return widest
        return replace(widest, max_depth=depth) if depth > 0 else NOTHING

    def _limits_of(self, methods: tuple[str, ...] | None) -> DraftLimits:
        """The widest limits of the proposers of some methods, or of all; computed once."""
        known = self._widest.get(methods)
        if known is None:
            configs = [
                e.config for e in self._entries if methods is None or e.config.method in methods
            ]
            known = NOTHING
            if configs:
                known = DraftLimits(
                    max(c.tree_nodes for c in configs),
                    max(c.num_speculative_tokens for c in configs),
                    min(c.min_accept_prob for c in configs),
                )
            self._widest[methods] = known
        return known

    def propose(
        self, requests: Sequence[Request], limits: Sequence[DraftLimits]
    ) -> list[DraftTree]:
        """One merged tree per request.

        Proposers that cost nothing draft first; one that costs forwards is not asked where they
        have found enough already.
        """
        drafts: list[list[DraftTree]] = [[] for _ in requests]
        for entry in list(self._entries):
            chosen = [
                i
                for i, request in enumerate(requests)
                if _wants(request, entry.config)
                and not (entry.proposer.costs_forwards and _is_enough(drafts[i]))
            ]
            if not chosen:
                continue
            trees = self._ask(entry, [requests[i] for i in chosen], [limits[i] for i in chosen])
            for index, tree in zip(chosen, trees, strict=True):
                drafts[index].append(tree)
        return [trees[0] if len(trees) == 1 else merge(trees) for trees in drafts]

    def _ask(
        self, entry: _Entry, requests: list[Request], limits: list[DraftLimits]
    ) -> list[DraftTree]:
        budget = DraftBudget(
            [min(limit.max_nodes, entry.config.tree_nodes) for limit in limits],
            [min(limit.max_depth, entry.config.num_speculative_tokens) for limit in limits],
        )
        try:
            trees = entry.proposer.propose(requests, budget)
            if len(trees) != len(requests):
                raise ProposerError(f"{len(trees)} trees for {len(requests)} requests")
            for tree in trees:
                if len(tree):
                    tree.validate(self._vocab_size)
        except Exception as error:
            self._failed(entry, requests, error)
            return [DraftTree() for _ in requests]
        entry.failures = 0
        return trees

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Tell every proposer what was committed, whoever proposed it."""
        for entry in list(self._entries):
            try:
                entry.proposer.observe(request, result)
            except Exception as error:
                self._failed(entry, [request], error)

    def finish(self, request: Request) -> None:
        """Let every proposer forget a request."""
        for entry in list(self._entries):
            try:
                entry.proposer.finish(request)
            except Exception as error:
                self._failed(entry, [], error)

    def _failed(self, entry: _Entry, requests: Sequence[Request], error: Exception) -> None:
        entry.failures += 1
        self._stats().num_proposer_failures += 1
        name = entry.proposer.name
        log.warning("proposer %s failed; the step goes on without its draft: %r", name, error)
        for request in requests:
            try:
                entry.proposer.finish(request)
            except Exception as again:
                log.warning("proposer %s failed to forget a request: %r", name, again)
        if entry.failures >= MAX_FAILURES and entry in self._entries:
            self._entries.remove(entry)
            self._past_forwards += _forwards(entry.proposer)
            self._widest.clear()
            log.error("proposer %s failed %d times in a row and is off", name, MAX_FAILURES)


def _forwards(proposer: Proposer) -> int:
    count: int = getattr(proposer, "num_forwards", 0)
    return count


def _is_enough(trees: Sequence[DraftTree]) -> bool:
    """Whether drafts are expected to bring so many tokens that a further one would not pay."""
    return any(sum(tree.path_probs()) >= ENOUGH_TOKENS for tree in trees)


def _wants(request: Request, config: SpeculativeConfig) -> bool:
    methods = request.params.speculative.methods
    return methods is None or config.method in methods
