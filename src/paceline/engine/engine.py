"""The engine: one step of speculative decoding for all live requests, and nothing else.

    schedule -> propose -> plan -> pack -> forward -> verify -> commit -> observe

``step`` reads as these verbs. It knows no tokenizer, no model family and no device. It is not
thread-safe; :mod:`paceline.engine.engine_thread` is what several callers share.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.config import EngineConfig
from paceline.engine.commit import append_tokens, count_step
from paceline.engine.drafting import Drafting
from paceline.engine.scheduler import Scheduled, Scheduler
from paceline.engine.verifier import Verification, verify
from paceline.errors import ContextLengthError, RequestError, RequestFailedError
from paceline.metrics import EngineStats
from paceline.policy.cost import StepCost
from paceline.policy.planner import FixedPlanner, Planner
from paceline.proposers.base import Proposer
from paceline.request import (
    FinishReason,
    Request,
    RequestStatus,
    StepOutput,
    StopChecker,
    VerifyResult,
)
from paceline.runtime.model_runner import ForwardResult, ModelRunner
from paceline.runtime.sampler import token_logprobs
from paceline.sampling_params import SamplingParams

log = logging.getLogger(__name__)
Verdict = VerifyResult | RequestFailedError


class Engine:
    """Serves requests with one target model and any number of proposers.

    Args:
        runner: the target model with its KV cache.
        config: limits; ``config.max_model_len`` must be resolved.
        proposers: who drafts; their trees are merged.
        eos_token_ids: tokens that end a request unless it ignores them.
        planner: chooses which draft nodes are verified.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        proposers: Sequence[Proposer] = (),
        eos_token_ids: Sequence[int] = (),
        planner: Planner | None = None,
    ) -> None:
        assert config.max_model_len is not None
        self.runner = runner
        self.kv = runner.kv
        self.config = config
        self.vocab_size = runner.decoder.config.vocab_size
        self.cost = StepCost()
        self.scheduler = Scheduler(config, self.kv, self.cost)
        self.planner = planner or FixedPlanner()
        self.requests: dict[int, Request] = {}
        self._stats = EngineStats()
        self._eos = frozenset(eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._next_id = 0
        self._stepping = False
        self._aborted: list[int] = []
        self.set_speculation(proposers)

    # --- requests ------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop_checkers: Sequence[StopChecker] = (),
        cache_salt: str = "",
    ) -> list[int]:
        """Queue a prompt; returns one request id per sample (``params.n`` of them).

        Args:
            stop_checkers: one per sample, or none at all.

        Raises:
            RequestError: the prompt is empty, does not fit, or names tokens outside the vocabulary.
        """
        self._check(prompt_token_ids, params)
        limit = self.config.max_model_len
        assert limit is not None
        if params.max_tokens is not None:
            limit = min(limit, len(prompt_token_ids) + params.max_tokens)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        first = self._next_id
        self._next_id += params.n
        group = [
            Request(
                request_id=first + index,
                token_ids=list(prompt_token_ids),
                prompt_len=len(prompt_token_ids),
                params=params,
                seed=seed,
                max_len=limit,
                eos_token_ids=self._eos,
                sample_index=index,
                fork_of=first if index else None,
                cache_salt=cache_salt,
                stop_checker=stop_checkers[index] if stop_checkers else None,
            )
            for index in range(params.n)
        ]
        for request in group:
            self.scheduler.add(request)
            self.requests[request.request_id] = request
        self._stats.num_requests += len(group)
        self._stats.num_prompt_tokens += len(prompt_token_ids)
        return [request.request_id for request in group]

    def _check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        limit = self.config.max_model_len
        assert limit is not None
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        if len(prompt_token_ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt_token_ids)} tokens; the context holds {limit}, at "
                "least one of them for the answer: shorten the prompt"
            )
        for token_id in prompt_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prompt token {token_id} is not in the vocabulary 0 to {self.vocab_size - 1}"
                )
        params.check_vocabulary(self.vocab_size)

    def abort(self, request_id: int) -> None:
        """End a request. In the middle of a step it takes effect when the step commits."""
        self._aborted.append(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # --- the step ------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Advance every live request by at least one token or one prefill chunk."""
        outputs = self._end_aborted()
        items = self._schedule()
        if not items:
            return outputs
        self._draft(items)
        return outputs + self._run(items)

    def _schedule(self) -> list[Scheduled]:
        with self._timed("schedule"):
            items = self.scheduler.schedule()
            for request in self.scheduler.preempted:
                self._stats.num_preemptions += 1
                self.drafting.finish(request)
        return items

    def _draft(self, items: Sequence[Scheduled]) -> None:
        """Propose and plan; afterwards each item carries the draft that will be verified."""
        if not self.drafting.is_on:
            return
        limits = [self.drafting.limits(item.request) for item in items if item.may_draft]
        able = [item for item in items if item.may_draft]
        pairs = [(i, limit) for i, limit in zip(able, limits, strict=True) if limit.max_nodes]
        if not pairs:
            return
        with self._timed("propose"):
            trees = self.drafting.propose([i.request for i, _ in pairs], [x for _, x in pairs])
        if not any(map(len, trees)):
            return
        with self._timed("plan"):
            rows = sum(item.num_tokens for item in items)
            room = self.config.max_num_batched_tokens - rows
            chosen = self.planner.choose(trees, [limit for _, limit in pairs], room)
            for (item, _), drafted, tree in zip(pairs, trees, chosen, strict=True):
                item.request.counters.num_pruned_tokens += len(drafted) - len(tree)
                self._stats.speculation.num_pruned_tokens += len(drafted) - len(tree)
                if len(tree) and self.kv.reserve(item.request.request_id, 1 + len(tree)):
                    item.draft = tree

    def _run(self, items: list[Scheduled]) -> list[StepOutput]:
        """Pack, forward, verify, commit and observe; a failure undoes every reservation."""
        try:
            verdicts = self._forward_and_verify(items)
        except Exception as error:
            return self._isolate(items, error)
        with self._timed("commit"):
            return [
                output
                for item, verdict in zip(items, verdicts, strict=True)
                if (output := self._commit(item, verdict)) is not None
            ]

    def _forward_and_verify(self, items: Sequence[Scheduled]) -> list[Verdict | None]:
        with self._timed("pack"):
            batch = self.runner.pack([item.span() for item in items])
        began = time.perf_counter()
        with self._timed("forward"):
            result = self.runner.forward(batch)
        self.cost.observe(batch.num_rows, (time.perf_counter() - began) * 1e3)
        self._stats.num_rows += batch.num_rows
        with self._timed("verify"):
            return self._verify(items, result)

    def _verify(self, items: Sequence[Scheduled], result: ForwardResult) -> list[Verdict | None]:
        """What each item emits; None for a prefill chunk that does not reach the last token."""
        sampled = [i for i, item in enumerate(items) if item.samples]
        verifications = []
        for i in sampled:
            first = result.offsets[i + 1] - 1 - len(items[i].draft)
            verifications.append(Verification(items[i].request, items[i].draft, first))
        for i, item in enumerate(items):
            if item.request.params.prompt_logprobs is not None:
                self._take_prompt_logprobs(item, result, i)
        verdicts: list[Verdict | None] = [None] * len(items)
        for i, verdict in zip(sampled, verify(result.logits, verifications), strict=True):
            verdicts[i] = verdict
        return verdicts

    def _take_prompt_logprobs(self, item: Scheduled, result: ForwardResult, index: int) -> None:
        request, wanted = item.request, item.request.params.prompt_logprobs
        start = request.num_computed
        known = len(request.prompt_logprobs)  # row i predicts token i + 1
        end = min(start + item.num_tokens + 1, request.prompt_len)
        if start >= request.prompt_len or end <= known or wanted is None:
            return
        if not known:
            request.prompt_logprobs.append(None)
            known = 1
        first = result.offsets[index] - start - 1
        rows = result.logits[first + known : first + end]
        tokens = request.token_ids[known:end]
        request.prompt_logprobs.extend(token_logprobs(rows, tokens, [wanted] * len(tokens)))

    def _isolate(self, items: Sequence[Scheduled], error: Exception) -> list[StepOutput]:
        """Undo a failed step and run its requests singly and plainly: only the guilty fail."""
        log.warning("a step of %d requests failed and is run again singly: %r", len(items), error)
        for item in items:
            self.kv.rollback(item.request.request_id)
        outputs = []
        for item in items:
            alone = Scheduled(item.request, item.num_tokens)
            try:
                if not self.kv.reserve(item.request.request_id, item.num_tokens):
                    continue  # its turn comes in a later step
                verdict = self._forward_and_verify([alone])[0]
            except Exception as again:
                self.kv.rollback(item.request.request_id)
                verdict = RequestFailedError(f"the forward failed for this request: {again!r}")
                verdict.__cause__ = again
            output = self._commit(alone, verdict)
            if output is not None:
                outputs.append(output)
        return outputs

    # --- commit --------------------------------------------------------------------------------

    def _commit(self, item: Scheduled, verdict: Verdict | None) -> StepOutput | None:
        request = item.request
        if request.request_id in self._aborted:
            self.kv.rollback(request.request_id)
            return None  # ends at the start of the next step
        if isinstance(verdict, RequestFailedError):
            request.error = verdict
            return self._end(request, FinishReason.ERROR)
        if verdict is None:
            self._commit_kv(request, range(item.num_tokens))
            return None
        verdict = append_tokens(request, verdict)
        count_step(item.draft, verdict, request.counters, self._stats.speculation)
        self._stats.num_output_tokens += len(verdict.token_ids)
        self._commit_kv(request, verdict.path if item.may_draft else range(item.num_tokens))
        if self.drafting.is_on:
            with self._timed("observe"):
                self.drafting.observe(request, verdict)
        if request.finish_reason is not None:
            return self._end(request, request.finish_reason, verdict)
        return self._output(request, verdict)

    def _commit_kv(self, request: Request, path: Sequence[int]) -> None:
        self.kv.commit(request.request_id, path)
        request.num_computed += len(path)
        self.kv.publish(request.request_id, request.token_ids)

    def _output(self, request: Request, verdict: VerifyResult | None) -> StepOutput:
        ended = request.finish_reason is not None
        checker = request.stop_checker
        return StepOutput(
            request_id=request.request_id,
            token_ids=verdict.token_ids if verdict else (),
            origins=verdict.origins if verdict else (),
            text=checker.take_text(final=ended) if checker else "",
            logprobs=verdict.logprobs if verdict else (),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
        )

    def _end(
        self, request: Request, reason: FinishReason, verdict: VerifyResult | None = None
    ) -> StepOutput:
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        self.scheduler.remove(request)
        self.drafting.finish(request)
        del self.requests[request.request_id]
        self._stats.num_finished += 1
        self._stats.num_failed_requests += reason is FinishReason.ERROR
        return self._output(request, verdict)

    def _end_aborted(self) -> list[StepOutput]:
        aborted, self._aborted = self._aborted, []
        live = [self.requests[i] for i in dict.fromkeys(aborted) if i in self.requests]
        return [self._end(request, FinishReason.ABORT) for request in live]

    # --- the rest ------------------------------------------------------------------------------

    def set_speculation(self, proposers: Sequence[Proposer]) -> None:
        """Replace all proposers, between two steps. Outputs do not change."""
        self.drafting = Drafting(proposers, self.vocab_size, lambda: self._stats)

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        snapshot = copy.deepcopy(self._stats)
        snapshot.num_target_forwards = self.runner.num_forwards - self._forwards_before
        snapshot.num_draft_forwards = self._draft_forwards() - self._draft_forwards_before
        snapshot.num_running = len(self.scheduler.running)
        snapshot.num_waiting = len(self.scheduler.waiting)
        snapshot.kv_blocks_total = self.kv.pool.num_blocks - 1
        snapshot.kv_blocks_used = self.kv.pool.num_used
        return snapshot

    _forwards_before = 0
    _draft_forwards_before = 0

    def reset_stats(self) -> None:
        self._stats = EngineStats()
        self._forwards_before = self.runner.num_forwards
        self._draft_forwards_before = self._draft_forwards()

    def _draft_forwards(self) -> int:
        return sum(getattr(p, "num_forwards", 0) for p in self.drafting.proposers)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._stats.add_seconds(phase, time.perf_counter() - began)
