"""Up to hundreds of replicas, simulated: what the choice of a replica does to waits and caches.

Requests have the times and lengths of a recorded service, whose clock runs faster or slower so that
each replica gets the same share of what it can serve. The router's own policy chooses
(:mod:`paceline.ray.routing`), the engine's own scheduler packs steps, and these take what was
measured of a model on a machine. Replicas decode plainly, and keep the latest tokens that fit
beside those that run.

The trace does not say who asks. Here a few callers per replica take turns at random, and wait for
their answer before they ask again. A prompt goes on with its caller's conversation where it is
longer than that, or begins another one.
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
from paceline.cache.kv_cache import KVCache
from paceline.config import EngineConfig
from paceline.engine.scheduler import Scheduled, Scheduler, step_shape
from paceline.planner.cost import CostModel
from paceline.ray.prompts import PART_BYTES
from paceline.ray.routing import Affinity, Choice
from paceline.request.request import Request
from paceline.workbench.replay_parts import EndlessKV
from paceline.workbench.serving.arrivals import TraceRow, read_trace

COSTS = RESULTS / "amd-epyc-zen-3-2-cores" / "never_slower_replayed.json"
PART_TOKENS = PART_BYTES // 4
"""Of the parts in which the router compares prompts, at four bytes a token."""
CALLERS, TURNS_EACH = 4, 10
"""Callers per replica at any time, and after how many prompts another takes one's place."""
INSTRUCTIONS = 256 // PART_TOKENS
"""Parts with which all prompts begin."""
FEWEST = 128
"""Replicas; fewer of them get as many requests as these, so that no row is an accident."""
DRAWS = 8
"""Of callers, until one of them is not waiting; then another one comes."""
PLAIN = SamplingParams()
Choose = Callable[[tuple[int, ...], dict[str, int]], Choice]


@dataclass(slots=True)
class Caller:
    """Has conversations, one after another."""

    name: int
    num_asked: int = 0
    said: int = 0
    conversation: int = 0
    is_waiting: bool = False

    def ask(self, prompt_len: int, output_len: int) -> Ask:
        self.num_asked, self.is_waiting, known = self.num_asked + 1, True, self.said
        if not 0 < self.said < prompt_len:
            self.conversation += 1
            known = min(INSTRUCTIONS * PART_TOKENS, prompt_len)
        self.said = prompt_len + output_len
        own = self.name, self.conversation
        places = range(self.said // PART_TOKENS)
        kept = [hash((place, *(own if place >= INSTRUCTIONS else ()))) for place in places]
        read = tuple(kept[: prompt_len // PART_TOKENS])
        return Ask(self, prompt_len, output_len, known, read, kept)


class Ask(NamedTuple):
    """A request, with the tokens of its prompt that are not new, and all parts when it ends."""

    caller: Caller
    prompt_len: int
    output_len: int
    known: int
    parts: tuple[int, ...]
    kept: Sequence[int]


def recorded(trace: str, most: int) -> list[TraceRow]:
    """The first requests of a trace; raises RequestError where it is not here."""
    return read_trace(data_folder() / "traces" / f"azure_llm_inference_{trace}.csv", most)


def asks(rows: Sequence[TraceRow], num_callers: int) -> Iterator[Ask]:
    """Who asks is chosen when the request is taken: one whose last answer has come."""
    rng, places = random.Random(SEED), range(num_callers)
    callers = [Caller(name) for name in places]
    for number, row in enumerate(rows):
        drawn = rng.choices(places, k=DRAWS)
        place = next((each for each in drawn if not callers[each].is_waiting), drawn[0])
        if callers[place].is_waiting or callers[place].num_asked == TURNS_EACH:
            callers[place] = Caller(num_callers + number)
        yield callers[place].ask(row.prompt_len, row.output_len)


class Kept(EndlessKV):
    """An engine's KV: requests always fit, and ``num_parts`` of what ended stay beside them."""

    def __init__(self, num_parts: int) -> None:
        self.asks: dict[int, Ask] = {}
        self._most, self._parts = num_parts, OrderedDict[int, None]()

    def attach_prefix(self, request_id: int, token_ids: Sequence[int], limit: int) -> int:
        found = 0
        for part in self.asks[request_id].parts:
            if part not in self._parts:
                break
            found += PART_TOKENS
        return min(found, limit)

    def publish(self, parts: Sequence[int]) -> None:
        for part in reversed(parts):  # so that ends are forgotten first
            self._parts[part] = None
            self._parts.move_to_end(part)

    def free(self, request_id: int) -> None:
        self.publish(self.asks.pop(request_id).kept)
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
                if not item.request.num_output_tokens:
                    self.kept.publish(self.kept.asks[item.request.request_id].parts)
                item.request.token_ids.append(0)
                if not item.request.remaining:
                    self.remove(item.request)
                yield item.request


class Fleet:
    """So many replicas, each of which keeps ``num_parts``."""

    def __init__(self, size: int, cost: CostModel, num_parts: int) -> None:
        self.replicas = {str(number): Replica(cost, num_parts) for number in range(size)}
        self.waits: list[float] = []
        self.ended, self.known = 0.0, 0
        self._work = dict.fromkeys(self.replicas, 0)
        self._steps: list[tuple[float, str]] = []
        self._came: dict[int, float] = {}
        self._given: dict[int, tuple[int, Caller]] = {}

    def serve(self, times: Sequence[float], asked: Iterator[Ask], choose: Choose) -> None:
        """Answer everything; each request is taken when it comes."""
        for number, now in enumerate(times):
            self._go_on(now)
            ask = next(asked)
            name, work = choose(ask.parts, self._work)
            self._came[number], self._given[number] = now, (work, ask.caller)
            self._work[name] += work
            self.known += ask.known
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
                if not request.remaining:
                    work, caller = self._given.pop(request.request_id)
                    self._work[name] -= work
                    caller.is_waiting = False
            self._begin(name, self.ended)


def chooser(arm: str, size: int) -> Choose:
    if arm == TURNS:
        order = cycle(map(str, range(size)))
        return lambda parts, work: Choice(next(order), 0)
    return Affinity(is_on=arm == AFFINITY).choose


def simulated(
    rows: Sequence[TraceRow], arm: str, size: int, cost: CostModel, num_parts: int, rate: float
) -> dict[str, Any]:
    """A row; the rate is of all replicas, per second."""
    fleet, seconds = Fleet(size, cost, num_parts), len(rows) / rate
    times = [row.time / rows[-1].time * seconds for row in rows]
    fleet.serve(times, asks(rows, size * CALLERS), chooser(arm, size))
    queried = sum(row.prompt_len for row in rows)
    replicas, centiles = fleet.replicas.values(), quantiles(fleet.waits, n=100)
    return {
        "routing": arm,
        "ttft_p50": centiles[49],
        "ttft_p95": centiles[94],
        "tokens_per_second": sum(row.output_len for row in rows) / fleet.ended,
        "hit_rate": sum(each.num_cached_tokens for each in replicas) / queried,
        "known": fleet.known / queried,
        "busy": fmean(each.busy for each in replicas) / fleet.ended,
        "busiest": max(each.num_asked for each in replicas) * size / len(rows),
    }


def targets(results: Sequence[Row]) -> list[Target]:
    """Affinity beside the other rules, where it does worst."""
    found = []
    for what, key in (("half", "ttft_p50"), ("95 %", "ttft_p95")):
        values = {arm: [row[key] for row in pick(results, routing=arm)] for arm in ARMS[:3]}
        for arm in (TURNS, LOADS):
            worst = max(map(truediv, values[AFFINITY], values[arm]))
            found.append(Target(f"{what} of first tokens within, affinity over {arm}", worst, 1.0))
    return found


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
    parser.sized("--requests", 10, 5, "of each replica")
    options = parser.parse_args(argv)
    cost = CostModel(saved(options.pair, options.costs).target, learns=False)
    num_parts = options.kv_tokens // PART_TOKENS
    shown = chosen(options, "quick", "pair", "kv_tokens", "requests")
    report = Report(
        "simulated_replicas", {**shown, "costs": options.costs.parent.name, "rates": {}}
    )
    for trace in options.traces:
        alone, first = Fleet(1, cost, 0), recorded(trace, 8 * options.requests)
        alone.serve([0.0] * len(first), asks(first, CALLERS), chooser(TURNS, 1))
        report.config["rates"][trace] = rate = len(first) / alone.ended
        for size in options.replicas:
            rows = recorded(trace, max(size, FEWEST) * options.requests)
            for load in options.loads:
                for arm in ARMS[:3]:
                    note(f"{trace}, {size} replicas, load {load} %, {arm}")
                    row = simulated(rows, arm, size, cost, num_parts, rate * size * load / 100)
                    report.results.append({"trace": trace, "replicas": size, "load": load, **row})
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
