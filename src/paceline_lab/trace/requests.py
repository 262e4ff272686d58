"""Whose answers traces are: the requests, as ``paceline trace`` made them, and the model.

Knows no engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.core.checks import check_number
from paceline.core.errors import RequestError, TraceError
from paceline.loading.catalogue import EMBEDDED
from paceline.loading.checkpoint import Checkpoint, model_fingerprint
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.traces import MODEL_SOURCE, Trace

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
        raise TraceError(f"the traces give impossible sampling parameters: {error}") from error


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


# --- the model -----------------------------------------------------------------------------------


def traced_model(meta: Mapping[str, Any]) -> str:
    """Where the model lay that gave the answers, or by which name it was loaded.

    Older traces do not name the embedded one.

    Raises:
        TraceError: it is not there any more.
    """
    source = meta.get(MODEL_SOURCE)
    if not isinstance(source, str):
        return EMBEDDED
    if os.path.isabs(source) and not os.path.exists(source):
        raise TraceError(
            f"the traces are answers of {source}, and there is no such file or folder: name the "
            "model as the argument MODEL"
        )
    return source


def check_model(meta: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise :class:`TraceError` where another model than this one gave the answers.

    Traces that bear no fingerprint pass.
    """
    said = meta.get("model_fingerprint")
    if said is not None and said != model_fingerprint(checkpoint):
        raise TraceError(
            f"the traces are answers of {meta.get('model')}, and the model that is named, "
            f"{checkpoint.name}, is another: name the one that answered, or trace the prompts "
            "again; for this model's costs alone, give its profile with --cost"
        )


def answer_notes(meta: Mapping[str, Any], name: str, dtype: str) -> list[str]:
    """Remarks on how surely a model would have given the answers of traces."""
    notes, (model, ran_in) = [], (meta.get(key) for key in ("model", "dtype"))
    if "model_fingerprint" not in meta and model not in (None, name):
        notes.append(
            f"the traces are answers of {model}, and the model that is named is {name}; if it is "
            "not the same one, acceptance and costs do not go together"
        )
    if ran_in not in (None, dtype):
        notes.append(
            f"the answers were given in {ran_in} and are replayed as those of {dtype}, in which "
            "the model may answer otherwise where two tokens are nearly as likely"
        )
    return notes
