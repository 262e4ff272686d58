"""One prompt, answered with its planner recorded and then plainly, for comparison.

Owns the order of warm-up and runs and the figures that compare them. Knows no text and no screen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.engine.engine import Engine
from paceline.request import Constraint
from paceline.sampling_params import SamplingParams
from paceline.workbench.chrome_trace import StepClock, StepTimes
from paceline.workbench.explain import recording
from paceline.workbench.explain_steps import StepRecord
from paceline.workbench.explain_warmup import warm_up

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer and the steps that made it."""

    token_ids: list[int]
    steps: list[StepTimes]

    def elapsed_ms(self) -> list[float]:
        """Decode time when each token after the first was there; the first ends the prompt."""
        found: list[float] = []
        milliseconds = 0.0
        is_decoding = False
        for step in self.steps:
            if is_decoding:
                milliseconds += step.milliseconds
                found += [milliseconds] * step.num_output_tokens
            is_decoding = is_decoding or step.num_output_tokens > 0
        return found


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :func:`explain` found.

    Attributes:
        records: steps of the speculative run, the oldest first.
        num_dropped: older ones that were not kept.
    """

    prompt_token_ids: list[int]
    speculative: Run
    plain: Run
    records: list[StepRecord]
    num_dropped: int

    @property
    def num_steps(self) -> int:
        """Of the speculative run, those that were not kept included."""
        return self.num_dropped + len(self.records)

    @property
    def token_ids(self) -> list[int]:
        return self.speculative.token_ids

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

    def speedups(self) -> list[float]:
        """Plain over speculative decode time up to each token after the first.

        As far as both runs go; they are equally long where outputs are identical.
        """
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
        advance: told the number of tokens so far, both runs together.
        constraints: one per run where ``params.structured_outputs`` is given, else none.

    Raises:
        RequestError: the prompt or its parameters cannot be served.
        RequestFailedError: it failed while it ran.
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
    return Explanation(
        list(prompt_token_ids), speculative, plain, list(recorder.steps), recorder.num_dropped
    )


def _run(
    engine: Engine,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    advance: Advance,
    constraints: Sequence[Constraint],
) -> Run:
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
    return Run(token_ids, list(clock.steps))
