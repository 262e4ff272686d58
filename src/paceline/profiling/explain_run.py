"""One prompt, answered with its planner recorded and then plainly, for comparison.

A warm-up comes first, because what a program does for the first time is slow: an unrelated text is
continued with drafts and without. It leaves no trace: planner and cost model have stand-ins
meanwhile, and proposers forget the request before it ends. Knows no text and no screen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from paceline.core.speedup import Arm, Claim, Round, claim
from paceline.engine.engine import Engine
from paceline.planner.cost import CostModel
from paceline.planner.planner import PLANNERS, Planner
from paceline.profiling.chrome_trace import StepClock, StepTimes
from paceline.profiling.explain import RecordingPlanner, StepRecord, recording
from paceline.request.request import Constraint, Request
from paceline.request.sampling_params import SamplingParams

Advance = Callable[[int], None]
NUM_TOKENS = 32
"""Tokens that each part of the warm-up generates at least, if there is time."""
MOST_SECONDS = 0.5
"""Of each part: where all steps take long, a slow first one matters little."""
PROMPT_LENGTH, PERIOD = 24, 8
"""Tokens of the text, and after how many it repeats itself: there must be something to draft."""
SALT = "paceline warm-up"
"""Prompts of other salts see nothing of what is cached here."""


@dataclass(frozen=True, slots=True)
class ExplainedRun:
    """One answer and the steps that made it."""

    token_ids: list[int]
    steps: list[StepTimes]

    def elapsed_ms(self) -> list[float]:
        """Decode time when each token after the first was there; the first ends the prompt."""
        times: list[float] = []
        milliseconds = 0.0
        for step in self._decoding():
            milliseconds += step.milliseconds
            times += [milliseconds] * step.num_output_tokens
        return times

    def arm(self) -> Arm:
        """The run as one arm of a comparison, from the end of the prompt on."""
        decoding = self._decoding()
        return Arm(
            seconds=sum(step.milliseconds for step in decoding) / 1e3,
            steps=len(decoding),
            longest=len(decoding),
            drafted=sum(step.num_draft_tokens for step in decoding),
        )

    def _decoding(self) -> list[StepTimes]:
        """The steps after the one that ended the prompt."""
        made = (i for i, step in enumerate(self.steps, start=1) if step.num_output_tokens > 0)
        return self.steps[next(made, len(self.steps)) :]


@dataclass(frozen=True)
class Explanation:
    """Both answers; ``records`` are the latest steps of the speculative run."""

    prompt_token_ids: list[int]
    speculative: ExplainedRun
    plain: ExplainedRun
    records: list[StepRecord]

    @property
    def token_ids(self) -> list[int]:
        return self.speculative.token_ids

    def claim(self) -> Claim:
        """What one run of each tells about the speed of decoding, where outputs are identical."""
        return claim([[Round(self.plain.arm(), self.speculative.arm())]])

    @property
    def is_identical(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids

    def emitted_by(self, record: StepRecord) -> slice:
        """Where the tokens of a step are in the answer; empty while the prompt is read."""
        if not record.requests:
            return slice(0, 0)
        part = record.requests[0]
        start = part.position - len(self.prompt_token_ids)
        return slice(start, start + len(part.token_ids))

    @cached_property
    def speedups(self) -> list[float]:
        """Plain over speculative decode time up to each token after the first, of both runs."""
        pairs = zip(self.plain.elapsed_ms(), self.speculative.elapsed_ms(), strict=False)
        return [plain / speculative for plain, speculative in pairs]


def explain(
    engine: Engine,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    advance: Advance = lambda tokens: None,
    constraints: Sequence[Constraint] = (),
) -> Explanation:
    """Answer a prompt speculatively and then plainly, after a warm-up.

    Call it where the engine lives, while it has no other requests.

    Args:
        params: with a seed and ``n`` 1, so that both runs say the same.
        advance: gets the number of tokens so far, both runs together.
        constraints: one per run where ``params.structured_outputs`` is given, else none.

    Raises:
        RequestError, RequestFailedError: the prompt cannot be served, or failed while it ran.
    """
    warm_up(engine, params)
    proposers = engine.drafting.proposers
    with recording(engine) as recorder:
        speculative = _run(engine, prompt_token_ids, params, advance, constraints[:1])
    done = len(speculative.token_ids)
    engine.set_speculation([])
    try:
        plain = _run(
            engine,
            prompt_token_ids,
            params,
            lambda tokens: advance(done + tokens),
            constraints[1:],
        )
    finally:
        engine.set_speculation(proposers)
    return Explanation(list(prompt_token_ids), speculative, plain, list(recorder.steps))


def _run(
    engine: Engine,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    advance: Advance,
    constraints: Sequence[Constraint],
) -> ExplainedRun:
    (request_id,) = engine.add_request(prompt_token_ids, params, constraints=constraints)
    token_ids: list[int] = []
    clock = StepClock(engine).start()
    try:
        while request_id in engine.requests:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                token_ids += output.token_ids
            advance(len(token_ids))
    finally:
        clock.stop()
    return ExplainedRun(token_ids, list(clock.steps))


def warm_up(engine: Engine, params: SamplingParams) -> None:
    """Run an idle engine a little, with its proposers and without. Call it where the engine lives.

    It sets statistics back, and changes neither drafts nor plans. Does nothing where the context is
    too short. Of ``params``, length, ends and structure do not count.
    """
    context, proposers = engine.config.max_model_len, engine.drafting.proposers
    longest = max((each.config.num_speculative_tokens for each in proposers), default=0)
    length = 2 * (NUM_TOKENS + longest + 1)  # a part ends with the step that has enough
    if context is None or context < PROMPT_LENGTH + length:
        return
    unended = replace(params, n=1, max_tokens=length, min_tokens=0, structured_outputs=None)
    unended = replace(unended, ignore_eos=True, stop=(), stop_token_ids=())
    for name in ("fixed", engine.config.planner):  # the first of them drafts whatever it costs
        with _stand_ins(engine, name):
            try:
                engine.set_speculation(proposers)
                _run_once(engine, unended)
            finally:
                engine.set_speculation(proposers)
    engine.reset_stats()


@contextmanager
def _stand_ins(engine: Engine, planner: str) -> Iterator[None]:
    """Let a planner of this name and a cost model of their own plan and learn meanwhile."""
    drafting, real = engine.drafting, (engine.drafting.planner, engine.cost)
    engine.cost = CostModel(engine.cost.table)
    stand_in = PLANNERS[planner](engine.cost, engine.config.objective)
    drafting.planner = cast(Planner, RecordingPlanner(stand_in))
    try:
        yield
    finally:
        drafting.planner, engine.cost = real


def _run_once(engine: Engine, params: SamplingParams) -> None:
    """One request, with drafts until its proposers forget it, and then without."""
    tokens = [1 + 7 * (i % PERIOD) % (engine.vocab_size - 1) for i in range(PROMPT_LENGTH)]
    (request_id,) = engine.add_request(tokens, params, cache_salt=SALT)
    request = engine.requests[request_id]
    _advance(engine, request)
    engine.drafting.finish(request)
    engine.set_speculation([])
    _advance(engine, request)
    engine.abort(request_id)
    engine.step()


def _advance(engine: Engine, request: Request) -> None:
    """One part: steps until there are :data:`NUM_TOKENS` more, or the time is over."""
    until = request.num_output_tokens + NUM_TOKENS
    deadline = time.perf_counter() + MOST_SECONDS
    while request.finish_reason is None and request.num_output_tokens < until:
        engine.step()
        if time.perf_counter() > deadline:
            break
