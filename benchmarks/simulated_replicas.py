"""Up to hundreds of replicas, simulated: what the choice of a replica does to waits and caches.

Requests have the times and lengths of a recorded service, whose clock runs faster or slower so that
each replica gets the same share of what it can serve. The router's own policy chooses
(:mod:`paceline.ray.routing`), the engine's own scheduler packs steps, and these take what was
measured of a model on a machine. Replicas decode plainly, and keep the latest tokens that fit
beside those that run.

The trace does not say who asks. Here a few callers per replica take turns at random. A prompt goes
on with its caller's conversation where it is longer than that, or begins another one.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from operator import truediv
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple, cast

from agent_requests import AFFINITY, ARMS, LOADS, SEED, TURNS
from harness import arguments, chosen, names, note, numbers
from never_slower_replayed import saved
from prompt_sets import data_folder
from report import RESULTS, Report, Row, Target, grid, pick, table

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.engine.scheduler import Scheduled, Scheduler, step_shape
from paceline.policy.cost import CostModel
from paceline.ray.prompts import PART_BYTES, Traits
from paceline.ray.routing import Affinity
from paceline.request import Request
from paceline.runtime.kv_cache import KVCache
from paceline.workbench.replay_parts import EndlessKV
from paceline.workbench.serving.arrivals import read_trace

COSTS = RESULTS / "amd-epyc-zen-3-2-cores" / "never_slower_replayed.json"
PART_TOKENS = PART_BYTES // 4
"""Of the parts in which the router compares prompts, at four bytes a token."""
CALLERS, TURNS_EACH = 4, 10
"""Callers per replica at any time, and after how many prompts another takes one's place."""
INSTRUCTIONS = 256 // PART_TOKENS
"""Parts with which all prompts begin."""
PLAIN = SamplingParams()
Choose = Callable[[Traits, dict[str, int]], str]


class Ask(NamedTuple):
    """A request, with the tokens of its prompt that are not new, and all parts when it ends."""

    seconds: float
    prompt_len: int
    output_len: int
    known: int
    traits: Traits
    kept: Sequence[int]


@dataclass(slots=True)
class Caller:
    """Has conversations, one after another."""

    name: int
    num_asked: int = 0
    said: int = 0
    conversation: int = 0

    def ask(self, seconds: float, prompt_len: int, output_len: int) -> Ask:
        self.num_asked, known = self.num_asked + 1, self.said
        if not 0 < self.said < prompt_len:
            self.conversation += 1
            known = min(INSTRUCTIONS * PART_TOKENS, prompt_len)
        self.said = prompt_len + output_len
        own = self.name, self.conversation
        places = range(self.said // PART_TOKENS)
        kept = [hash((place, *(own if place >= INSTRUCTIONS else ()))) for place in places]
        read = tuple(kept[: prompt_len // PART_TOKENS])
        return Ask(seconds, prompt_len, output_len, known, Traits(read, 1 + self.name), kept)


def asks(trace: str, most: int, num_callers: int) -> list[Ask]:
    """The first requests of a trace; raises RequestError where it is not here."""
    rng, made = random.Random(SEED), list[Ask]()
    callers = [Caller(name) for name in range(num_callers)]
    for row in read_trace(data_folder() / "traces" / f"azure_llm_inference_{trace}.csv", most):
        place = rng.randrange(num_callers)
        if callers[place].num_asked == TURNS_EACH:
            callers[place] = Caller(num_callers + len(made))
        made.append(callers[place].ask(row.time, row.prompt_len, row.output_len))
    return made


class Kept(EndlessKV):
    """An engine's KV: requests always fit, and ``num_parts`` of what ended stay beside them."""

    def __init__(self, num_parts: int) -> None:
        self.asks: dict[int, Ask] = {}
        self._most, self._parts = num_parts, OrderedDict[int, None]()

    def attach_prefix(self, request_id: int, token_ids: Sequence[int], limit: int) -> int:
        found = 0
        for part in self.asks[request_id].traits.parts:
            if part not in self._parts:
                break
            found += PART_TOKENS
        return min(found, limit)

    def free(self, request_id: int) -> None:
        for part in reversed(self.asks.pop(request_id).kept):  # so that ends are forgotten first
            self._parts[part] = None
            self._parts.move_to_end(part)
        most = self._most - sum(len(each.kept) for each in self.asks.values())
        while self._parts and len(self._parts) > most:
            self._parts.popitem(last=False)


class Replica(Scheduler):
    """An engine that computes nothing."""

    def __init__(self, cost: CostModel, num_parts: int) -> None:
        self.kept = Kept(num_parts)
        super().__init__(EngineConfig(), cast(KVCache, self.kept), cost)
        self.items: list[Scheduled] = []
        self.busy, self.num_asked = 0.0, 0

    def take(self, number: int, ask: Ask) -> None:
        self.num_asked += 1
        self.kept.asks[number] = ask
        length = ask.prompt_len + ask.output_len
        self.add(Request(number, [0] * ask.prompt_len, ask.prompt_len, PLAIN, 0, length))

    def begin(self) -> float:
        """The seconds of the next step; 0 where there is nothing to do."""
        self.items = self.schedule()
        if not self.items:
            return 0.0
        host = self.cost.table.host.of(len(self.items), 0)
        self.busy += (seconds := (self.cost.predict(step_shape(self.items)) + host) / 1e3)
        return seconds

    def end(self) -> Iterator[Request]:
        """End the step; gives the requests that got a token."""
        for item in self.items:
            item.request.num_computed += item.num_tokens
            if item.samples:
                item.request.token_ids.append(0)
                if not item.request.remaining:
                    self.remove(item.request)
                yield item.request


class Fleet:
    """So many replicas, each of which keeps ``num_parts``."""

    def __init__(self, size: int, cost: CostModel, num_parts: int) -> None:
        self.replicas = {str(number): Replica(cost, num_parts) for number in range(size)}
        self.waits: list[float] = []
        self.ended = 0.0
        self._loads = dict.fromkeys(self.replicas, 0)
        self._steps: list[tuple[float, str]] = []
        self._came: dict[int, float] = {}

    def serve(self, asked: Sequence[Ask], choose: Choose, speed: float) -> None:
        """Answer everything; a speed of 2 lets requests come in half the time."""
        for number, ask in enumerate(asked):
            self._came[number] = now = ask.seconds / speed
            self._go_on(now)
            name = choose(ask.traits, self._loads)
            self._loads[name] += 1
            self.replicas[name].take(number, ask)
            if not self.replicas[name].items:
                self._begin(name, now)
        self._go_on(float("inf"))

    def _begin(self, name: str, now: float) -> None:
        if seconds := self.replicas[name].begin():
            heapq.heappush(self._steps, (now + seconds, name))

    def _go_on(self, until: float) -> None:
        while self._steps and self._steps[0][0] <= until:
            self.ended, name = heapq.heappop(self._steps)
            for request in self.replicas[name].end():
                if request.num_output_tokens == 1:
                    self.waits.append(self.ended - self._came.pop(request.request_id))
                self._loads[name] -= not request.remaining
            self._begin(name, self.ended)


def chooser(arm: str, size: int) -> Choose:
    if arm == TURNS:
        order = cycle(map(str, range(size)))
        return lambda traits, loads: next(order)
    return Affinity(is_on=arm == AFFINITY, rng=random.Random(SEED)).choose


def simulated(
    asked: Sequence[Ask], arm: str, size: int, cost: CostModel, num_parts: int, rate: float
) -> dict[str, Any]:
    """A row; the rate is of all replicas, per second."""
    fleet = Fleet(size, cost, num_parts)
    fleet.serve(asked, chooser(arm, size), rate * asked[-1].seconds / len(asked))
    queried = sum(ask.prompt_len for ask in asked)
    replicas, centiles = fleet.replicas.values(), quantiles(fleet.waits, n=100)
    return {
        "routing": arm,
        "ttft_p50": centiles[49],
        "ttft_p95": centiles[94],
        "tokens_per_second": sum(ask.output_len for ask in asked) / fleet.ended,
        "hit_rate": sum(each.num_cached_tokens for each in replicas) / queried,
        "known": sum(ask.known for ask in asked) / queried,
        "busy": fmean(each.busy for each in replicas) / fleet.ended,
        "busiest": max(each.num_asked for each in replicas) * size / len(asked),
    }


def targets(results: Sequence[Row]) -> list[Target]:
    """Affinity beside the other rules, where it does worst."""
    p95 = {arm: [row["ttft_p95"] for row in pick(results, routing=arm)] for arm in ARMS[:3]}
    worst = {arm: max(map(truediv, p95[AFFINITY], p95[arm])) for arm in (TURNS, LOADS)}
    what = "95 % of first tokens within, affinity over"
    return [Target(f"{what} {arm}", ratio, 1.0) for arm, ratio in worst.items()]


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        *((name, name) for name in ("trace", "replicas", "load", "routing")),
        ("half of first tokens, s", "ttft_p50", 2),
        ("95 %, s", "ttft_p95", 2),
        ("tokens/s", "tokens_per_second", 0),
        ("cached", "hit_rate", 2),
        ("known", "known", 2),
        ("busy", "busy", 2),
        ("busiest / mean", "busiest", 2),
    )
    return [table(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--costs", type=Path, default=COSTS, help="a result with tables of costs")
    parser.add_argument("--pair", default="inflated", help="whose target's table is taken")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="that each replica keeps")
    parser.sized("--traces", ["conv", "code"], ["conv"], type=names)
    parser.sized("--replicas", [8, 64, 512], [8], type=numbers)
    parser.sized(
        "--loads", [70, 110], [70], "in %% of what they serve without caches", type=numbers
    )
    parser.sized("--requests", 36, 10, "of each replica")
    options = parser.parse_args(argv)
    cost = CostModel(saved(options.pair, options.costs).target, learns=False)
    num_parts = options.kv_tokens // PART_TOKENS
    shown = chosen(options, "quick", "pair", "kv_tokens", "requests")
    report = Report("simulated_replicas", {**shown, "costs": str(options.costs), "rates": {}})
    for trace in options.traces:
        alone, all_at_once = Fleet(1, cost, 0), asks(trace, 8 * options.requests, CALLERS)
        alone.serve(all_at_once, chooser(TURNS, 1), float("inf"))
        report.config["rates"][trace] = rate = len(all_at_once) / alone.ended
        for size in options.replicas:
            asked = asks(trace, size * options.requests, size * CALLERS)
            for load in options.loads:
                for arm in ARMS[:3]:
                    note(f"{trace}, {size} replicas, load {load} %, {arm}")
                    row = simulated(asked, arm, size, cost, num_parts, rate * size * load / 100)
                    report.results.append({"trace": trace, "replicas": size, "load": load, **row})
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
