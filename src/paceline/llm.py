"""The Python API: prompts in, completions out. What the command line itself uses.

Owns texts and callers; everything about tokens is the engine's.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.config import EngineConfig, parse_speculative_config
from paceline.engine.build import BuiltEngine, build_engine
from paceline.engine.engine import Engine
from paceline.engine.engine_thread import EngineThread
from paceline.errors import ConfigError, RequestError
from paceline.metrics import EngineStats, SpeculationCounters
from paceline.models.checkpoint import Checkpoint
from paceline.models.detokenizer import TextStream
from paceline.models.tokenizer import Tokenizer
from paceline.request import Request, StepOutput, StopChecker, TokenLogprobs
from paceline.sampling_params import SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
SpeculativeSource = str | Mapping[str, Any] | Sequence[Any] | None


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
    """Everything generated for one prompt; ``text`` and ``token_ids`` are those of sample 0."""

    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def error(self) -> Exception | None:
        return next((c.error for c in self.completions if c.error is not None), None)


@dataclass(slots=True)
class _Job:
    """A submitted prompt: its requests by id, kept alive to read their counters at the end."""

    prompt_token_ids: list[int]
    requests: list[Request] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [request.request_id for request in self.requests]

    def output(self, collected: Mapping[int, Completion]) -> GenerationOutput:
        for request in self.requests:
            collected[request.request_id].counters = request.counters
        return GenerationOutput(
            self.prompt_token_ids,
            [collected[i] for i in self.ids],
            self.requests[0].prompt_logprobs,
        )


class LLM:
    """A model ready to generate. Callable from several threads; they share one batch.

    Args:
        model: folder, GGUF file or hub id, or a checkpoint that is open already; None is the
            embedded model.
        speculative_config: JSON, a mapping, or a list of mappings; None decodes plainly.
        options: fields of :class:`~paceline.config.EngineConfig`.

    Raises:
        ConfigError: an unknown option (the allowed ones are listed) or a value out of range.
        ModelLoadError: the model cannot be read.

    >>> from paceline import LLM, SamplingParams
    >>> with LLM(speculative_config={"method": "prompt_lookup"}) as llm:
    ...     output = llm.generate("def add(a, b):", SamplingParams(max_tokens=4, temperature=0))
    >>> len(output.token_ids), str(output.finish_reason)
    (4, 'length')
    """

    def __init__(
        self,
        model: str | Checkpoint | None = None,
        *,
        speculative_config: SpeculativeSource = None,
        **options: Any,
    ) -> None:
        allowed = [f.name for f in fields(EngineConfig) if f.name != "speculative"]
        for name in options:
            if name not in allowed:
                raise ConfigError(f"unknown option {name!r}; allowed are {', '.join(allowed)}")
        speculative = parse_speculative_config(speculative_config)
        config = EngineConfig(speculative=speculative, **options)
        self._built: BuiltEngine = build_engine(model or embedded_model("target"), config)
        self._thread = EngineThread(self._built.engine)
        self.config = self._built.config
        self.model = self._built.checkpoint.name
        self.promises_identity = self._built.promises_identity

    # --- prompts -------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._built.checkpoint.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{self.model} has no tokenizer; pass token ids instead of text")
        return tokenizer

    def encode(self, prompt: Prompt, **template_options: Any) -> list[int]:
        """Token ids of a string, of token ids (as they are), or of a chat (a list of messages)."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            text = self.tokenizer.apply_chat_template(items, **template_options)
            return self.tokenizer.encode(text, add_special_tokens=False)
        if not all(isinstance(item, int) for item in items):
            raise RequestError("a prompt is a string, a list of token ids, or a list of messages")
        return items

    # --- generating ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_finished: Callable[[int], None] | None = None,
    ) -> Any:
        """Complete one prompt or a batch of prompts.

        A list of strings, of token-id lists or of chats is a batch, which runs as one. A single
        prompt gives one :class:`GenerationOutput`, a batch gives a list in its order.

        Args:
            params: for all prompts, or one per prompt.
            progress: draw a progress bar on standard error.
            on_finished: called with the number of finished prompts whenever one finishes.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was started then.
            RequestFailedError: a single prompt failed while it ran. In a batch the failed ones
                carry their ``error`` and their neighbours are complete.
        """
        single = _is_single(prompts)
        batch: list[Any] = [prompts] if single else list(prompts)
        wishes = _params_for(params, len(batch))
        with _progress_bar(len(batch)) if progress else nullcontext(on_finished) as report:
            outputs = self._run(batch, wishes, report)
        if not single:
            return outputs
        if outputs[0].error is not None:
            raise outputs[0].error
        return outputs[0]

    def _run(
        self,
        prompts: list[Any],
        params: list[SamplingParams],
        on_finished: Callable[[int], None] | None,
    ) -> list[GenerationOutput]:
        inbox: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        jobs = self._submit(prompts, params, inbox.put)
        collected = _completions(jobs)
        owner = {i: job for job, entry in enumerate(jobs) for i in entry.ids}
        open_ids = [set(job.ids) for job in jobs]
        pending, finished = len(collected), 0
        try:
            while pending:
                output = inbox.get()
                collected[output.request_id].add(output)
                if output.finish_reason is not None:
                    pending -= 1
                    left = open_ids[owner[output.request_id]]
                    left.discard(output.request_id)
                    if not left:
                        finished += 1
                        if on_finished is not None:
                            on_finished(finished)
        except BaseException:
            self._thread.abort([i for i, c in collected.items() if c.finish_reason is None])
            raise
        return [job.output(collected) for job in jobs]

    def _submit(
        self, prompts: list[Any], params: list[SamplingParams], sink: Callable[[StepOutput], None]
    ) -> list[_Job]:
        encoded = [self.encode(prompt) for prompt in prompts]
        tokenizer = self._built.checkpoint.tokenizer

        def checkers(token_ids: list[int], wish: SamplingParams) -> list[StopChecker]:
            if tokenizer is None:
                return []
            cut = wish.include_stop_str_in_output
            return [TextStream(tokenizer, token_ids, wish.stop, cut) for _ in range(wish.n)]

        def add(engine: Engine) -> list[_Job]:
            jobs: list[_Job] = []
            try:
                for token_ids, wish in zip(encoded, params, strict=True):
                    ids = engine.add_request(token_ids, wish, checkers(token_ids, wish))
                    jobs.append(_Job(token_ids, [engine.requests[i] for i in ids]))
                    for request_id in ids:
                        self._thread.attach(request_id, sink)
            except Exception:
                for job in jobs:
                    for request_id in job.ids:
                        engine.abort(request_id)
                raise
            return jobs

        return self._thread.call(add)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[StepOutput]:
        """Yield what each step adds to one prompt: token ids, text, log-probs and origins.

        Leaving the loop early ends the request. ``n`` must be 1.

        Raises:
            RequestError, RequestFailedError: as in :meth:`generate`.
        """
        inbox: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        job = self._start_stream(prompt, params, inbox.put, template_options)
        done = False
        try:
            while not done:
                output = inbox.get()
                done = output.finish_reason is not None
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not done:
                self._thread.abort(job.ids)

    def _start_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        sink: Callable[[StepOutput], None],
        template_options: Mapping[str, Any],
    ) -> _Job:
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream carries one sample, use generate()")
        return self._submit([self.encode(prompt, **template_options)], [params], sink)[0]

    # --- the engine ----------------------------------------------------------------------------

    def set_speculation(self, speculative_config: SpeculativeSource) -> None:
        """Replace the proposers, also while requests run; their outputs do not change.

        Raises:
            ConfigError: as in the constructor.
        """
        proposers = self._built.proposers_for(parse_speculative_config(speculative_config))
        self._thread.call(lambda engine: engine.set_speculation(proposers))

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names of the proposers that draft; one that could not be built is not among them."""
        return self._thread.call(
            lambda engine: tuple(proposer.name for proposer in engine.drafting.proposers)
        )

    def stats(self) -> EngineStats:
        """A consistent snapshot of the counters, from any thread."""
        return self._thread.call(lambda engine: engine.stats())

    def reset_stats(self) -> None:
        self._thread.call(lambda engine: engine.reset_stats())

    def close(self) -> None:
        """Stop the engine; requests in flight end with an error. Closing twice is allowed."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLLM(LLM):
    """The same for asyncio: ``await llm.agenerate(..)``, ``async for x in llm.astream(..)``."""

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Any:
        """:meth:`LLM.generate` without blocking the event loop."""
        return await asyncio.to_thread(self.generate, prompts, params)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **template_options: Any
    ) -> AsyncIterator[StepOutput]:
        """:meth:`LLM.stream` without blocking the event loop; cancelling it ends the request."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[StepOutput] = asyncio.Queue()

        def sink(output: StepOutput) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, output)

        job = await asyncio.to_thread(self._start_stream, prompt, params, sink, template_options)
        done = False
        try:
            while not done:
                output = await inbox.get()
                done = output.finish_reason is not None
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not done:
                self._thread.abort(job.ids)


def embedded_model(name: str) -> str:
    """Folder of an embedded model: ``target`` or ``draft``."""
    from importlib.resources import files

    return str(files("paceline") / "embedded" / name)


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda finished: bar.update(task, completed=finished)


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    return bool(prompts) and isinstance(prompts[0], int | Mapping)


def _params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts")
    return list(params)


def _completions(jobs: Sequence[_Job]) -> dict[int, Completion]:
    return {
        request.request_id: Completion(request.sample_index)
        for job in jobs
        for request in job.requests
    }
