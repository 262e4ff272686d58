"""Host time of steps in which nobody drafts, beside the same steps of a plain engine.

Owns the two ways of not drafting, and the arithmetic: both engines take their steps in pairs, in
any order, and what counts is the difference within a pair. Knows no targets.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from host_time import WARM_UP_STEPS

from paceline.engine.engine import Engine
from paceline.policy.cost_aware import CostAwarePlanner
from paceline.policy.planned import UNPLANNED
from paceline.sampling_params import SamplingParams, SpeculativeParams

SKIPS = {"planner asleep": True, "speculation off": False}
"""Whether requests allow speculation, by what keeps them from it."""
NOTHING_FOUND = {"method": "prompt_lookup", "prompt_lookup_min": 32, "prompt_lookup_max": 32}
"""A proposer that is hardly worth asking."""
TEMPERATURE = 1.3
PAIRS_PER_STEP = 6
"""Pairs for each step of other cases: these differences are small."""


@dataclass(slots=True)
class Pairs:
    """Microseconds of steps outside the forward, and how many more than the plain engine's."""

    host: list[float] = field(default_factory=list)
    over_plain: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians over the pairs."""
        if not self.host:
            return {"steps": 0}
        return {
            "steps": len(self.host),
            "host_us": round(statistics.median(self.host), 1),
            "over_plain_us": round(statistics.median(self.over_plain), 1),
        }


def compare(
    plain: Engine, other: Engine, prompts: Sequence[list[int]], name: str, steps: int
) -> Pairs:
    """Let both engines continue the same prompts; only pairs in which nobody planned are kept."""
    engines = (plain, other)
    for engine in engines:
        for seed, prompt in enumerate(prompts):
            engine.add_request(prompt, _params(engine, prompt, seed, SKIPS[name]))
        while any(request.num_uncomputed != 1 for request in engine.requests.values()):
            engine.step()
    found, drawn = Pairs(), random.Random(0)
    try:
        for number in range(steps + WARM_UP_STEPS):
            order = drawn.sample(engines, 2)  # in turns would keep step with the probes
            host = {engine: _host_us(engine) for engine in order}
            if not all(len(engine.requests) == len(prompts) for engine in engines):
                break
            if number >= WARM_UP_STEPS and _is_unplanned(other):
                found.host.append(round(host[other], 1))
                found.over_plain.append(round(host[other] - host[plain], 1))
    finally:
        for engine in engines:
            for request_id in list(engine.requests):
                engine.abort(request_id)
            engine.step()
    return found


def _params(engine: Engine, prompt: Sequence[int], seed: int, enabled: bool) -> SamplingParams:
    assert engine.config.max_model_len is not None
    return SamplingParams(
        max_tokens=engine.config.max_model_len - len(prompt),
        temperature=TEMPERATURE,
        seed=seed,
        ignore_eos=True,
        speculative=SpeculativeParams(enabled=enabled),
    )


def _host_us(engine: Engine) -> float:
    forward, began = engine.runner.seconds, time.perf_counter()
    engine.step()
    return (time.perf_counter() - began - (engine.runner.seconds - forward)) * 1e6


def _is_unplanned(engine: Engine) -> bool:
    planner = engine.drafting.planner
    assert isinstance(planner, CostAwarePlanner)
    return planner.planned is UNPLANNED


def run_skips(
    build: Callable[[Any], Engine], prompts: Callable[[int], Sequence[list[int]]], options: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A raw sample and a result for each way of not drafting and each number of requests."""
    plain, other = build(None), build(NOTHING_FOUND)
    found = []
    for name in SKIPS:
        for count in options.requests:
            label = {"case": name, "requests": count, "forward": "real"}
            pairs = compare(plain, other, prompts(count), name, PAIRS_PER_STEP * options.steps)
            raw = {"host_us": pairs.host, "over_plain_us": pairs.over_plain}
            found.append(({**label, **raw}, {**label, **pairs.summary()}))
    return found
