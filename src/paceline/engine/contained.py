"""The proposers of one engine, their failures contained. Knows no planner, and no one proposer.

A proposer that raises or returns something that is not a tree loses that step's draft, starts over
with the requests concerned, and is switched off after :data:`MAX_FAILURES` failures in a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.config import SpeculativeConfig
from paceline.engine.planners import is_sound
from paceline.errors import ProposerError
from paceline.metrics import EngineStats
from paceline.policy.planner import DraftLimits, Source
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

log = logging.getLogger(__name__)
MAX_FAILURES = 3
NOTHING = DraftLimits(0, 0)


@dataclass(slots=True)
class Entry:
    """A proposer that may draft, and its description for planners."""

    proposer: Proposer
    source: Source = field(init=False)
    failures: dict[str, int] = field(default_factory=dict)  # in a row, by what was asked of it

    def __post_init__(self) -> None:
        self.source = source_of(self.proposer)

    @property
    def config(self) -> SpeculativeConfig:
        return self.proposer.config

    @property
    def num_forwards(self) -> int:
        return self.proposer.num_forwards


class ContainedProposers:
    """See the module's docstring.

    Attributes:
        entries: the proposers that may draft, in the order in which they are asked. A change makes
            another list, so that a loop over the old one may switch proposers off.
    """

    def __init__(self, vocab_size: int, stats: Callable[[], EngineStats]) -> None:
        self.entries: list[Entry] = []
        self._vocab_size = vocab_size
        self._stats = stats
        self._past_forwards = 0
        self._off: set[str] = set()  # names of proposers that failed too often
        self._widest: dict[tuple[tuple[str, ...] | None, bool], DraftLimits] = {}

    @property
    def num_forwards(self) -> int:
        """Draft model forwards, those of proposers that are off by now included."""
        return self._past_forwards + sum(entry.num_forwards for entry in self.entries)

    def replace(self, proposers: Sequence[Proposer]) -> None:
        """Replace all proposers; those without forwards are asked first."""
        self._past_forwards = self.num_forwards
        free_first = sorted(proposers, key=lambda proposer: proposer.costs_forwards)
        self.entries = [Entry(proposer) for proposer in free_first]
        self._off.clear()
        self._widest.clear()

    def join(self, proposer: Proposer) -> bool:
        """Add a proposer, which is asked before the others.

        Returns:
            False if a proposer of the same name was switched off: the name stays off until all
            proposers are replaced.
        """
        if proposer.name in self._off:
            return False
        self.entries = [Entry(proposer), *self.entries]
        self._widest.clear()
        return True

    def widest(self, methods: tuple[str, ...] | None, is_constrained: bool) -> DraftLimits:
        """The widest limits of the proposers of some methods, or of all; computed once."""
        known = self._widest.get((methods, is_constrained))
        if known is None:
            configs = [
                config
                for config in (entry.config for entry in self.entries)
                if _is_for(config, methods, is_constrained)
            ]
            known = NOTHING
            if configs:
                known = DraftLimits(
                    max(c.tree_nodes for c in configs),
                    max(c.num_speculative_tokens for c in configs),
                    min(c.min_accept_prob for c in configs),
                )
            self._widest[methods, is_constrained] = known
        return known

    def propose(
        self, entry: Entry, requests: Sequence[Request], budget: DraftBudget
    ) -> list[DraftTree]:
        """The drafts of one proposer: valid trees with estimates in 0..1, one per request."""
        try:
            trees = entry.proposer.propose(requests, budget)
            if len(trees) != len(requests):
                raise ProposerError(f"{len(trees)} trees for {len(requests)} requests")
            found = [
                self._checked(entry, request, tree) if tree.token_ids else tree
                for request, tree in zip(requests, trees, strict=True)
            ]
        except Exception as error:
            self._failed(entry, "propose", requests, error)
            return [DraftTree() for _ in requests]
        entry.failures.pop("propose", None)
        return found

    def _checked(self, entry: Entry, request: Request, tree: DraftTree) -> DraftTree:
        """The part of a draft that the request's grammar allows, checked to be a tree.

        Raises:
            ProposerError: the draft is not a tree.
        """
        if not is_sound(tree, self._vocab_size):
            tree.validate(self._vocab_size)
            self._clamp(entry, tree)
        if request.constraint is None or entry.config.needs_constraint:
            return tree
        return _legal(request, tree)

    def _clamp(self, entry: Entry, tree: DraftTree) -> None:
        count = tree.clamp_probs()
        if count:
            stats = self._stats()
            if not stats.num_clamped_estimates:
                log.warning(
                    "proposer %s estimates probabilities outside of 0..1: they are clamped, and "
                    "counted from here on",
                    entry.proposer.name,
                )
            stats.num_clamped_estimates += count

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Tell all proposers which tokens were committed, whichever of them drafted."""
        for entry in self.entries:
            try:
                entry.proposer.observe(request, result)
                entry.failures.pop("observe", None)
            except Exception as error:
                self._failed(entry, "observe", [request], error)

    def finish(self, request: Request) -> None:
        """Let all proposers forget a request."""
        for entry in self.entries:
            try:
                entry.proposer.finish(request)
                entry.failures.pop("finish", None)
            except Exception as error:
                self._failed(entry, "finish", [], error)

    def _failed(
        self, entry: Entry, call: str, requests: Sequence[Request], error: Exception
    ) -> None:
        failures = entry.failures[call] = entry.failures.get(call, 0) + 1
        self._stats().num_proposer_failures += 1
        name = entry.proposer.name
        log.warning("proposer %s failed; the step goes on without its draft: %r", name, error)
        for request in requests:
            try:
                entry.proposer.finish(request)
            except Exception as again:
                log.warning("proposer %s failed to forget a request: %r", name, again)
        if failures >= MAX_FAILURES and entry in self.entries:
            self.entries = [each for each in self.entries if each is not entry]
            self._off.add(name)
            self._past_forwards += entry.num_forwards
            self._widest.clear()
            log.error("proposer %s failed %d times in a row and is off", name, MAX_FAILURES)


def source_of(proposer: Proposer) -> Source:
    """A proposer as planners know it."""
    return Source(
        proposer.name,
        proposer.costs_forwards,
        proposer.lag,
        _applies(proposer.config),
        proposer.costs_levels,
    )


def _applies(config: SpeculativeConfig) -> Callable[[Request], bool]:
    """Whether proposers of a configuration may serve a request at all."""

    def applies(request: Request) -> bool:
        methods = request.params.speculative.methods
        return _is_for(config, methods, request.constraint is not None)

    return applies


def _is_for(config: SpeculativeConfig, methods: Sequence[str] | None, is_constrained: bool) -> bool:
    """Whether a request allows this method, and has the data that the method drafts from."""
    if config.needs_constraint and not is_constrained:
        return False
    return methods is None or config.method in methods


def _legal(request: Request, tree: DraftTree) -> DraftTree:
    """The part of a draft that the request's grammar allows."""
    assert request.constraint is not None
    try:
        return request.constraint.legal(tree)
    except Exception as error:  # verification meets it too, and fails the request
        log.debug("request %d: its grammar failed: %r", request.request_id, error)
        return DraftTree()
