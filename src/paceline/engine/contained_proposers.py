"""The proposers of one engine, their failures contained. Knows no planner, and no one proposer.

A proposer that raises or returns something that is not a tree loses that step's draft, starts over
with the requests concerned, and is switched off after :data:`MAX_FAILURES` failures in a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from paceline.config import SpeculativeConfig
from paceline.core.errors import ProposerError
from paceline.engine.step import NO_LIMITS
from paceline.planner.choice import DraftLimits
from paceline.planner.drafts import Drafts, Member, Prices, TextDrafter
from paceline.planner.planner import is_sound
from paceline.planner.value import Source
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.engine_stats import EngineStats
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree
from paceline.tensors.arrays import Floats

log = logging.getLogger(__name__)
MAX_FAILURES = 3
ENOUGH_FROM_TEXT = 1.5
"""Expected tokens of a request's drafts at which no other proposer looks into its text."""


@dataclass(slots=True)
class Entry:
    """A proposer that may draft."""

    proposer: Proposer
    failures: dict[str, int] = field(default_factory=dict)  # in a row, by what was asked of it
    followed: set[int] = field(default_factory=set)
    """Requests of which it reads what the latest forward computed."""
    config: SpeculativeConfig = field(init=False)
    most: tuple[int, int] = field(init=False)
    """Nodes and depth of its trees."""
    is_for: Callable[[Request], bool] = field(init=False)
    """Whether it may serve a request at all."""

    def __post_init__(self) -> None:
        self.config = self.proposer.config
        self.most = self.config.tree_nodes, self.config.num_speculative_tokens
        self.is_for = AppliesTo([self.config])

    @property
    def num_forwards(self) -> int:
        return self.proposer.num_forwards

    @property
    def sees_matches(self) -> bool:
        return getattr(self.proposer, "sees_matches", False)


@dataclass(slots=True)
class Group:
    """What planners know as one source: a proposer, or all that draft from texts."""

    entries: list[Entry]
    source: Source

    @property
    def num_forwards(self) -> int:
        return sum([entry.num_forwards for entry in self.entries])


class Call(NamedTuple):
    """A source that is asked for drafts in a step."""

    group: Group
    requests: Sequence[Request]  # for which it is asked
    indices: Sequence[int]  # of these in the step
    limits: Sequence[DraftLimits]  # of each of these
    prices: Prices
    drafts: Drafts  # of the step; what it drafts is added to them


class WidestLimits(dict[tuple[Sequence[str] | None, bool], DraftLimits]):
    """The widest limits of the proposers of some methods, or of all; computed once.

    The keys are the methods that a request allows and whether it has a grammar.
    """

    def __init__(self, configs: Sequence[SpeculativeConfig]) -> None:
        self._configs = configs

    def __missing__(self, key: tuple[Sequence[str] | None, bool]) -> DraftLimits:
        methods, is_constrained = key
        configs = [
            config
            for config in self._configs
            if (is_constrained or not config.needs_constraint)
            and (methods is None or config.method in methods)
        ]
        limits = NO_LIMITS
        if configs:
            limits = DraftLimits(
                max(c.tree_nodes for c in configs),
                max(c.num_speculative_tokens for c in configs),
                min(c.min_accept_prob for c in configs),
            )
        self[key] = limits
        return limits


class ContainedProposers:
    """All proposers of an engine, asked so that none can fail a step.

    Attributes:
        entries: the proposers that may draft, in the order in which they are asked.
        readers: those of them that read hidden states of the target.
        learners: those of them that learn from what was committed.
        widest: what each request may draft at most.
        groups: the same as planners know them. A change makes other lists, so that a loop over the
            old ones may switch proposers off.
    """

    def __init__(self, vocab_size: int, stats: EngineStats) -> None:
        self.entries: list[Entry] = []
        self.groups: list[Group] = []
        self.readers: list[Entry] = []
        self.learners: list[Entry] = []
        self.widest = WidestLimits(())
        self._together = True
        self._vocab_size = vocab_size
        self._stats = stats
        self._past_forwards = 0
        self._off: set[str] = set()  # names of proposers that failed too often

    @property
    def num_forwards(self) -> int:
        """Draft model forwards, those of proposers that are off by now included."""
        return self._past_forwards + sum(entry.num_forwards for entry in self.entries)

    def replace(self, proposers: Sequence[Proposer], together: bool = True) -> None:
        """Replace all proposers; those without forwards are asked first.

        Args:
            together: those that draft from texts are one source.
        """
        self._past_forwards = self.num_forwards
        self._together = together
        free_first = sorted(proposers, key=lambda proposer: proposer.costs_forwards)
        self._off.clear()
        self._let_draft([Entry(proposer) for proposer in free_first])

    def _let_draft(self, entries: list[Entry]) -> None:
        """These and no others draft from now on."""
        texts = [entry for entry in entries if self._together and entry.proposer.drafts_from_text]
        parts = [texts if entry in texts else [entry] for entry in entries]
        self.entries = entries
        self.groups = [
            Group(part, source_of(part))
            for entry, part in zip(entries, parts, strict=True)
            if part[0] is entry  # a part stands where its first entry does
        ]
        self.readers = [entry for entry in entries if entry.proposer.taps]
        self.learners = [entry for entry in entries if _learns(entry.proposer)]
        self.widest = WidestLimits([entry.config for entry in entries])

    def join(self, proposer: Proposer) -> bool:
        """Add a proposer, which is asked before the others.

        Returns:
            False if a proposer of the same name was switched off: the name stays off until all
            proposers are replaced.
        """
        if proposer.name in self._off:
            return False
        self._let_draft([Entry(proposer), *self.entries])
        return True

    def propose(self, call: Call) -> None:
        """Add the drafts of a source: valid trees with estimates in 0..1."""
        entries = call.group.entries
        has_grammars = any(map(attrgetter("constraint"), call.requests))
        if entries[0].proposer.drafts_from_text and not has_grammars:
            self._contained(entries, call, self._draft_texts, call)
        else:
            for entry in entries:
                self._contained([entry], call, self._ask, entry, call)

    def _contained(
        self, entries: Sequence[Entry], call: Call, ask: Callable[..., None], *arguments: object
    ) -> None:
        """Ask proposers for drafts; of several it is unknown whose fault a failure is."""
        try:
            ask(*arguments)
        except Exception as error:
            if len(entries) == 1:
                self._failed(entries[0], "propose", call.requests, error)
            else:
                self._separate(entries, call.requests, error)
            return
        for entry in entries:
            if entry.failures:
                entry.failures.pop("propose", None)

    def _separate(
        self, entries: Sequence[Entry], requests: Sequence[Request], error: Exception
    ) -> None:
        """From now on ask each of some proposers by itself, so that only the culprit fails."""
        self._stats.num_proposer_failures += 1
        log.warning("proposers failed and are asked one by one from now on: %r", error)
        for entry in entries:
            self._forget(entry, requests)
        self._together = False
        self._let_draft(self.entries)

    def _draft_texts(self, call: Call) -> None:
        requests, entries = call.requests, call.group.entries
        members: list[Member] = []
        are_chosen = any(map(attrgetter("params.speculative.methods"), requests))
        for entry in entries:
            drafters = entry.proposer.drafters(requests)
            able: Sequence[TextDrafter | None] = drafters
            if are_chosen:
                pairs = zip(requests, drafters, strict=True)
                able = [drafter if entry.is_for(each) else None for each, drafter in pairs]
            members.append((entry.proposer.name, *entry.most, able))
        call.drafts.draft(
            call.group.source.name,
            call.indices,
            [*map(attrgetter("token_ids"), requests)],
            call.limits,
            members,
            ENOUGH_FROM_TEXT,
            self._vocab_size,
        )

    def _ask(self, entry: Entry, call: Call) -> None:
        requests, source = call.requests, call.group.source
        most_nodes, most_depth = entry.most
        nodes = [min(most_nodes, limit.max_nodes) for limit in call.limits]
        depths = [min(most_depth, limit.max_depth) for limit in call.limits]
        trees = entry.proposer.propose(requests, DraftBudget(nodes, depths, call.prices))
        if len(trees) != len(requests):
            raise ProposerError(f"{len(trees)} trees for {len(requests)} requests")
        for index, request, tree in zip(call.indices, requests, trees, strict=True):
            if tree.token_ids and entry.is_for(request):
                call.drafts.add(index, source.name, self._checked(entry, request, tree))

    def _checked(self, entry: Entry, request: Request, tree: DraftTree) -> DraftTree:
        """The part of a draft that the request's grammar allows, checked to be a tree."""
        if not is_sound(tree, self._vocab_size):
            tree.validate(self._vocab_size)
            self._clamp(entry, tree)
        if request.constraint is None or entry.config.needs_constraint:
            return tree
        return _legal(request, tree)

    def _clamp(self, entry: Entry, tree: DraftTree) -> None:
        count = tree.clamp_probs()
        if count:
            stats = self._stats
            if not stats.num_clamped_estimates:
                log.warning(
                    "proposer %s estimates probabilities outside of 0..1: they are clamped, and "
                    "counted from here on",
                    entry.proposer.name,
                )
            stats.num_clamped_estimates += count

    def taps_of(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Hidden states of the target that proposers will read of any of these requests."""
        taps = set[int]()
        for entry in self.readers:
            try:
                follows = entry.proposer.follows
                entry.followed = {
                    request.request_id
                    for request in requests
                    if entry.is_for(request) and follows(request)
                }
            except Exception as error:
                entry.followed = set()
                self._failed(entry, "read", requests, error)
            if entry.followed:
                taps.update(entry.proposer.taps)
        return tuple(sorted(taps))

    def read(self, request: Request, start: int, features: Floats, taps: Sequence[int]) -> None:
        """Hand hidden states of committed positions to the proposers that read such."""
        for entry in self.readers:
            if request.request_id not in entry.followed:
                continue
            own = entry.proposer.taps
            try:
                given = features
                if own != taps:
                    chosen = [taps.index(tap) for tap in own]
                    given = features[:, chosen]
                entry.proposer.read(request, start, given)
                entry.failures.pop("read", None)
            except Exception as error:
                self._failed(entry, "read", [request], error)

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Tell all proposers that learn which tokens were committed, whichever of them drafted."""
        for entry in self.learners:
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
        self._stats.num_proposer_failures += 1
        name = entry.proposer.name
        log.warning("proposer %s failed; the step goes on without its draft: %r", name, error)
        self._forget(entry, requests)
        if failures >= MAX_FAILURES and entry in self.entries:
            self._off.add(name)
            self._past_forwards += entry.num_forwards
            self._let_draft([other for other in self.entries if other is not entry])
            log.error("proposer %s failed %d times in a row and is off", name, MAX_FAILURES)

    def _forget(self, entry: Entry, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                entry.proposer.finish(request)
            except Exception as error:
                name = entry.proposer.name
                log.warning("proposer %s failed to forget a request: %r", name, error)


def source_of(entries: Sequence[Entry]) -> Source:
    """Proposers as planners know them: one that stands for all."""
    proposer = entries[0].proposer
    seeing = [entry.proposer for entry in entries if entry.sees_matches]
    return Source(
        " + ".join([entry.proposer.name for entry in entries]),
        proposer.costs_forwards,
        proposer.lag,
        AppliesTo([entry.config for entry in entries]),
        proposer.costs_levels,
        seeing[0].matched if seeing else None,
    )


class AppliesTo:
    """Whether any proposer of some configurations may serve a request at all.

    Equal configurations make it equal, so that a source can be recognised.
    """

    def __init__(self, configs: Sequence[SpeculativeConfig]) -> None:
        self._configs, self._widest = list(configs), WidestLimits(configs)

    def __call__(self, request: Request) -> bool:
        key = request.params.speculative.methods, request.constraint is not None
        return self._widest[key] is not NO_LIMITS

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AppliesTo) and self._configs == other._configs

    def __hash__(self) -> int:
        return hash(tuple(config.method for config in self._configs))


def _learns(proposer: Proposer) -> bool:
    return getattr(type(proposer), "observe", None) is not Proposer.observe


def _legal(request: Request, tree: DraftTree) -> DraftTree:
    """The part of a draft that the request's grammar allows."""
    assert request.constraint is not None
    try:
        return request.constraint.legal(tree)
    except Exception as error:  # verification meets it too, and fails the request
        log.debug("request %d: its grammar failed: %r", request.request_id, error)
        return DraftTree()
