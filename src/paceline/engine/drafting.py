"""Runs the proposers of one engine and contains their failures. Knows no particular proposer.

A proposer that raises or returns something that is not a tree loses that step's draft, starts over
with the requests concerned, and is switched off after :data:`MAX_FAILURES` failures in a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.engine.scheduler import Scheduled
from paceline.errors import ProposerError
from paceline.metrics import EngineStats
from paceline.policy.cost_points import StepShape
from paceline.policy.planner import DraftLimits, Planner, Source, StepReport
from paceline.proposers.base import DraftBudget, Proposer, merge
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

log = logging.getLogger(__name__)
MAX_FAILURES = 3
NOTHING = DraftLimits(0, 0)


@dataclass(slots=True)
class _Entry:
    proposer: Proposer
    source: Source
    failures: dict[str, int] = field(default_factory=dict)  # in a row, by what was asked of it

    @property
    def config(self) -> SpeculativeConfig:
        return self.proposer.config


@dataclass(slots=True)
class Draft:
    """What was drafted for one request of a step, and what it may use of it."""

    item: Scheduled
    limits: DraftLimits
    tree: DraftTree


class Drafting:
    """The proposers that are on, and the planner that decides who of them drafts."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        planner: Planner,
        vocab_size: int,
        stats: Callable[[], EngineStats],
    ) -> None:
        self.planner = planner
        self._is_active = False
        self._vocab_size = vocab_size
        self._stats = stats
        self._past_forwards = 0
        self._off: set[str] = set()  # names of proposers that failed too often
        self._entries: list[_Entry] = []
        self._widest: dict[tuple[tuple[str, ...] | None, bool], DraftLimits] = {}
        self.replace(proposers)

    def replace(self, proposers: Sequence[Proposer]) -> None:
        """Let other proposers draft from now on; the free ones are asked first."""
        self._past_forwards = self.num_forwards
        free_first = sorted(proposers, key=lambda proposer: proposer.costs_forwards)
        self._entries = [_Entry(proposer, _source(proposer)) for proposer in free_first]
        self._off.clear()
        self._tell_planner()

    def join(self, proposer: Proposer) -> None:
        """Let one more proposer draft, asked before the others; what was learnt of them stays.

        One of that name that was switched off stays so until all are replaced.
        """
        if proposer.name in self._off:
            return
        self._entries.insert(0, _Entry(proposer, _source(proposer)))
        self._tell_planner()

    def _tell_planner(self) -> None:
        self._guarded(self.planner.set_sources, [entry.source for entry in self._entries])
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
            self._limits_of(
                tuple(wish.methods) if wish.methods is not None else None,
                request.constraint is not None,
            )
            if wish.enabled
            else NOTHING
        )
        # The bonus token is always emitted, so one of the remaining tokens needs no draft.
        depth = min(widest.max_depth, request.remaining - 1)
        is_forced = wish.num_speculative_tokens is not None
        if wish.num_speculative_tokens is not None:
            depth = min(depth, wish.num_speculative_tokens)
        if depth == widest.max_depth and not is_forced:
            return widest
        return replace(widest, max_depth=depth, is_forced=is_forced) if depth > 0 else NOTHING

    def _limits_of(self, methods: tuple[str, ...] | None, is_constrained: bool) -> DraftLimits:
        """The widest limits of the proposers of some methods, or of all; computed once."""
        known = self._widest.get((methods, is_constrained))
        if known is None:
            configs = [
                config
                for config in (entry.config for entry in self._entries)
                if (methods is None or config.method in methods)
                and (is_constrained or not config.needs_constraint)
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
        self, items: Sequence[Scheduled], shape: StepShape, node_budget: int
    ) -> list[Draft]:
        """A merged tree for every request that may draft; empty when nothing was drafted.

        Args:
            shape: of the step without drafts.
            node_budget: most draft nodes that the step has room for.
        """
        self._is_active = False  # also if what follows raises
        if not self._entries or node_budget <= 0:
            return []
        requests = [item.request for item in items if item.may_draft]
        if not requests or not self.planner.begin(shape, requests):
            return []
        self._is_active = True
        limits = [self.limits(request) for request in requests]
        trees = self._merged(requests, limits)
        able = [item for item in items if item.may_draft]
        drafts = [Draft(*each) for each in zip(able, limits, trees, strict=True)]
        return drafts if any(map(len, trees)) else []

    def choose(self, drafts: Sequence[Draft], node_budget: int) -> list[DraftTree]:
        """The part of each draft that is verified."""
        trees, limits = [d.tree for d in drafts], [d.limits for d in drafts]
        return self.planner.choose(trees, limits, node_budget)

    def pad(
        self,
        items: Sequence[Scheduled],
        shape: StepShape,
        most_rows: int,
        reserve: Callable[[int, int], bool],
    ) -> bool:
        """Widen a step by rows that nobody looks at where it then takes less time.

        Args:
            shape: of the step, draft nodes included.
            most_rows: of any step.
            reserve: KV slots of a request for so many rows; False where there are not enough.

        Returns:
            Whether it is wider, by the padding of one of its items.
        """
        if not self._entries:
            return False
        count = self.planner.padding(shape, most_rows - shape.rows)
        if not count:
            return False
        # It attends to as little as possible.
        item = min(items, key=lambda item: item.request.num_computed)
        if not reserve(item.request.request_id, 1 + len(item.draft) + count):
            return False
        item.padding = count
        return True

    def _merged(
        self, requests: Sequence[Request], limits: Sequence[DraftLimits]
    ) -> list[DraftTree]:
        """One tree per request, of the proposers that the planner asks, free ones first."""
        drafts: list[list[DraftTree]] = [[] for _ in requests]
        for entry in list(self._entries):
            able = [
                i
                for i, request in enumerate(requests)
                if limits[i].max_nodes and entry.source.applies(request)
            ]
            chosen = self.planner.ask(entry.source, able, drafts) if able else []
            if not chosen:
                continue
            nodes = [min(limits[i].max_nodes, entry.config.tree_nodes) for i in chosen]
            depth = [min(limits[i].max_depth, entry.config.num_speculative_tokens) for i in chosen]
            prices = self.planner.prices(entry.source, chosen, sum(nodes))
            budget = DraftBudget(nodes, depth, prices)
            began, forwards = time.perf_counter(), _forwards(entry.proposer)
            trees = self._ask(entry, [requests[i] for i in chosen], budget)
            milliseconds = (time.perf_counter() - began) * 1e3
            if entry.source.costs_forwards and _forwards(entry.proposer) == forwards:
                milliseconds = 0.0  # it declined, which says nothing of its times
            self.planner.drafted(entry.source, chosen, trees, milliseconds)
            for index, tree in zip(chosen, trees, strict=True):
                drafts[index].append(tree)
        return [trees[0] if len(trees) == 1 else merge(trees) for trees in drafts]

    def _ask(self, entry: _Entry, requests: list[Request], budget: DraftBudget) -> list[DraftTree]:
        try:
            trees = entry.proposer.propose(requests, budget)
            if len(trees) != len(requests):
                raise ProposerError(f"{len(trees)} trees for {len(requests)} requests")
            for index, tree in enumerate(trees):
                if len(tree):
                    tree.validate(self._vocab_size)
                    self._clamp(entry, tree)
                    if requests[index].constraint is not None and not entry.config.needs_constraint:
                        trees[index] = _legal(requests[index], tree)
        except Exception as error:
            self._failed(entry, "propose", requests, error)
            return [DraftTree() for _ in requests]
        entry.failures.pop("propose", None)
        return trees

    def _clamp(self, entry: _Entry, tree: DraftTree) -> None:
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
        """Tell the planner and every proposer what was committed, whoever proposed it.

        While nobody drafts they are not told; a proposer catches up when it is asked again.
        """
        if not self._is_active:
            return
        self._guarded(self.planner.observe, request, result)
        for entry in list(self._entries):
            try:
                entry.proposer.observe(request, result)
                entry.failures.pop("observe", None)
            except Exception as error:
                self._failed(entry, "observe", [request], error)

    def end(
        self,
        items: Sequence[Scheduled],
        shape: StepShape,
        emitted: int,
        forward_ms: float,
        total_ms: float,
    ) -> None:
        """Tell the planner what the step as a whole took and brought."""
        if not self._entries:
            return
        decoding = padding = 0
        if shape.rows == shape.samples == len(items):  # all decode, and nobody drafted
            decoding, items = len(items), ()
        for item in items:
            if item.may_draft:
                decoding += 1
                padding += item.padding
            elif item.samples:
                emitted -= 1  # a prompt's first token
        report = StepReport(shape, forward_ms, total_ms, decoding, emitted, padding)
        try:
            self.planner.end(report)
        except Exception as error:
            _warn(error)

    def end_request(self, request: Request) -> None:
        """Let planner and proposers forget a request that ended."""
        self._guarded(self.planner.finish, request)
        self.finish(request)

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """A planner that fails costs what it would have learnt, nothing else."""
        try:
            call(*arguments)
        except Exception as error:
            _warn(error)

    def finish(self, request: Request) -> None:
        """Let every proposer forget a request."""
        for entry in list(self._entries):
            try:
                entry.proposer.finish(request)
                entry.failures.pop("finish", None)
            except Exception as error:
                self._failed(entry, "finish", [], error)

    def _failed(
        self, entry: _Entry, call: str, requests: Sequence[Request], error: Exception
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
        if failures >= MAX_FAILURES and entry in self._entries:
            self._entries.remove(entry)
            self._off.add(name)
            self._past_forwards += _forwards(entry.proposer)
            self._widest.clear()
            log.error("proposer %s failed %d times in a row and is off", name, MAX_FAILURES)


def _warn(error: Exception) -> None:
    log.warning("the planner failed and goes on without: %r", error)


def _source(proposer: Proposer) -> Source:
    lag = getattr(proposer, "lag", lambda request: 0)
    applies = partial(_wants, config=proposer.config)
    costs_levels = getattr(proposer, "costs_levels", True)
    return Source(proposer.name, proposer.costs_forwards, lag, applies, costs_levels)


def _forwards(proposer: Proposer) -> int:
    count: int = getattr(proposer, "num_forwards", 0)
    return count


def _wants(request: Request, config: SpeculativeConfig) -> bool:
    if config.needs_constraint and request.constraint is None:
        return False
    methods = request.params.speculative.methods
    return methods is None or config.method in methods


def _legal(request: Request, tree: DraftTree) -> DraftTree:
    """What the request's grammar leaves of a draft."""
    assert request.constraint is not None
    try:
        return request.constraint.legal(tree)
    except Exception as error:  # verification meets it too, and fails the request
        log.debug("request %d: its grammar failed: %r", request.request_id, error)
        return DraftTree()
