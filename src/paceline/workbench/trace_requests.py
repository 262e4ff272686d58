"""The requests whose answers traces are, as ``paceline trace`` made them. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks import check_number
from paceline.errors import RequestError, TraceError
from paceline.request import Request
from paceline.sampling_params import SamplingParams
from paceline.workbench.traces import Trace

SEEDS = 1 << 64


def trace_params(trace: Trace, meta: Mapping[str, Any]) -> SamplingParams:
    """How a trace was sampled: with the seed of its prompt, which is the traces' plus its place.

    Args:
        meta: of the folder.

    Raises:
        TraceError: it does not say how.
    """
    said = meta.get("params")
    if not isinstance(said, dict):
        raise TraceError("the traces do not say how they were sampled: trace the prompts again")
    seed = said.get("seed")
    if type(seed) is not int:
        raise TraceError(f"the traces' seed is {seed!r}; it must be a whole number")
    try:
        return SamplingParams(
            max_tokens=said.get("max_tokens"),
            temperature=said.get("temperature", 0.0),
            seed=(seed + trace.prompt_index) % SEEDS,
        )
    except RequestError as error:
        raise TraceError(f"the traces say that they were sampled impossibly: {error}") from error


def trace_request(request_id: int, trace: Trace, meta: Mapping[str, Any]) -> Request:
    """The request as it was before its first output token.

    Raises:
        TraceError: as :func:`trace_params`, or the traces do not name their context.
    """
    params = trace_params(trace, meta)
    context = meta["params"].get("max_model_len")
    check_number("the traces' max_model_len", context, 2, 1 << 24, error=TraceError)
    prompt: list[int] = trace.token_ids[: trace.prompt_len].tolist()
    limit = context if params.max_tokens is None else len(prompt) + params.max_tokens
    assert params.seed is not None
    return Request(
        request_id, prompt, len(prompt), params, params.seed, max_len=min(limit, context)
    )
