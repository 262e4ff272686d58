"""Turns the target's tokens into committed ones, cut at the first reason to stop.

Everything that follows (streaming, counting, observing, publishing) sees only the tokens before
the cut. Knows no tokenizer: stop strings are the request's injected stop checker's business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from paceline.cache.kv_cache import KVCache
from paceline.core.errors import RequestFailedError
from paceline.engine.step import Scheduled
from paceline.engine.verifier import Verdict
from paceline.request.engine_stats import EngineStats
from paceline.request.request import FinishReason, Request, StepOutput, VerifyResult

Committed = tuple[Request, VerifyResult | None, StepOutput]
"""A request with what it emitted, None where it failed."""


def commit_step(
    items: Sequence[Scheduled],
    verdicts: Sequence[Verdict | None],
    aborted: Collection[int],
    kv: KVCache,
    stats: EngineStats,
) -> list[Committed]:
    """Append the emitted tokens up to their end; make their KV contiguous and publish it."""
    committed: list[Committed] = []
    for item, verdict in zip(items, verdicts, strict=True):
        request = item.request
        if request.request_id in aborted:
            kv.rollback(request.request_id)
            continue
        try:
            result = _commit_item(item, verdict, kv, stats)
            if result is not None:
                committed.append((request, result, step_output(request, result)))
        except Exception as error:  # the forward, the sampler or the stop checker failed
            request.error, request.finish_reason = error, FinishReason.ERROR
            committed.append((request, None, step_output(request, None)))
    return committed


def _commit_item(
    item: Scheduled, verdict: Verdict | None, kv: KVCache, stats: EngineStats
) -> VerifyResult | None:
    request, path = item.request, range(item.num_tokens)
    if verdict is None:
        kv.commit(request.request_id, path)
        item.path = path
        request.num_computed += item.num_tokens
        return None
    if isinstance(verdict, RequestFailedError):
        raise verdict
    verdict = append_tokens(request, verdict)
    request.count(verdict)
    stats.num_output_tokens += len(verdict.token_ids)
    item.path = verdict.path if item.may_draft else path
    kv.commit(request.request_id, item.path)
    request.num_computed += len(item.path)
    if not item.may_draft:
        kv.publish_prompt(request.request_id)
    # Its logits are numbers, so the KV that they come from is too.
    kv.publish(request.request_id, request.token_ids)
    return verdict


def append_tokens(request: Request, result: VerifyResult) -> VerifyResult:
    """Append emitted tokens to a request up to its end, and set its finish reason if it ended.

    Returns:
        The result, cut to the tokens that were appended.
    """
    params, constraint, checker = request.params, request.constraint, request.stop_checker
    tokens, eos, max_len = request.token_ids, request.eos_token_ids, request.max_len
    matched = None
    for count, token_id in enumerate(result.token_ids, start=1):
        tokens.append(token_id)
        is_eos = token_id in eos
        if constraint is not None and not is_eos:
            constraint.advance(token_id)
        if checker is not None:
            enough = request.num_output_tokens >= params.min_tokens
            matched = checker.push(token_id, may_stop=enough)
        # Nothing that fits a grammar follows its end, so a constrained request cannot ignore that.
        if is_eos and (constraint is not None or not params.ignore_eos):
            request.finish_reason = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            request.finish_reason, request.stop_reason = FinishReason.STOP, token_id
        elif matched is not None:
            request.finish_reason, request.stop_reason = FinishReason.STOP, matched
        elif constraint is not None and constraint.is_complete:
            request.finish_reason = FinishReason.STOP
        elif len(tokens) >= max_len:
            request.finish_reason = FinishReason.LENGTH
        else:
            continue
        return _cut(result, count)
    return result


def _cut(result: VerifyResult, count: int) -> VerifyResult:
    if count == len(result.token_ids):
        return result
    return replace(
        result,
        path=result.path[:count],
        token_ids=result.token_ids[:count],
        origins=result.origins[:count],
        logprobs=result.logprobs[:count],
    )


def step_output(request: Request, verdict: VerifyResult | None) -> StepOutput:
    """The output of a step for one request: its new tokens, and whether the request ended."""
    checker, text = request.stop_checker, ""
    if checker is not None and request.error is None:
        text = checker.take_text(final=request.finish_reason is not None)
    if verdict is None:
        verdict = VerifyResult((), (), ())
    return StepOutput(
        request_id=request.request_id,
        token_ids=verdict.token_ids,
        origins=verdict.origins,
        text=text,
        logprobs=verdict.logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
    )
