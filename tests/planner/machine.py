"""A machine and a text that exist in numbers only: what a planner makes of them can be counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.config import Objective
from paceline.planner.choice import DraftLimits
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import CostPoint, CostTable, StepShape
from paceline.planner.pace import StepReport
from paceline.planner.planner import CostAwarePlanner
from paceline.planner.value import DraftTime, Source
from paceline.request.request import TARGET_ORIGIN, Adapter, Request, VerifyResult
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.request.span import DraftTree

DEPTH = 8
DRAFT = Source("draft_model", costs_forwards=True)
LOOKUP = Source("prompt_lookup")


def cost_table(milliseconds: Sequence[float]) -> CostTable:
    """A table of steps of 1, 2, 3, ... rows."""
    return CostTable(
        "test", [CostPoint(1, 0, w, w, ms) for w, ms in enumerate(milliseconds, start=1)]
    )


def request(request_id: int, k: int | None = None, adapter: str | None = None) -> Request:
    wish = SpeculativeParams(num_speculative_tokens=k)
    params = SamplingParams(temperature=0.0, speculative=wish)
    weights = None if adapter is None else Adapter(adapter, None)
    return Request(
        request_id, [1] * 10, 10, params, 0, max_len=1 << 30, num_computed=9, adapter=weights
    )


@dataclass
class Machine:
    """Steps of some requests, each of whose drafts is right with its own probability per token.

    A draft is a chain of :data:`DEPTH` nodes that claims to be right with ``claimed``. ``table`` is
    what the planner believes; ``times`` what steps take, and of a mixture ``expert_ms`` for each of
    the experts that so many rows of so many requests read, and ``disk_ms`` more for the part of
    them that comes from disk.
    """

    times: Sequence[float]
    sources: Sequence[Source] = (DRAFT,)
    draft_time: DraftTime = field(default_factory=DraftTime)
    claimed: float = 0.7
    seed: int = 0
    learns: bool = False
    table: CostTable | None = None
    has_profile: bool = True
    objective: Objective | None = None
    read: Callable[[int, int], int] = lambda rows, requests: 0
    expert_ms: float = 0.0
    disk_ms: float = 0.0
    from_disk: float = 0.0

    def __post_init__(self) -> None:
        table = self.table or cost_table(self.times)
        measured = table if self.has_profile else None
        cost = CostModel(
            measured, learns=self.learns, experts=table.experts, from_disk=self.from_disk
        )
        self.planner = CostAwarePlanner(cost, self.objective)
        self.planner.set_sources(self.sources)
        self._skipped, self._asleep, self._decoding = 0, 0, list[Request]()
        self.random = random.Random(self.seed)
        self.milliseconds = self.plain_milliseconds = 0.0
        self.asked = 0
        self.nodes: list[list[int]] = []

    def run(
        self, requests: Sequence[Request], right: Callable[[Request], float], steps: int
    ) -> dict[int, int]:
        """Tokens that each request got."""
        emitted = {each.request_id: 0 for each in requests}
        if self._decoding != [*requests]:
            self._skipped, self._decoding = 0, [*requests]
        for _ in range(steps):
            for request_id, count in self._step(requests, right).items():
                emitted[request_id] += count
        return emitted

    def _step(
        self, requests: Sequence[Request], right: Callable[[Request], float]
    ) -> dict[int, int]:
        count = len(requests)
        plain = StepShape(count, 0, 0, count, count)
        trees = [DraftTree() for _ in requests]
        draft_ms, planner = 0.0, self.planner
        if self._skipped and not self._asleep:
            self._asleep = planner.sleeps(requests)
            self._skipped *= self._asleep > 0
        if self._skipped:
            self._skipped, self._asleep = self._skipped - 1, self._asleep - 1
        elif steps := planner.begin(plain, requests):
            self._skipped, self._asleep = steps - 1, 0
        else:
            drafts = planner.drafts
            adapters = [each.adapter_name for each in requests]
            drafts.begin([each.request_id for each in requests], adapters)
            for source in self.sources:
                chosen = planner.ask(source, range(count))
                if not chosen:
                    continue
                self.asked += len(chosen)
                levels = self._levels(source, chosen)
                call_ms = self.draft_time.call + self.draft_time.level * (levels - 1)
                draft_ms += call_ms
                for i in chosen:
                    probs = [self.claimed] * levels
                    drafts.add(i, source.name, DraftTree.chain([7] * levels, probs, source.name))
                planner.drafted(source, chosen, call_ms)
            limits = [_limits(each) for each in requests]
            trees = planner.choose(limits, node_budget=512)
        emitted = {
            each.request_id: self._verify(each, tree, right(each))
            for each, tree in zip(requests, trees, strict=True)
        }
        rows = count + sum(map(len, trees))
        self.nodes.append([len(tree) for tree in trees])
        read = self.read(rows, count)
        shape = StepShape(rows, 0, 0, rows, count, read, round(self.from_disk * read))
        forward_ms = self.times[rows - 1] + self._expert_ms(read)
        self.milliseconds += forward_ms + draft_ms
        plain_ms = self.times[count - 1] + self._expert_ms(self.read(count, count))
        self.plain_milliseconds += plain_ms * sum(emitted.values()) / count
        planner.cost.observe(shape, forward_ms)
        planner.end(
            StepReport(
                shape,
                forward_ms,
                forward_ms + draft_ms,
                count,
                sum(emitted.values()),
            )
        )
        return emitted

    def _expert_ms(self, read: int) -> float:
        return self.expert_ms * read + self.disk_ms * round(self.from_disk * read)

    def _levels(self, source: Source, chosen: Sequence[int]) -> int:
        """How deep a proposer drafts that stops where its prices say so."""
        prices = self.planner.prices(source, chosen, DEPTH * len(chosen))
        for level in range(1, DEPTH):
            path = [self.claimed] * level
            if not any(prices.are_met([(index, path) for index in range(len(chosen))])):
                return level
        return DEPTH

    def _verify(self, request: Request, tree: DraftTree, right: float) -> int:
        accepted, is_right = 0, self.random.random() < right
        while accepted < len(tree) and is_right:
            accepted, is_right = accepted + 1, self.random.random() < right
        tokens = [7] * accepted + [7 if is_right else 8]
        origins = [*tree.origins[:accepted], TARGET_ORIGIN]
        result = VerifyResult(range(accepted + 1), tokens, origins, tree)
        self.planner.observe(request, result)
        return accepted + 1

    @property
    def speed_up(self) -> float:
        return self.plain_milliseconds / self.milliseconds


def _limits(request: Request) -> DraftLimits:
    k = request.params.speculative.num_speculative_tokens
    return DraftLimits(DEPTH, DEPTH if k is None else k, 0.02, is_forced=k is not None)
