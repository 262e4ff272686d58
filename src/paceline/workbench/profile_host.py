"""Measures what the host takes in a step, with the engine as it decodes. Owns the runs.

Two numbers of requests decode a text that repeats itself, plainly and with drafts that they ask
for, so that each step has one. A step's host time is its wall time less that inside forwards.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from paceline.config import SpeculativeConfig
from paceline.engine.build import BuiltEngine
from paceline.engine.engine import Engine
from paceline.policy.host_time import NO_HOST_TIME, HostTime
from paceline.sampling_params import SamplingParams, SpeculativeParams

FEW, MANY = 1, 4
"""Requests of the runs; fewer where the engine allows no more."""
DRAFT_LENGTH = 4
PERIOD, PERIODS = 16, 4
"""Tokens that a prompt repeats, and how often."""
WARM_UP_STEPS, STEPS = 8, 64
MAX_SECONDS = 3.0
"""Of each run, however slow the model is."""


def measure_host_time(built: BuiltEngine) -> HostTime:
    """The host time of an engine without requests, on whose compute thread this is called.

    Nothing is measured where a context is too short for it.
    """
    engine = built.engine
    context, many = built.config.max_model_len or 0, min(MANY, built.config.max_num_seqs)
    if context < PERIOD * PERIODS + (WARM_UP_STEPS + STEPS) * (1 + DRAFT_LENGTH):
        return NO_HOST_TIME
    before = engine.drafting.proposers
    config = SpeculativeConfig("suffix", suffix_decoding_max_cached_requests=0)
    try:
        engine.set_speculation([])
        plain, plain_many = _median_ms(engine, FEW), _median_ms(engine, many)
        engine.set_speculation(built.proposers_for((config,)))
        drafted, drafted_many = _median_ms(engine, FEW), _median_ms(engine, many)
    finally:
        engine.set_speculation(before)
    further = max(1, many - FEW)
    draft, draft_many = drafted - plain, drafted_many - plain_many
    return HostTime(
        plain,
        max(0.0, plain_many - plain) / further,
        max(0.0, draft),
        max(0.0, draft_many - draft) / further,
    )


def _median_ms(engine: Engine, requests: int) -> float:
    """Median host time of steps in which so many requests decode."""
    rng, vocab = random.Random(0), engine.vocab_size
    wish = SpeculativeParams(num_speculative_tokens=DRAFT_LENGTH)
    most = (WARM_UP_STEPS + STEPS) * (1 + DRAFT_LENGTH)
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, speculative=wish)
    ids: list[int] = []
    try:
        for _ in range(requests):
            ids += engine.add_request(rng.choices(range(vocab), k=PERIOD) * PERIODS, params)
        while any(engine.requests[i].num_uncomputed != 1 for i in ids):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        return statistics.median(_host_ms(engine, lambda: all(i in engine.requests for i in ids)))
    finally:
        for request_id in ids:
            engine.abort(request_id)
        engine.step()


def _host_ms(engine: Engine, goes_on: Callable[[], bool]) -> list[float]:
    found: list[float] = []
    end = time.perf_counter() + MAX_SECONDS
    while goes_on() and len(found) < STEPS and (not found or time.perf_counter() < end):
        forwards, began = engine.runner.seconds, time.perf_counter()
        engine.step()
        passed = time.perf_counter() - began
        found.append((passed - (engine.runner.seconds - forwards)) * 1e3)
    return found
