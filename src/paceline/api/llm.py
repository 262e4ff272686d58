"""The Python API: prompts in, completions out. What the command line itself uses.

Owns texts and callers; everything about tokens is the engine's.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

from paceline.api.batches import (
    Lora,
    Message,
    Prompt,
    adapters_for,
    batch_of,
    check_chats,
    check_keywords,
    for_stream,
    params_for,
    progress_bar,
    unpacked,
)
from paceline.api.outputs import Collector, GenerationOutput, Job
from paceline.build.build import BuiltEngine, build_engine
from paceline.build.default_drafts import EVERY_MODEL, default_speculative_config
from paceline.cache.memory_needs import bytes_per_block
from paceline.config import EngineConfig, SpeculativeConfig, parse_speculative_config
from paceline.core.errors import ConfigError, RequestError
from paceline.engine.engine import Engine
from paceline.engine.threads import EngineThread, Sink
from paceline.loading.adapter import load_adapter
from paceline.loading.catalogue import embedded_model as embedded_model
from paceline.loading.checkpoint import Checkpoint
from paceline.loading.fetching import named_model
from paceline.planner.cost_table import StepShape
from paceline.profiling.profile_store import stored_table
from paceline.request.engine_stats import EngineInfo, EngineStats
from paceline.request.request import Constraint, StepOutput, StopChecker
from paceline.request.sampling_params import SamplingParams, sampling_defaults
from paceline.sampling.logit_edits import in_token_ids
from paceline.structured.grammar import GrammarCompiler
from paceline.text.detokenizer import TextStream
from paceline.text.tokenizer import Tokenizer, answer_opening, resume_point

log = logging.getLogger(__name__)
Result = TypeVar("Result")
CURVE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Widths of a step whose predicted times are told."""
SpeculativeSource = (
    str
    | Mapping[str, Any]
    | SpeculativeConfig
    | Sequence[Mapping[str, Any] | SpeculativeConfig]
    | None
)


class LLM:
    """A model ready to generate. Callable from several threads; they share one batch.

    Args:
        model: folder, GGUF file, name or hub id, or a checkpoint that is open already.
        speculative_config: who drafts: JSON, a mapping, or a list of mappings, of which an empty
            one is plain decoding. None is the command line's default: ``suffix``, and the drafts
            in the model's folder. For a checkpoint that is open already it is ``suffix`` alone.
        lora: adapters that requests can ask for: by their names, the folders that PEFT wrote.
        options: fields of :class:`~paceline.config.EngineConfig`.

    Attributes:
        config: the engine's configuration, with what was found out where it said ``auto``.
        model: the model's name, for people.
        backend: what computes, for people.
        promises_identity: whether speculation changes no bit of the output.
        sampling_defaults: how answers are sampled where a request says nothing.

    Raises:
        ConfigError: no model is named, an unknown option (the allowed ones are listed), or a value
            out of range.
        ModelLoadError: the model cannot be read.

    >>> from paceline import LLM, SamplingParams
    >>> with LLM("embedded", speculative_config={"method": "prompt_lookup"}) as llm:
    ...     output = llm.generate("def add(a, b):", SamplingParams(max_tokens=4, temperature=0))
    >>> len(output.token_ids), str(output.finish_reason)
    (4, 'length')
    """

    def __init__(
        self,
        model: str | Checkpoint | None = None,
        *,
        speculative_config: SpeculativeSource = None,
        lora: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        if model is None:
            raise ConfigError(
                'LLM() needs a model: LLM("smollm2") is a small one (98 MB, fetched when it is '
                'first used), LLM("embedded") a tiny one that comes with Paceline; `paceline '
                "models` lists all that have a name"
            )
        allowed = [f.name for f in fields(EngineConfig) if f.name != "speculative"]
        for name in options:
            if name not in allowed:
                raise ConfigError(f"unknown option {name!r}; allowed: {', '.join(allowed)}")
        self._source = model
        speculative = self._speculative(speculative_config)
        options.setdefault("self_drafts", speculative_config is None)
        config = EngineConfig(speculative=speculative, **options)
        if isinstance(model, str):
            named_model(model)  # fetched on this thread, where an interrupt leaves nothing behind
        self._built: BuiltEngine
        self._thread = EngineThread(partial(self._build, model, config))
        self.config = self._built.config
        self.model = self._built.checkpoint.name
        self.backend = self._built.backend
        self.promises_identity = self._built.promises_identity
        shape, tokenizer = self.checkpoint.config, self.checkpoint.tokenizer
        num_blocks = self.call(lambda engine: engine.kv.pool.num_blocks)
        self.sampling_defaults = sampling_defaults(self.checkpoint.generation, self.checkpoint.card)
        self.kv_bytes = num_blocks * bytes_per_block(shape, self.config.kv_cache_dtype)
        resumes = shape.recurrent is not None and self.config.enable_prefix_caching
        self._opening = answer_opening(tokenizer) if resumes else []
        self._grammars = GrammarCompiler(tokenizer, shape.vocab_size, shape.eos_token_ids)
        try:
            for name, folder in (lora or {}).items():
                self.load_lora(name, folder)
        except BaseException:
            self.close()
            raise

    def _speculative(self, source: SpeculativeSource) -> tuple[SpeculativeConfig, ...]:
        if source is not None:
            return parse_speculative_config(source)
        if isinstance(self._source, Checkpoint):
            return EVERY_MODEL
        return default_speculative_config(self._source)

    def _build(self, model: str | Checkpoint, config: EngineConfig) -> Engine:
        self._built = build_engine(model, config, stored_table)
        engine = self._built.engine
        if config.speculative and config.planner == "auto" and not engine.cost.has_profile:
            log.info(
                "no profile of %s on this machine: the cost of a step is assumed at first and then "
                "learnt; `paceline profile MODEL` measures it",
                self._built.checkpoint.name,
            )
        return engine

    # --- prompts -------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """The target as it was found: its tokenizer (or None) and its generation defaults."""
        return self._built.checkpoint

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ``ConfigError`` where it has none."""
        tokenizer = self._built.checkpoint.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{self.model} has no tokenizer; pass token ids instead of text")
        return tokenizer

    def encode(self, prompt: Prompt, **template_options: Any) -> list[int]:
        """Token ids of a string, of token ids (as they are), or of a chat (a list of messages).

        Args:
            template_options: for the chat template of a chat: ``tools``, and names that the
                template mentions, such as ``enable_thinking``.

        Raises:
            RequestError: it is no prompt, or cannot be encoded.
            TypeError: nothing would read one of the options.
        """
        if template_options:
            is_chat = isinstance(prompt, Sequence) and isinstance(next(iter(prompt), None), Mapping)
            known = self.tokenizer.template_knows if is_chat else None
            check_keywords(template_options, known)
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        items: list[Any] = list(prompt) if isinstance(prompt, Sequence) else [prompt]
        if items and isinstance(items[0], Mapping):
            text = self.tokenizer.apply_chat_template(items, **template_options)
            return self.tokenizer.encode(text, add_special_tokens=False)
        if not all(type(item) is int for item in items):
            raise RequestError("a prompt is a string, a list of token ids, or a list of messages")
        return items

    # --- generating ----------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_finished: Callable[[int], None] | None = None,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> GenerationOutput: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_finished: Callable[[int], None] | None = None,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> list[GenerationOutput]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_finished: Callable[[int], None] | None = None,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Complete one prompt or a batch of prompts.

        A list of strings, of token-id lists or of chats is a batch, which runs as one. A single
        prompt gives one :class:`~paceline.api.outputs.GenerationOutput`, a batch a list in its
        order.

        Args:
            params: for all prompts, or one per prompt. Without them the model is sampled as
                ``sampling_defaults`` says, to its end or that of the context.
            progress: draw a progress bar on standard error.
            on_finished: called with the number of finished prompts whenever one finishes.
            cache_salt: prompts share cached prefixes only with those of the same salt.
            lora: the name of an adapter for all prompts, or one or None per prompt.
            template_options: for the chat template of a chat, as :meth:`encode` takes them.

        Raises:
            TypeError: nothing would read one of the keywords; the message lists those of
                :class:`~paceline.request.sampling_params.SamplingParams`.
            RequestError: a prompt or its parameters cannot be served; nothing was started then.
            RequestFailedError: a single prompt failed while it ran. In a batch the failed ones
                carry their ``error`` and their neighbours are complete.
        """
        batch, single = batch_of(prompts)
        wishes = params_for(params, len(batch), self.sampling_defaults.params())
        inbox: queue.SimpleQueue[Sequence[StepOutput]] = queue.SimpleQueue()
        encoded = [self.encode(prompt, **template_options) for prompt in batch]
        adapters = adapters_for(lora, len(batch))
        submitted = self.submit(encoded, wishes, inbox.put, cache_salt, adapters=adapters)
        collector = Collector(submitted)
        try:
            with progress_bar(len(batch)) if progress else nullcontext() as bar:
                while not collector.done:
                    for _ in filter(collector.take, inbox.get()):
                        for report in filter(None, (bar, on_finished)):
                            report(collector.num_finished)
        except BaseException:
            self.abort(collector.unfinished_ids)
            raise
        return unpacked(collector.outputs(), single)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_finished: Callable[[int], None] | None = None,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> GenerationOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_finished: Callable[[int], None] | None = None,
        cache_salt: str = "",
        lora: Lora = None,
        **template_options: Any,
    ) -> list[GenerationOutput]: ...
    def chat(self, messages: Any, *params: Any, **options: Any) -> Any:
        """The assistant's next message in one chat, or in each of a batch of them.

        Args:
            messages: of one chat, each with a ``role`` and a ``content``, or a list of chats.
            params: and all others as in :meth:`generate`.

        Raises:
            RequestError: something is not a chat; otherwise as in :meth:`generate`.
        """
        check_chats(messages)
        return self.generate(messages, *params, **options)

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        sink: Sink,
        cache_salt: str = "",
        on_added: Callable[[list[Job]], None] | None = None,
        adapters: Sequence[str | None] = (),
    ) -> list[Job]:
        """Add encoded prompts as one batch: all of them, or none when one is refused.

        Args:
            params: one per prompt.
            sink: called on the engine's thread, once per step, with what the step has for these
                prompts and all others of the same sink; it must be quick.
            on_added: called on the engine's thread before anything goes to the sink.
            adapters: the name of one, or None, per prompt; or no entries.

        Raises:
            RequestError: a prompt or its parameters cannot be served.
            UnknownAdapterError: an adapter is not loaded.
        """
        # Here, not on the engine's thread: grammars take their time to compile.
        params = [self._without_texts(wish) for wish in params]
        grammars = [self._constraints(wish) for wish in params]

        def add(engine: Engine) -> list[Job]:
            jobs: list[Job] = []
            given = adapters or [None] * len(prompts)
            try:
                for token_ids, wish, grammar, adapter in zip(
                    prompts, params, grammars, given, strict=True
                ):
                    stops = self._stop_checkers(token_ids, wish)
                    resume_at = resume_point(token_ids, self._opening)
                    ids = engine.add_request(
                        token_ids, wish, stops, cache_salt, grammar, resume_at, adapter
                    )
                    jobs.append(Job(token_ids, [engine.requests[i] for i in ids]))
                    for request_id in ids:
                        self._thread.attach(request_id, sink)
            except Exception:
                for job in jobs:
                    for request_id in job.ids:
                        engine.abort(request_id)
                raise
            if on_added is not None:
                on_added(jobs)
            return jobs

        return self._thread.call(add)

    def _without_texts(self, wish: SamplingParams) -> SamplingParams:
        """The parameters with token ids in place of ``bad_words``.

        Raises:
            RequestError: there are such words, and no tokenizer to spell them.
        """
        if not wish.bad_words:
            return wish
        tokenizer = self._built.checkpoint.tokenizer
        if tokenizer is None:
            raise RequestError.of(
                "bad_words", f"holds strings, and {self.model} has no tokenizer; use bad_words_ids"
            )
        return in_token_ids(wish, tokenizer.spellings)

    def _constraints(self, wish: SamplingParams) -> Sequence[Constraint]:
        """One per sample; none where the parameters ask for no structure."""
        spec = wish.structured_outputs
        return self._grammars.constraints(spec, wish.n) if spec is not None else []

    def _stop_checkers(self, token_ids: list[int], wish: SamplingParams) -> list[StopChecker]:
        """One per sample; none without a tokenizer.

        Raises:
            RequestError: there are stop strings, and no tokenizer to tell them by.
        """
        tokenizer = self._built.checkpoint.tokenizer
        if tokenizer is None:
            if wish.stop:
                raise RequestError.of(
                    "stop", f"holds strings, and {self.model} has no tokenizer; use stop_token_ids"
                )
            return []
        cut = wish.include_stop_str_in_output
        return [TextStream(tokenizer, token_ids, wish.stop, cut) for _ in range(wish.n)]

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests before the next step; their sinks hear of it. Unknown ids are ignored."""
        self._thread.abort(list(request_ids))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
        **template_options: Any,
    ) -> Iterator[StepOutput]:
        """Yield what each step adds to one prompt: token ids, text, log-probs and origins.

        Leaving the loop early ends the request. ``n`` must be 1.

        Raises:
            RequestError, RequestFailedError: as in :meth:`generate`.

        >>> with LLM("embedded", speculative_config=[]) as llm:
        ...     steps = list(llm.stream("import", SamplingParams(max_tokens=3, temperature=0)))
        >>> [len(step.token_ids) for step in steps], steps[0].origins
        ([1, 1, 1], ['target'])
        """
        wish = for_stream(params, self.sampling_defaults.params())
        inbox: queue.SimpleQueue[Sequence[StepOutput]] = queue.SimpleQueue()
        encoded = self.encode(prompt, **template_options)
        (job,) = self.submit([encoded], [wish], inbox.put, cache_salt, adapters=[lora])
        done = False
        try:
            while not done:
                (output,) = inbox.get()
                done = output.finish_reason is not None
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not done:
                self.abort(job.ids)

    # --- the engine ----------------------------------------------------------------------------

    def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function on the engine where it lives, between two steps; what measures it does so.

        >>> with LLM("embedded") as llm:
        ...     llm.call(lambda engine: engine.vocab_size)
        4096

        Raises:
            EngineClosedError: the engine is closed.
            Exception: whatever the function raises.
        """
        return self._thread.call(function)

    def set_speculation(self, speculative_config: SpeculativeSource) -> None:
        """Replace the proposers, also while requests run; their outputs do not change.

        Args:
            speculative_config: as in the constructor.

        >>> with LLM("embedded") as llm:
        ...     llm.set_speculation({"method": "prompt_lookup"})
        ...     llm.proposers
        ('prompt_lookup',)

        Raises:
            ConfigError: as in the constructor.
        """
        configs = self._speculative(speculative_config)
        # Drafts are loaded on the engine's thread too: see paceline.engine.threads.
        self._thread.call(lambda engine: engine.set_speculation(self._built.proposers_for(configs)))

    def load_lora(self, name: str, folder: str | Path, replaces: bool = False) -> None:
        """Load an adapter, also while requests run; then requests can ask for it by its name.

        Args:
            replaces: take the place of an adapter of that name; requests that have it keep it.

        Raises:
            ConfigError: there is an adapter of that name.
            ModelLoadError: it cannot be read, or is of another model.
            UnsupportedModelError: it is of a kind that is not supported.
        """
        if not name:
            raise ConfigError("the name of an adapter is empty")
        layers = load_adapter(folder, self.checkpoint.config, self.checkpoint.hf_config)
        self._thread.call(lambda engine: engine.load_adapter(name, layers, replaces))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Requests that have it go on with it; no other can ask for it.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        self._thread.call(lambda engine: engine.unload_adapter(name))

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the adapters that requests can ask for."""
        return self._thread.call(lambda engine: tuple(engine.adapters))

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names of the proposers that draft; one that could not be built is not among them."""
        return self._thread.call(
            lambda engine: tuple(proposer.name for proposer in engine.drafting.proposers)
        )

    def info(self) -> EngineInfo:
        """What does not change while the engine lives, as its server tells it."""
        return self.call(self._info)

    def _info(self, engine: Engine) -> EngineInfo:
        checkpoint, config, kv, cost = self.checkpoint, self.config, engine.kv, engine.cost
        shape, tokenizer = checkpoint.config, checkpoint.tokenizer
        num_blocks = kv.pool.num_blocks - 1
        steps = [StepShape(rows, 0, 0, rows, 1) for rows in CURVE_ROWS]
        return EngineInfo(
            model=checkpoint.name,
            # A prompt with its answer has to fit into the KV cache, which can be smaller than the
            # context.
            max_model_len=min(config.max_model_len, num_blocks * kv.block_size),
            vocab_size=engine.vocab_size,
            dtype=checkpoint.arithmetic(config.dtype),
            backend=self.backend,
            promises_identity=self.promises_identity,
            proposers=tuple(each.name for each in engine.drafting.proposers),
            max_num_seqs=config.max_num_seqs,
            kv_blocks_total=num_blocks,
            block_size=kv.block_size,
            cost_curve=tuple((step.rows, cost.predict(step)) for step in steps),
            has_profile=cost.has_profile,
            sampling=self.sampling_defaults,
            architecture=checkpoint.hf_config.get("model_type") or shape.architecture,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_bytes=checkpoint.num_bytes,
            kv_bytes=self.kv_bytes,
            num_weights=shape.num_weights,
            longest_token=0 if tokenizer is None else tokenizer.longest_token,
            pooling=checkpoint.pooling,
        )

    def stats(self) -> EngineStats:
        """A consistent snapshot of the counters, from any thread."""
        return self._thread.call(lambda engine: engine.stats())

    def reset_stats(self) -> None:
        """Count from zero on."""
        self._thread.call(lambda engine: engine.reset_stats())

    def prepare_grammars(self) -> None:
        """Make what structured outputs need of the vocabulary, before a request asks for one.

        Otherwise the first such request does, and others stand still: a second where the vocabulary
        is very large. A server does so at its start.
        """
        self._grammars.prepare()

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep their KV; outputs do not change."""
        self._thread.call(lambda engine: engine.kv.flush_prefixes())

    def close(self) -> None:
        """Stop the engine; requests in flight end with an error. Closing twice is allowed."""
        self._thread.close()
        self._grammars.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
