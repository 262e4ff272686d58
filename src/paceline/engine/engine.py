"""The engine: one step of speculative decoding for all live requests.

    schedule -> propose -> plan -> pack -> forward -> verify -> commit -> observe

``step`` reads as these verbs. It knows no tokenizer, no model family and no device. It is not
thread-safe; :mod:`paceline.engine.threads` is what several callers share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter

from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import EngineConfig
from paceline.config.speculative import GrammarConfig
from paceline.core.errors import ConfigError, RequestFailedError, UnknownAdapterError
from paceline.engine.admission import Admission
from paceline.engine.commit import Committed, commit_step, step_output
from paceline.engine.drafting import Drafting
from paceline.engine.prompt_results import take_pooled, take_prompt_logprobs
from paceline.engine.scheduler import Scheduler
from paceline.engine.statistics import Statistics
from paceline.engine.step import Scheduled, Step, step_shape
from paceline.engine.verifier import Verdict, verify
from paceline.models.backend import AdaptedLayers, PackedBatch
from paceline.planner.cost import CostModel
from paceline.planner.planner import FixedPlanner, Planner
from paceline.proposers.base import Proposer
from paceline.proposers.grammar import GrammarProposer
from paceline.request.engine_stats import EngineStats
from paceline.request.request import (
    Adapter,
    Constraint,
    FinishReason,
    Request,
    RequestStatus,
    StepOutput,
    StopChecker,
)
from paceline.request.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class Engine:
    """Serves requests with one target model and any number of proposers.

    Args:
        runner: the target model with its KV cache.
        config: limits; ``config.max_model_len`` must be resolved.
        proposers: draft for the requests; their trees are merged.
        eos_token_ids: tokens that end a request unless it ignores them.
        planner: chooses which draft nodes are verified.
        cost: what steps cost; the engine teaches it.
        clock: seconds; steps and proposers are timed by it. None is the machine's.

    Attributes:
        close: lets go of whatever computes for it in other processes; it does not step after that.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        proposers: Sequence[Proposer] = (),
        eos_token_ids: Sequence[int] = (),
        planner: Planner | None = None,
        cost: CostModel | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.runner = runner
        self.kv = runner.kv
        self.config = config
        self.vocab_size = runner.decoder.config.vocab_size
        self._last_tap = runner.decoder.config.num_layers + 1  # the states after the last norm
        self.cost = cost or CostModel()
        self.scheduler = Scheduler(config, self.kv, self.cost)
        self.requests: dict[int, Request] = {}
        self.adapters: dict[str, Adapter] = {}
        self._stats = EngineStats()
        self.clock = clock or time.perf_counter
        self.close: Callable[[], None] = lambda: None
        self._admission = Admission(config, self.vocab_size, eos_token_ids)
        self._aborted: list[int] = []
        self.drafting = Drafting(
            proposers, planner or FixedPlanner(), self.vocab_size, self._stats, clock
        )
        self._statistics = Statistics(self._stats, runner, self.drafting, self.scheduler)

    # --- the step ------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Advance every live request by at least one token or one prefill chunk."""
        outputs = self._end_aborted() if self._aborted else []
        step = self._schedule()
        if not step.items:
            return outputs
        try:
            drafted = self._propose(step)
            self._plan(step, drafted)
        except Exception as error:
            log.warning("drafting failed; the step goes on plainly: %r", error)
            step.drop_drafts()
        try:
            batch = self._pack(step)
            result = self._forward(step, batch)
            verdicts = self._verify(step, result)
        except Exception as error:
            verdicts = self._isolate(step, error)
        committed = self._commit(step, verdicts)
        self._observe(step, committed)
        return [*outputs, *map(itemgetter(2), committed)]

    def _schedule(self) -> Step:
        """One span per request that takes part, with room for it in the KV cache."""
        step = Step(self._stats.seconds, self.clock)
        step.items = self.scheduler.schedule()
        step.shape = step_shape(step.items)
        step.room = self.config.max_num_batched_tokens - step.shape.rows
        for request in self.scheduler.preempted:
            self._stats.num_preemptions += 1
            self.drafting.finish(request)
        step.done("schedule")
        return step

    def _propose(self, step: Step) -> list[Scheduled]:
        """Let the proposers draft that the planner asks; the items with a draft to choose from."""
        drafted = self.drafting.propose(step.items, step.shape, step.room)
        step.done("propose")
        return drafted

    def _plan(self, step: Step, drafted: Sequence[Scheduled]) -> None:
        """Choose the nodes to verify; each item then carries them, their slots reserved."""
        if not drafted:
            return
        trees = self.drafting.choose(drafted, step.room)
        for item, tree in zip(drafted, trees, strict=True):
            request, size = item.request, len(tree.token_ids)
            request.num_pruned_tokens += item.num_drafted - size
            if size and self.kv.reserve(request.request_id, 1 + size):
                item.draft = tree
                self._statistics.count_draft(tree)
        step.shape = step_shape(step.items)
        step.done("plan")

    def _pack(self, step: Step) -> PackedBatch:
        """All spans as one batch of flat arrays."""
        spans = [item.span() for item in step.items]
        adapters = [*map(attrgetter("request.adapter"), step.items)]
        weights = [adapter and adapter.weights for adapter in adapters] if any(adapters) else ()
        batch = self.runner.pack(spans, weights)
        step.done("pack")
        return batch

    def _forward(self, step: Step, batch: PackedBatch) -> ForwardResult:
        """The target's logits at every node that is sampled."""
        runner, requests = self.runner, [*map(attrgetter("request"), step.items)]
        taps = self.drafting.taps(requests)
        if any(map(attrgetter("params.pooling"), requests)):
            taps = tuple(sorted({*taps, self._last_tap}))
        step.taps = runner.taps = taps
        before = runner.seconds
        result = runner.forward(batch, greedy=all(map(attrgetter("wants_argmax"), requests)))
        step.forward_ms = (runner.seconds - before) * 1e3
        if result.features is not None:
            step.share(result.features)
        if result.experts_read:
            experts, fetched = result.experts_read, result.experts_fetched
            step.shape = step.shape._replace(experts=experts, fetched=fetched)
        self._statistics.count_forward(step.shape)
        step.done("forward")
        return result

    def _verify(self, step: Step, result: ForwardResult) -> list[Verdict | None]:
        """What each item emits; None for a prefill chunk that does not reach the last token."""
        if result.argmax is None:  # otherwise no request wants log-probs
            take_prompt_logprobs(step.items, result)
        if self._last_tap in step.taps:
            take_pooled(step.items, step.taps.index(self._last_tap))
        verdicts = verify(result, step.items)
        step.done("verify")
        return verdicts

    def _isolate(self, step: Step, error: Exception) -> list[Verdict | None]:
        """Undo a failed step; run its requests one by one, without drafts: only the cause fails."""
        items = step.items
        log.warning(
            "a step of %d requests failed and is run again one by one: %r", len(items), error
        )
        for item in items:
            self.kv.rollback(item.request.request_id)
        step.drop_drafts()
        verdicts = [self._alone(step, item) for item in items]
        step.items, step.forward_ms = items, 0.0
        step.shape = step_shape(step.items)
        return verdicts

    def _alone(self, step: Step, item: Scheduled) -> Verdict | None:
        """The verdict on one item of a failed step, which is run again with that item alone."""
        request_id = item.request.request_id
        step.items = [item]
        step.shape = step_shape(step.items)
        try:
            # The failed step held these blocks, and no other request took them since.
            reserved = self.kv.reserve(request_id, item.num_tokens, item.certain)
            assert reserved
            return self._verify(step, self._forward(step, self._pack(step)))[0]
        except Exception as error:
            self.kv.rollback(request_id)
            verdict = RequestFailedError(f"the forward failed for this request: {error!r}")
            verdict.__cause__ = error
            return verdict

    def _commit(self, step: Step, verdicts: Sequence[Verdict | None]) -> list[Committed]:
        """Append the emitted tokens up to each request's end, and keep the KV of that path."""
        committed = commit_step(step.items, verdicts, self._aborted, self.kv, self._stats)
        step.done("commit")
        return committed

    def _observe(self, step: Step, committed: Sequence[Committed]) -> None:
        """Let cost model, planner and proposers learn, and end requests that are finished."""
        try:
            self.cost.observe(step.shape, step.forward_ms)
        except Exception as error:
            log.warning("what a step takes was not learnt from: %r", error)
        if step.taps:
            self.drafting.read(step.items, step.taps)
        emitted, learns = 0, self.drafting.is_active
        for request, verdict, _ in committed:
            if verdict is not None:
                emitted += len(verdict.token_ids)
                if learns:
                    self.drafting.observe(request, verdict)
            if request.finish_reason is not None:
                self._end(request, request.finish_reason)
        step.done("observe")
        self.drafting.end(step.items, step.shape, emitted, step.forward_ms, step.total_ms)

    # --- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop_checkers: Sequence[StopChecker] = (),
        cache_salt: str = "",
        constraints: Sequence[Constraint] = (),
        resume_at: int = 0,
        adapter: str | None = None,
    ) -> list[int]:
        """Queue a prompt; returns one request id per sample (``params.n`` of them).

        Args:
            stop_checkers: one per sample, or none at all.
            constraints: one per sample where ``params.structured_outputs`` is given, else none.
            resume_at: up to where a later prompt is likely to be the same, as the next turn of a
                chat is; there a state of recurrent layers is kept. 0: that is not known.
            adapter: the name of one that is loaded; None: the model as it is.

        Raises:
            UnknownAdapterError: there is no such adapter.
            RequestError: the prompt is empty, does not fit, or names tokens outside the vocabulary.
        """
        assert not params.bad_words, "words are the caller's to spell in tokens"
        assert len(constraints) == (params.n if params.structured_outputs is not None else 0)
        group = self._admission.requests(
            prompt_token_ids,
            params,
            stop_checkers,
            cache_salt,
            constraints,
            resume_at,
            None if adapter is None else self.adapter(adapter),
        )
        for request in group:
            self.scheduler.add(request)
            self.requests[request.request_id] = request
        if constraints:
            self._draft_grammars()
        self._stats.num_requests += len(group)
        self._stats.num_prompt_tokens += len(prompt_token_ids)
        return [request.request_id for request in group]

    def abort(self, request_id: int) -> None:
        """End a request. In the middle of a step it takes effect when the step commits."""
        self._aborted.append(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.kv.publish_end(request.request_id, request.token_ids)
        self.scheduler.remove(request)
        self.drafting.end_request(request)
        del self.requests[request.request_id]
        self._statistics.count_end(request, reason)

    def _end_aborted(self) -> list[StepOutput]:
        aborted, self._aborted = self._aborted, []
        live = [self.requests[i] for i in dict.fromkeys(aborted) if i in self.requests]
        for request in live:
            self._end(request, FinishReason.ABORT)
        return [step_output(request, None) for request in live]

    # --- adapters ------------------------------------------------------------------------------

    def load_adapter(self, name: str, layers: AdaptedLayers, replaces: bool = False) -> None:
        """Let requests ask for an adapter; ``ConfigError`` where one has its name and stays."""
        if name in self.adapters and not replaces:
            raise ConfigError(f"an adapter named {name!r} is loaded already; unload it first")
        self.adapters[name] = Adapter(name, self.runner.adapter(layers))

    def unload_adapter(self, name: str) -> None:
        """Let no further request ask for an adapter; ``UnknownAdapterError`` without it."""
        self.adapter(name)
        del self.adapters[name]

    def adapter(self, name: str) -> Adapter:
        """The adapter of a name; raises UnknownAdapterError where there is none."""
        adapter = self.adapters.get(name)
        if adapter is None:
            known = ", ".join(self.adapters) or "none"
            raise UnknownAdapterError(f"no adapter {name[:100]!r} is loaded; loaded: {known}")
        return adapter

    # --- the rest ------------------------------------------------------------------------------

    def set_speculation(self, proposers: Sequence[Proposer]) -> None:
        """Replace all proposers, between two steps. Outputs do not change."""
        self.drafting.replace(proposers)
        if any(request.constraint is not None for request in self.requests.values()):
            self._draft_grammars()

    def _draft_grammars(self) -> None:
        """Add the proposer of grammars to any others; it costs no forwards."""
        drafting = self.drafting
        if drafting.is_on and not any(p.config.needs_constraint for p in drafting.proposers):
            drafting.join(GrammarProposer(GrammarConfig()))

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        return self._statistics.snapshot()

    def reset_stats(self) -> None:
        self._statistics.reset()
