"""The engine: one step of speculative decoding for all live requests, and nothing else.

    schedule -> propose -> plan -> pack -> forward -> verify -> commit -> observe

``step`` reads as these verbs. It knows no tokenizer, no model family and no device. It is not
thread-safe; :mod:`paceline.engine.engine_thread` is what several callers share.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence

from paceline.config import GRAMMAR_DRAFTS, EngineConfig, SpeculativeConfig
from paceline.engine.admission import check_prompt, make_requests
from paceline.engine.commit import Committed, commit_step, step_output
from paceline.engine.drafting import Draft, Drafting
from paceline.engine.prompt_logprobs import take_prompt_logprobs
from paceline.engine.report import snapshot, totals
from paceline.engine.scheduler import Scheduled, Scheduler, step_shape
from paceline.engine.verifier import Verdict, verify
from paceline.errors import RequestFailedError
from paceline.metrics import EngineStats
from paceline.models.ops.base import PackedBatch
from paceline.policy.cost import CostModel
from paceline.policy.cost_points import NO_STEP
from paceline.policy.planner import FixedPlanner, Planner
from paceline.proposers.base import Proposer
from paceline.proposers.grammar import GrammarProposer
from paceline.request import (
    NO_DRAFT,
    Constraint,
    FinishReason,
    Request,
    RequestStatus,
    StepOutput,
    StopChecker,
)
from paceline.runtime.model_runner import ForwardResult, ModelRunner
from paceline.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class Engine:
    """Serves requests with one target model and any number of proposers.

    Args:
        runner: the target model with its KV cache.
        config: limits; ``config.max_model_len`` must be resolved.
        proposers: who drafts; their trees are merged.
        eos_token_ids: tokens that end a request unless it ignores them.
        planner: chooses which draft nodes are verified.
        cost: what steps cost; the engine teaches it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        proposers: Sequence[Proposer] = (),
        eos_token_ids: Sequence[int] = (),
        planner: Planner | None = None,
        cost: CostModel | None = None,
    ) -> None:
        assert config.max_model_len is not None
        self.runner = runner
        self.kv = runner.kv
        self.config = config
        self.vocab_size = runner.decoder.config.vocab_size
        self.cost = cost or CostModel()
        self.scheduler = Scheduler(config, self.kv, self.cost)
        self.requests: dict[int, Request] = {}
        self._stats = EngineStats()
        self._eos = frozenset(i for i in eos_token_ids if 0 <= i < self.vocab_size)
        self._seeds = random.Random(config.seed)
        self._next_id = 0
        self._clock = 0.0
        self._aborted: list[int] = []
        self._shape, self._forward_ms = NO_STEP, 0.0
        self.drafting = Drafting(
            proposers, planner or FixedPlanner(), self.vocab_size, lambda: self._stats
        )
        self._before = totals(self.runner, self.drafting, self.scheduler)

    # --- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop_checkers: Sequence[StopChecker] = (),
        cache_salt: str = "",
        constraints: Sequence[Constraint] = (),
    ) -> list[int]:
        """Queue a prompt; returns one request id per sample (``params.n`` of them).

        Args:
            stop_checkers: one per sample, or none at all.
            constraints: one per sample where ``params.structured_outputs`` is given, else none.

        Raises:
            RequestError: the prompt is empty, does not fit, or names tokens outside the vocabulary.
        """
        context = self.config.max_model_len
        assert context is not None
        assert len(constraints) == (params.n if params.structured_outputs is not None else 0)
        check_prompt(prompt_token_ids, params, context, self.vocab_size)
        group = make_requests(
            self._next_id,
            prompt_token_ids,
            params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            context=context,
            eos_token_ids=self._eos,
            cache_salt=cache_salt,
            stop_checkers=stop_checkers,
            constraints=constraints,
        )
        for request in group:
            self.scheduler.add(request)
            self.requests[request.request_id] = request
        if constraints:
            self._draft_grammars()
        self._next_id += len(group)
        self._stats.num_requests += len(group)
        self._stats.num_prompt_tokens += len(prompt_token_ids)
        return [request.request_id for request in group]

    def abort(self, request_id: int) -> None:
        """End a request. In the middle of a step it takes effect when the step commits."""
        self._aborted.append(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # --- the step ------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Advance every live request by at least one token or one prefill chunk."""
        began = self._clock = time.perf_counter()
        outputs = self._end_aborted()
        items = self._schedule()
        if not items:
            return outputs
        self._draft(items)
        try:
            result = self._forward(items)
            verdicts = self._verify(items, result)
        except Exception as error:
            verdicts = self._isolate(items, error)
        emitted_before = self._stats.num_output_tokens
        committed = self._commit(items, verdicts)
        self._observe(committed)
        emitted = self._stats.num_output_tokens - emitted_before
        seconds = self._clock - began
        self.drafting.end(items, self._shape, emitted, self._forward_ms, seconds * 1e3)
        return outputs + [output for _, _, output in committed]

    def _schedule(self) -> list[Scheduled]:
        items = self.scheduler.schedule()
        self._shape = step_shape(items)
        for request in self.scheduler.preempted:
            self._stats.num_preemptions += 1
            self.drafting.finish(request)
        self._lap("schedule")
        return items

    def _draft(self, items: Sequence[Scheduled]) -> None:
        """Propose and plan; whatever goes wrong costs the drafts of this step, nothing else."""
        try:
            drafts = self._propose(items)
            if drafts:
                self._plan(items, drafts)
        except Exception as error:
            log.warning("drafting failed; the step goes on plainly: %r", error)
            for item in items:
                item.draft = NO_DRAFT
            self._shape = step_shape(items)

    def _propose(self, items: Sequence[Scheduled]) -> list[Draft]:
        """Ask the proposers that are worth asking; empty when there is no draft."""
        drafts = self.drafting.propose(items, self._shape, self._room())
        self._lap("propose")
        return drafts

    def _plan(self, items: Sequence[Scheduled], drafts: Sequence[Draft]) -> None:
        """Choose the nodes to verify; each item then carries them, their slots reserved."""
        chosen = self.drafting.choose(drafts, self._room())
        for draft, tree in zip(drafts, chosen, strict=True):
            item, pruned = draft.item, len(draft.tree) - len(tree)
            item.request.counters.num_pruned_tokens += pruned
            self._stats.speculation.num_pruned_tokens += pruned
            if len(tree) and self.kv.reserve(item.request.request_id, 1 + len(tree)):
                item.draft = tree
                self._stats.expected_accepted_tokens += sum(tree.path_probs())
        self._shape = step_shape(items)
        self._lap("plan")

    def _room(self) -> int:
        """Rows that the step has left for draft nodes, while it has none."""
        return self.config.max_num_batched_tokens - self._shape.rows

    def _pack(self, items: Sequence[Scheduled]) -> PackedBatch:
        batch = self.runner.pack([item.span() for item in items])
        self._lap("pack")
        return batch

    def _forward(self, items: Sequence[Scheduled]) -> ForwardResult:
        self._forward_ms = 0.0  # if it fails, there is none to learn from
        batch = self._pack(items)
        before = self.runner.seconds
        result = self.runner.forward(batch, greedy=all(i.request.wants_argmax for i in items))
        self._forward_ms = (self.runner.seconds - before) * 1e3
        self._stats.num_rows += batch.num_rows
        self._stats.count_width(self._shape.rows, self._shape.samples)
        self._lap("forward")
        return result

    def _verify(self, items: Sequence[Scheduled], result: ForwardResult) -> list[Verdict | None]:
        """What each item emits; None for a prefill chunk that does not reach the last token."""
        if result.argmax is None:  # else nobody wants log-probs
            take_prompt_logprobs(items, result)
        verdicts = verify(result, items)
        self._lap("verify")
        return verdicts

    def _isolate(self, items: Sequence[Scheduled], error: Exception) -> list[Verdict | None]:
        """Undo a failed step and run its requests singly and plainly: only the guilty fail."""
        log.warning("a step of %d requests failed and is run again singly: %r", len(items), error)
        for item in items:
            self.kv.rollback(item.request.request_id)
            item.draft = NO_DRAFT
        return [self._alone(item) for item in items]

    def _alone(self, item: Scheduled) -> Verdict | None:
        request_id = item.request.request_id
        try:
            # The failed step held these blocks, and nobody took them since.
            reserved = self.kv.reserve(request_id, item.num_tokens)
            assert reserved
            self._shape = step_shape([item])
            return self._verify([item], self._forward([item]))[0]
        except Exception as error:
            self.kv.rollback(request_id)
            verdict = RequestFailedError(f"the forward failed for this request: {error!r}")
            verdict.__cause__ = error
            return verdict

    def _commit(
        self, items: Sequence[Scheduled], verdicts: Sequence[Verdict | None]
    ) -> list[Committed]:
        committed = commit_step(items, verdicts, self._aborted, self.kv, self._stats)
        self._lap("commit")
        return committed

    def _observe(self, committed: Sequence[Committed]) -> None:
        """Let who predicts or drafts learn, and end what has ended."""
        try:
            self.cost.observe(self._shape, self._forward_ms)
        except Exception as error:
            log.warning("what a step takes was not learnt from: %r", error)
        for request, verdict, _ in committed:
            if verdict is not None:
                self.drafting.observe(request, verdict)
            if request.finish_reason is not None:
                self._end(request, request.finish_reason)
        self._lap("observe")

    # --- ends --------------------------------------------------------------------------------

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        self.scheduler.remove(request)
        self.drafting.end_request(request)
        del self.requests[request.request_id]
        self._stats.num_finished += 1
        self._stats.num_failed_requests += reason is FinishReason.ERROR

    def _end_aborted(self) -> list[StepOutput]:
        if not self._aborted:
            return []
        aborted, self._aborted = self._aborted, []
        live = [self.requests[i] for i in dict.fromkeys(aborted) if i in self.requests]
        for request in live:
            self._end(request, FinishReason.ABORT)
        return [step_output(request, None) for request in live]

    # --- the rest ------------------------------------------------------------------------------

    def set_speculation(self, proposers: Sequence[Proposer]) -> None:
        """Replace all proposers, between two steps. Outputs do not change."""
        self.drafting.replace(proposers)
        if any(request.constraint is not None for request in self.requests.values()):
            self._draft_grammars()

    def _draft_grammars(self) -> None:
        """Where anyone drafts, draft what grammars leave too; it costs no forwards."""
        drafting = self.drafting
        if drafting.is_on and not any(p.config.needs_constraint for p in drafting.proposers):
            config = SpeculativeConfig(method="grammar", **GRAMMAR_DRAFTS)
            drafting.join(GrammarProposer(config))

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        return snapshot(self._stats, self._before, self.runner, self.drafting, self.scheduler)

    def reset_stats(self) -> None:
        self._stats = EngineStats()
        self._before = totals(self.runner, self.drafting, self.scheduler)

    def _lap(self, phase: str) -> None:
        self._clock = self._stats.add_seconds(phase, self._clock)
