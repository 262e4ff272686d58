"""The drafts of a step: the planner chooses who drafts, and what of it is verified.

Owns the limits of each request's draft. Knows no particular proposer;
:mod:`paceline.engine.contained_proposers` contains their failures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from paceline.engine.contained_proposers import Call, ContainedProposers, Group
from paceline.engine.step import NO_LIMITS, Scheduled
from paceline.planner.choice import DraftLimits
from paceline.planner.cost_table import NO_STEP, StepShape
from paceline.planner.drafts import FREE
from paceline.planner.pace import StepReport
from paceline.planner.planner import Planner
from paceline.proposers.base import Proposer
from paceline.request.engine_stats import EngineStats
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Skipped:
    """Steps for which the planner need not be asked as long as the same requests decode, and the
    sums of what they take."""

    left: int = 0  # how many more
    asleep: int = 0  # for how many of them no text can come to where a draft may pay
    count: int = 0  # requests that decode
    latest: Request | None = None  # the last of them: those that come stand behind it
    shape: StepShape = NO_STEP
    steps: int = 0
    emitted: int = 0
    forward_ms: float = 0.0
    total_ms: float = 0.0

    def goes_on(self, items: Sequence[Scheduled], planner: Planner) -> bool:
        """Whether the next step is one of them."""
        are_the_same = len(items) == self.count and items[-1].request is self.latest
        if self.left and are_the_same:
            if not self.asleep:
                self.asleep = planner.sleeps([item.request for item in items])
            if self.asleep:
                self.asleep -= 1
                self.left -= 1
                return True
        self.left = self.asleep = 0
        return False


class Drafting:
    """The proposers that are on, and the planner that decides who of them drafts.

    Attributes:
        is_active: proposers were asked in the step that is running.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        planner: Planner,
        vocab_size: int,
        stats: EngineStats,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.planner = planner
        self.is_active = self._is_skipped = False
        self.clock = clock or time.perf_counter
        self._skipped = Skipped()
        self._proposers = ContainedProposers(vocab_size, stats)
        self.replace(proposers)

    def replace(self, proposers: Sequence[Proposer]) -> None:
        """Replace all proposers; those without forwards are asked first."""
        self._proposers.replace(proposers, self.planner.asks_together)
        self._tell_planner()

    def join(self, proposer: Proposer) -> None:
        """Add a proposer, which is asked before the others; what was learnt about those stays.

        A name that was switched off stays off until all proposers are replaced.
        """
        if self._proposers.join(proposer):
            self._tell_planner()

    def _tell_planner(self) -> None:
        self._end_skipped()
        self._skipped = Skipped()
        sources = [group.source for group in self._proposers.groups]
        self._guarded(self.planner.set_sources, sources)

    @property
    def is_on(self) -> bool:
        return bool(self._proposers.entries)

    @property
    def proposers(self) -> list[Proposer]:
        return [entry.proposer for entry in self._proposers.entries]

    @property
    def num_forwards(self) -> int:
        """Draft model forwards, those of proposers that are off by now included."""
        return self._proposers.num_forwards

    def taps(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Hidden states of the target that proposers will read of these."""
        return self._proposers.taps_of(requests) if self._proposers.readers else ()

    def read(self, items: Sequence[Scheduled], taps: Sequence[int]) -> None:
        """Hand the hidden states of what a step committed to the proposers that read them."""
        for item in items:
            features, path, count = item.features, item.path, len(item.path)
            if count and features is not None:
                kept = features[:count]
                if path[-1] != count - 1:
                    kept = features[path]
                self._proposers.read(item.request, item.request.num_computed - count, kept, taps)

    def limits(self, request: Request) -> DraftLimits:
        """What a request may draft in this step, over all proposers."""
        wish = request.params.speculative
        if not wish.enabled:
            return NO_LIMITS
        widest = self._proposers.widest[wish.methods, request.constraint is not None]
        # The bonus token is always emitted, so one of the remaining tokens needs no draft.
        room = request.max_len - len(request.token_ids) - 1
        wanted = wish.num_speculative_tokens
        if room >= widest.max_depth and wanted is None:
            return widest
        depth = min(widest.max_depth, room)
        if wanted is not None:
            depth = min(depth, wanted)
        if depth <= 0:
            return NO_LIMITS
        return replace(widest, max_depth=depth, is_forced=wanted is not None)

    def propose(
        self, items: Sequence[Scheduled], shape: StepShape, node_budget: int
    ) -> list[Scheduled]:
        """Let proposers draft for every request that may draft.

        Args:
            shape: of the step without drafts.
            node_budget: most draft nodes that the step has room for.

        Returns:
            The items of these requests; none where nothing was drafted.
        """
        self.is_active = False  # also if what follows raises
        self._is_skipped = self._skipped.goes_on(items, self.planner)
        if self._is_skipped:
            return []
        if self._skipped.steps:
            self._end_skipped()
        if not self._proposers.entries or node_budget <= 0:
            return []
        able = [item for item in items if item.may_draft]
        if not able:
            return []
        requests = [*map(attrgetter("request"), able)]
        steps = self.planner.begin(shape, requests)
        if steps:
            if shape.rows == shape.samples == len(items) == len(able):
                self._skipped = Skipped(steps - 1, 0, len(items), items[-1].request)
            return []
        self.is_active = True
        drafts = self.planner.drafts
        adapters = [*map(attrgetter("adapter_name"), requests)]
        named = (adapters,) if any(adapters) else ()
        drafts.begin([*map(attrgetter("request_id"), requests)], *named)
        limits = [*map(self.limits, requests)]
        self._ask_all(requests, limits)
        sizes = drafts.sizes()
        if not any(sizes):
            return []
        for item, limit, size in zip(able, limits, sizes, strict=True):
            item.limits, item.num_drafted = limit, size
        return able

    def choose(self, items: Sequence[Scheduled], node_budget: int) -> list[DraftTree]:
        """The part of each draft that is verified."""
        return self.planner.choose([*map(attrgetter("limits"), items)], node_budget)

    def _ask_all(self, requests: Sequence[Request], limits: Sequence[DraftLimits]) -> None:
        """Let those sources draft that the planner asks, the free ones first."""
        groups = self._proposers.groups
        for group in groups:
            able, applies = list[int](), group.source.applies
            for i, limit in enumerate(limits):
                if limit.max_nodes and applies(requests[i]):
                    able.append(i)
            chosen = self.planner.ask(group.source, able) if able else ()
            if chosen:
                self._ask(group, chosen, requests, limits)
        if self._proposers.groups is not groups:  # some failed
            self._tell_planner()

    def _ask(
        self,
        group: Group,
        chosen: Sequence[int],
        requests: Sequence[Request],
        limits: Sequence[DraftLimits],
    ) -> None:
        """Let one source draft for the chosen requests."""
        source, planner = group.source, self.planner
        asked, allowed = [*map(requests.__getitem__, chosen)], [*map(limits.__getitem__, chosen)]
        prices, forwards = FREE, 0
        if source.costs_forwards:
            most_nodes, _ = group.entries[0].most
            nodes = sum([min(most_nodes, limit.max_nodes) for limit in allowed])
            prices, forwards = planner.prices(source, chosen, nodes), group.num_forwards
        began = self.clock()
        self._proposers.propose(Call(group, asked, chosen, allowed, prices, planner.drafts))
        milliseconds = (self.clock() - began) * 1e3
        if source.costs_forwards and group.num_forwards == forwards:
            milliseconds = 0.0  # it declined, which says nothing of its times
        planner.drafted(source, chosen, milliseconds)

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Tell the planner and every proposer which tokens were committed, whichever drafted.

        Only where :attr:`is_active`; a proposer catches up when it is asked.
        """
        try:
            self.planner.observe(request, result)
        except Exception as error:
            _warn(error)
        if self._proposers.learners:
            self._proposers.observe(request, result)

    def end(
        self,
        items: Sequence[Scheduled],
        shape: StepShape,
        emitted: int,
        forward_ms: float,
        total_ms: float,
    ) -> None:
        """Tell the planner what the step as a whole took and brought."""
        if not self._proposers.entries:
            return
        if self._is_skipped:
            skipped = self._skipped
            skipped.shape = shape
            skipped.steps += 1
            skipped.emitted += emitted
            skipped.forward_ms += forward_ms
            skipped.total_ms += total_ms
            return
        decoding = 0
        if shape.rows == shape.samples == len(items):  # all decode, and there is no draft
            decoding, items = len(items), ()
        for item in items:
            if item.may_draft:
                decoding += 1
            elif item.samples:
                emitted -= 1  # a prompt's first token
        self._guarded(self.planner.end, StepReport(shape, forward_ms, total_ms, decoding, emitted))

    def _end_skipped(self) -> None:
        """Tell the planner what the steps took for which it was not asked."""
        past = self._skipped
        if past.steps:
            times = past.forward_ms, past.total_ms
            report = StepReport(past.shape, *times, past.count, past.emitted, past.steps)
            self._skipped = Skipped()
            self._guarded(self.planner.end, report)

    def end_request(self, request: Request) -> None:
        """Let planner and proposers forget a request that ended."""
        self._guarded(self.planner.finish, request)
        self.finish(request)

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run a planner's method; if it fails, only what it would have learnt is lost."""
        try:
            call(*arguments)
        except Exception as error:
            _warn(error)

    def finish(self, request: Request) -> None:
        """Let every proposer forget a request."""
        self._proposers.finish(request)


def _warn(error: Exception) -> None:
    log.warning("the planner failed and goes on without: %r", error)
