"""What the Python API returns. Owns the collection of a request's steps into a completion."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.request.engine_stats import SpeculationCounters
from paceline.request.request import Request, StepOutput, TokenLogprobs


@dataclass(slots=True)
class Completion:
    """One sample of one prompt.

    Attributes:
        index: which of the ``n`` samples.
        token_ids: emitted tokens, the end-of-sequence token included.
        origins: for each token the proposer that drafted it, or ``target``.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: the stop string or stop token id that matched.
        counters: what speculation did for this sample.
        time_to_first_token: seconds from the submission of its batch to its first token; None
            before.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)
    error: Exception | None = None
    time_to_first_token: float | None = field(default=None, compare=False)

    def add(self, output: StepOutput) -> None:
        """Append what a step added."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.origins += output.origins
        self.logprobs += output.logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error = output.error


@dataclass(slots=True)
class GenerationOutput:
    """Everything generated for one prompt.

    ``text``, ``token_ids``, ``logprobs`` and ``finish_reason`` are those of sample 0.

    Attributes:
        prompt_token_ids: what the prompt was encoded to.
        completions: one per sample.
        prompt_logprobs: one per token of the prompt, where they were asked for.
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def outputs(self) -> list[Completion]:
        """The completions, by vLLM's name for them."""
        return self.completions

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def error(self) -> Exception | None:
        """Of the first sample that failed; None where none did."""
        return next((c.error for c in self.completions if c.error is not None), None)


@dataclass(slots=True)
class Job:
    """A submitted prompt and its requests, which are kept to read their counters at the end."""

    prompt_token_ids: list[int]
    requests: list[Request]

    @property
    def ids(self) -> list[int]:
        return [request.request_id for request in self.requests]


class Collector:
    """Gathers the steps of a batch of jobs until all of them have ended."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._completions = {
            request.request_id: Completion(request.sample_index)
            for job in jobs
            for request in job.requests
        }
        self._job_of = {request_id: job for job in jobs for request_id in job.ids}
        self.num_finished = 0
        self._began = time.perf_counter()

    @property
    def done(self) -> bool:
        return self.num_finished == len(self._jobs)

    def take(self, output: StepOutput) -> bool:
        """Add a step; True when a whole job ended with it."""
        completion = self._completions[output.request_id]
        if output.token_ids and completion.time_to_first_token is None:
            completion.time_to_first_token = time.perf_counter() - self._began
        completion.add(output)
        ids = self._job_of[output.request_id].ids
        has_ended = all(self._completions[i].finish_reason is not None for i in ids)
        self.num_finished += has_ended
        return has_ended

    @property
    def unfinished_ids(self) -> list[int]:
        return [i for i, each in self._completions.items() if each.finish_reason is None]

    def outputs(self) -> list[GenerationOutput]:
        """One per job, in order."""
        for job in self._jobs:
            for request in job.requests:
                self._completions[request.request_id].counters = request.counters
        return [
            GenerationOutput(
                job.prompt_token_ids,
                [self._completions[i] for i in job.ids],
                job.requests[0].prompt_logprobs,
            )
            for job in self._jobs
        ]
