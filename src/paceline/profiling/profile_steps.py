"""The steps that a profile measures, run exactly as the engine runs its own, in shuffled rounds.

Spans are reserved in the KV cache, packed and forwarded by the model runner, and rolled back, so
that each measurement finds the context as the one before did. Every round measures everything once,
in an order of its own, so that a slow minute hits all of them alike; what counts are medians. Knows
no files.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig
from paceline.core.errors import ConfigError
from paceline.request.span import Span
from paceline.tensors.arrays import Floats

Key = TypeVar("Key", bound=Hashable)
ENOUGH_ROUNDS = 9
"""Made even where the budget is spent sooner, unless it is spent many times over."""
LEAST_ROUNDS = 3
PATIENCE = 10
"""So many budgets may be spent on enough rounds."""
WARM_SECONDS = 0.005
"""In which a task has found its pace: repeated for so long, its next time counts."""
WIDTHS = (*range(1, 34), 40, 48, 64, 96, 128, 192, 256, 512)
CONTEXTS = (64, 512, 2048)
FEWER_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Widths that are measured without samples, and with one, as prefill chunks have them."""
REQUESTS = (2, 4, 8, 16)
REQUEST_WIDTHS = (1, 4)
LONGER_REQUESTS = 4
"""How many requests are measured at the second context too: that takes long to fill."""
WIDE = 64
WIDE_EVERY = 4
FILL_ROWS = 512
ALIKE_WIDTHS = (4, 8, 16, 32)
"""Widths of a mixture that are measured with one token in all rows too: so much work for fewer
experts, which tells what an expert costs."""


@dataclass(frozen=True, slots=True)
class StepTask:
    """Something to measure.

    Attributes:
        run: does it once and returns the seconds that count.
        every: it takes part in every ``every``-th round; more than 1 for what takes long.
    """

    run: Callable[[], float]
    every: int = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one task: median, range of the middle half, and number of measurements."""

    ms: float
    spread: float
    count: int


def measure(
    tasks: Mapping[Key, StepTask],
    budget_seconds: float,
    advance: Callable[[float], None] = lambda share: None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> dict[Key, Timing]:
    """Measure tasks in shuffled rounds after one round of warm-up, which does not count.

    Args:
        budget_seconds: above 0; rounds go on for so long, and see :data:`ENOUGH_ROUNDS`.
        advance: gets the share that is done, from 0 to 1.
    """
    order = list(tasks)
    shuffle = random.Random(seed).shuffle
    samples: dict[Key, list[float]] = {key: [] for key in tasks}
    began = clock()
    for key in order:
        tasks[key].run()
    rounds, spent = 0, 0.0
    while spent < 1.0 or rounds < (ENOUGH_ROUNDS if spent < PATIENCE else LEAST_ROUNDS):
        shuffle(order)
        for key in order:
            if rounds % tasks[key].every == 0:
                samples[key].append(_warm(tasks[key]) * 1e3)
        rounds += 1
        spent = (clock() - began) / budget_seconds
        advance(min(1.0, rounds / ENOUGH_ROUNDS, spent))
    return {key: _timing(values) for key, values in samples.items()}


def _warm(task: StepTask) -> float:
    """Seconds of a task that is repeated, as a decoding engine repeats its steps.

    Before, a small model's weights may not be in the caches, and threads may sleep. The time that
    completes the warm-up is likely to be a long one, so the next counts.
    """
    seconds = spent = task.run()
    if spent >= WARM_SECONDS:
        return seconds
    while spent < WARM_SECONDS:
        spent += task.run()
    return task.run()


def _timing(values: list[float]) -> Timing:
    if len(values) < 2:
        return Timing(values[0], 0.0, len(values))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(middle, high - low, len(values))


@dataclass(frozen=True, slots=True, order=True)
class MeasuredStep:
    """What is forwarded: equal spans, in the terms of a cost point.

    Attributes:
        alike: whether all rows are of one token.
    """

    requests: int
    context: int
    width: int
    samples: int
    alike: bool = False

    @property
    def rows(self) -> int:
        return self.requests * self.width


def plan_steps(
    widths: Sequence[int],
    contexts: Sequence[int],
    max_len: int,
    limits: EngineConfig,
    mixture: bool = False,
) -> tuple[list[MeasuredStep], list[str]]:
    """The steps to measure, and a remark for everything that does not fit.

    Args:
        widths: of one request's steps; width 1 is always measured.
        max_len: most tokens of a request.
        limits: of requests and rows of a step.

    Raises:
        ConfigError: no context fits.
    """
    all_widths = sorted({1, *widths})
    fitting = [context for context in sorted(set(contexts)) if context < max_len]
    notes = [
        f"context {context} is left out: the limit is {max_len} tokens"
        for context in sorted(set(contexts) - set(fitting))
    ]
    if not fitting:
        raise ConfigError(
            f"no context of {', '.join(map(str, contexts))} is below the limit of {max_len} tokens"
        )
    steps = _wanted(all_widths, fitting)
    if mixture:
        alone = {MeasuredStep(1, fitting[0], width, width) for width in all_widths}
        steps |= {replace(step, alike=True) for step in alone if step.width in ALIKE_WIDTHS}
    kept = [
        step
        for step in sorted(steps)
        if step.context + step.width <= max_len
        and step.requests <= limits.max_num_seqs
        and step.rows <= limits.max_num_batched_tokens
    ]
    left_out = ", ".join(
        f"{step.requests} x {step.width} at context {step.context}"
        for step in sorted(steps.difference(kept))
        if step.samples == step.width and not step.alike
    )
    if left_out:
        notes.append(f"these steps are beyond the limits: {left_out}")
    return kept, notes


def _wanted(widths: Sequence[int], contexts: Sequence[int]) -> set[MeasuredStep]:
    """All widths at all contexts; other samples and several requests at the shortest one."""
    first = contexts[0]
    alone = {MeasuredStep(1, context, width, width) for context in contexts for width in widths}
    sampled = {
        MeasuredStep(1, first, width, samples)
        for width in widths
        if width in FEWER_SAMPLES
        for samples in {0, min(1, width - 1)}
    }
    together = {MeasuredStep(r, first, width, width) for r in REQUESTS for width in REQUEST_WIDTHS}
    longer = {MeasuredStep(LONGER_REQUESTS, c, w, w) for c in contexts[1:2] for w in REQUEST_WIDTHS}
    return alone | sampled | together | longer


def num_held(requests: int, num_contexts: int) -> int:
    """Requests that a bench holds at once, if its steps have at most ``requests``."""
    further = LONGER_REQUESTS - 1 if num_contexts > 1 and requests >= LONGER_REQUESTS else 0
    return requests + num_contexts - 1 + further


def num_fitting(room: int, num_contexts: int) -> int:
    """Most requests of a step where ``room`` requests can be held at once; at least 1."""
    return max((n for n in REQUESTS if num_held(n, num_contexts) <= room), default=1)


class StepBench:
    """Runs and times steps of a model, on the process's compute thread. Close it in the end.

    Args:
        runner: with a KV cache that nothing else uses meanwhile.
        text: token ids for contexts and spans; random ones if empty.

    Attributes:
        experts: that each step read, of layers that are mixtures.
    """

    def __init__(self, runner: ModelRunner, seed: int = 0, text: Sequence[int] = ()) -> None:
        self._runner = runner
        self._text, self._begins = text, dict[int, int]()
        self.experts: dict[MeasuredStep, int] = {}
        self._random = random.Random(seed)
        self._requests: dict[int, list[int]] = {}
        self._next_id = 0

    def tasks(self, steps: Sequence[MeasuredStep]) -> dict[MeasuredStep, StepTask]:
        """What to measure, its requests filled with context; ``ConfigError`` without room."""
        return {
            step: StepTask(
                partial(self._seconds, step, self._spans(step)),
                WIDE_EVERY if step.rows >= WIDE else 1,
            )
            for step in steps
        }

    def close(self) -> None:
        """Give back the KV of all requests."""
        for requests in self._requests.values():
            for request_id in requests:
                self._runner.kv.free(request_id)
        self._requests.clear()

    def _spans(self, step: MeasuredStep) -> list[Span]:
        requests = self._requests.setdefault(step.context, [])
        while len(requests) < step.requests:
            requests.append(self._fill(step.context))
        return [
            Span(
                request_id,
                step.context,
                self._span_tokens(request_id, step),
                range(-1, step.width - 1),
                range(step.width - step.samples, step.width),
            )
            for request_id in requests[: step.requests]
        ]

    def _inputs(self, rows: int, alike: bool = False) -> Floats | None:
        """Hidden states, whatever they are, for the rows of a head that takes them in.

        Rows differ unless they are to be ``alike``: a mixture's would choose the same experts.
        """
        decoder = self._runner.decoder
        if decoder.entry is None:
            return None
        shape = 1 if alike else rows, decoder.config.hidden_size
        drawn = np.random.default_rng(rows).standard_normal(shape, np.float32)
        return np.repeat(drawn, rows // len(drawn), axis=0)

    def _span_tokens(self, request_id: int, step: MeasuredStep) -> list[int]:
        if step.alike:
            return self._tokens(request_id, step.context, 1) * step.width
        return self._tokens(request_id, step.context, step.width)

    def _tokens(self, request_id: int, start: int, count: int) -> list[int]:
        """A request's tokens from a position on: of the text, which begins anew at its end."""
        text = self._text
        if not text:
            return self._random.choices(range(self._runner.decoder.config.vocab_size), k=count)
        if request_id not in self._begins:
            self._begins[request_id] = self._random.randrange(len(text))
        begin = self._begins[request_id] + start
        return [text[i % len(text)] for i in range(begin, begin + count)]

    def _fill(self, context: int) -> int:
        """A request that has read ``context`` tokens."""
        request_id, kv = self._next_id, self._runner.kv
        self._next_id += 1
        if kv.states is not None and not kv.states.has_lane:
            raise _too_small()
        kv.open(request_id)
        for start in range(0, context, FILL_ROWS):
            count = min(FILL_ROWS, context - start)
            self._reserve(request_id, count, certain=count)
            tokens = self._tokens(request_id, start, count)
            chunk = Span.chunk(request_id, start, tokens, sample=False)
            self._runner.forward(self._runner.pack([chunk]), inputs=self._inputs(count))
            kv.commit(request_id, range(count))
        return request_id

    def _drafted(self, step: MeasuredStep) -> int:
        """Nodes that could be a draft's: states log no more, and more are a prompt's chunk."""
        states = self._runner.kv.states
        return step.width if states is None else min(step.width, states.memory.num_nodes)

    def _reserve(self, request_id: int, count: int, certain: int = 0) -> None:
        if not self._runner.kv.reserve(request_id, count, certain):
            raise _too_small()

    def _seconds(self, step: MeasuredStep, spans: Sequence[Span]) -> float:
        """Pack and forward once. Both grow with the rows; what was reserved is rolled back."""
        runner = self._runner
        inputs = self._inputs(sum(len(span.token_ids) for span in spans), step.alike)
        try:
            for span in spans:
                self._reserve(span.request_id, step.width, certain=step.width - self._drafted(step))
            began = time.perf_counter()
            result = runner.forward(runner.pack(spans), inputs=inputs)
            seconds = time.perf_counter() - began
            self.experts[step] = result.experts_read
            return seconds
        finally:
            for span in spans:
                runner.kv.rollback(span.request_id)


def _too_small() -> ConfigError:
    return ConfigError(
        "the KV cache is too small for the steps to be measured: raise --kv-cache-memory, or take "
        "fewer or shorter --contexts or a smaller --max-num-seqs"
    )
