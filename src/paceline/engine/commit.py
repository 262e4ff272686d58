"""Turns what the target emitted into committed tokens, cut at the first reason to stop.

Everything that follows (streaming, counting, observing, publishing) sees only what is left after
the cut. Knows no tokenizer: stop strings are the request's injected stop checker's business.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.metrics import SpeculationCounters
from paceline.request import (
    TARGET_ORIGIN,
    FinishReason,
    Request,
    StepOutput,
    VerifyResult,
)
from paceline.span import DraftTree


def append_tokens(request: Request, result: VerifyResult) -> VerifyResult:
    """Append emitted tokens to a request up to its end, and set its finish reason if it ended.

    Returns:
        The result cut to what was appended.
    """
    for count, token_id in enumerate(result.token_ids, start=1):
        request.token_ids.append(token_id)
        if request.constraint is not None and token_id not in request.eos_token_ids:
            request.constraint.advance(token_id)
        if _ends(request, token_id):
            return _cut(result, count)
    return result


def _ends(request: Request, token_id: int) -> bool:
    params, constraint = request.params, request.constraint
    enough = request.num_output_tokens >= params.min_tokens
    matched = None
    if request.stop_checker is not None:
        matched = request.stop_checker.push(token_id, may_stop=enough)
    # Nothing that fits a grammar follows its end, so a constrained request cannot ignore that.
    if token_id in request.eos_token_ids and (constraint is not None or not params.ignore_eos):
        request.finish_reason = FinishReason.STOP
    elif token_id in params.stop_token_ids:
        request.finish_reason, request.stop_reason = FinishReason.STOP, token_id
    elif matched is not None:
        request.finish_reason, request.stop_reason = FinishReason.STOP, matched
    elif constraint is not None and constraint.is_complete:
        request.finish_reason = FinishReason.STOP
    elif len(request.token_ids) >= request.max_len:
        request.finish_reason = FinishReason.LENGTH
    return request.finish_reason is not None


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


def count_step(draft: DraftTree, result: VerifyResult, *counters: SpeculationCounters) -> None:
    """Record a committed step, after any cut."""
    accepted = [origin for origin in result.origins if origin != TARGET_ORIGIN]
    depth = len(draft) if draft.is_chain else max(draft.depths())
    for each in counters:
        each.record(len(result.token_ids), draft.origins, accepted, depth)


def step_output(request: Request, verdict: VerifyResult | None) -> StepOutput:
    """What a step has to tell about a request: what it emitted, and whether it ended."""
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
