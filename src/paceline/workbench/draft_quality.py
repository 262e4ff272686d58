"""How close a draft model is to its target, along outputs of the target.

Both models score every output token given the true ones before it; their distributions are compared
a few rows at a time, so that memory does not grow with text or vocabulary. Knows neither trees nor
steps: what a draft is worth in a batch is for a replay to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, TraceError
from paceline.models.checkpoint import Checkpoint
from paceline.proposers.base import TargetInfo
from paceline.proposers.draft_model.growth import (
    RANKED,
    acceptance_estimates,
    likeness,
    ranking_params,
)
from paceline.proposers.draft_model.loading import load_draft
from paceline.runtime.logit_edits import SamplingRow
from paceline.runtime.model_runner import ModelRunner
from paceline.runtime.sampler import rank_candidates
from paceline.traces import Trace
from paceline.workbench.drafts_store import check_vocabulary
from paceline.workbench.reliability import calibration_error, reliability
from paceline.workbench.teacher_forcing import forced_logits
from paceline.workbench.trace_requests import trace_request

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]
TOP = (1, 2, 4, 8)
TEMPERATURE = 0.8
"""Of the predicted acceptance where none is asked for."""
ELEMENTS = 1 << 20
"""Numbers of one array of a slice of rows: 8 MB."""


def log_softmax(logits: Logits, temperature: float = 1.0) -> Floats:
    """Log-probabilities at a temperature above 0, ``[n, vocab]``."""
    z = logits.astype(np.float64) / temperature
    z -= z.max(axis=1, keepdims=True)
    found: Floats = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return found


def ranks(logits: Logits, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many tokens of each row are likelier than one token; equal ones by their ids.

    Args:
        logits: ``[n, vocab]``.
        tokens: ``[n]``.
    """
    own = np.take_along_axis(logits, tokens[:, None], axis=1)
    ids = np.arange(logits.shape[1])
    before = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    count: npt.NDArray[np.int64] = before.sum(axis=1)
    return count


def coupled_acceptance(log_p: Floats, log_q: Floats) -> Floats:
    """Chance that arg-max(log p + g) is arg-max(log q + g) for one standard Gumbel noise g.

    It is ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)``. The first of the two is the larger where
    ``p_j / q_j >= p_i / q_i``, so with tokens sorted by this ratio every inner sum is the rest of p
    over ``p_i`` plus what came of q over ``q_i``.

    Args:
        log_p, log_q: log-probabilities, ``[n, vocab]``.

    Returns:
        ``[n]``.
    """
    with np.errstate(invalid="ignore"):  # -inf minus -inf: a token that counts for nothing
        order = np.argsort(log_p - log_q, axis=1)
    p, q = (np.exp(np.take_along_axis(each, order, axis=1)) for each in (log_p, log_q))
    rest = np.cumsum(p[:, ::-1], axis=1)[:, ::-1]
    came = np.cumsum(q, axis=1) - q
    below = rest * q + came * p
    chances: Floats = np.divide(p * q, below, out=np.zeros_like(p), where=below > 0).sum(axis=1)
    return chances


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Means over ``num_tokens`` positions; shares and probabilities from 0 to 1.

    Attributes:
        kl: KL(target || draft) of the models' own distributions (temperature 1, no filters), nats;
            of a draft whose head has not every token, over those that it has.
        outside: probability that the target gives to tokens that the draft's head does not have.
        total_variation: distance of these distributions.
        agreement: how often the target's likeliest token is among the draft's k likeliest, by k.
        temperature: of the two figures below.
        rejection_acceptance: chance of a token that is sampled from the draft under classic
            rejection sampling, ``sum min(p, q)``.
        coupled_acceptance: chance of the draft's first choice where both add the same noise,
            ``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)``.
        acceptance: how often the traces' token was the draft's first choice, sampled as they were.
        estimated_acceptance: what the draft itself expected of its first choices.
        calibration_error: expected calibration error of these estimates.
    """

    num_tokens: int
    kl: float
    outside: float
    total_variation: float
    agreement: Mapping[int, float]
    temperature: float
    rejection_acceptance: float
    coupled_acceptance: float
    acceptance: float
    estimated_acceptance: float
    calibration_error: float

    @property
    def greedy_acceptance(self) -> float:
        """Chance of the draft's first choice at temperature 0."""
        return self.agreement[1]


def draft_quality(
    engine: Engine,
    config: SpeculativeConfig,
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    max_tokens: int = 2048,
    temperature: float = TEMPERATURE,
    checkpoint: Checkpoint | None = None,
) -> DraftQuality:
    """Load a draft model and measure it; of a parallel draft what it says without masks.

    Call it where the engine is stepped, between two steps.

    Args:
        engine: of the target, whose traces these are.
        config: the draft model, and how it ranks candidates.
        meta: of the traces.
        max_tokens: output tokens that are scored, those of the first traces.
        temperature: for the predicted acceptance, above 0.
        checkpoint: of the target; only ``self`` needs it.

    Raises:
        ConfigError, ModelLoadError: the draft model cannot be used, or the KV cache has no room.
        TraceError: the traces are of another vocabulary, do not say how they were sampled, or hold
            no output token within both contexts.
    """
    assert engine.config.max_model_len is not None
    target = TargetInfo(
        vocab_size=engine.vocab_size,
        fingerprint=meta.get("vocab_fingerprint"),
        device=engine.config.device,
        max_model_len=engine.config.max_model_len,
        max_num_seqs=1,
        kv_bytes=1 << 50,  # as much as one sequence takes
        backend=engine.config.backend,
        checkpoint=checkpoint,
        dtype=engine.config.dtype,
    )
    check_vocabulary(traces, meta, target)
    runner = load_draft(config, target)
    return compare_models(engine, runner, config, traces, meta, max_tokens, temperature)


def compare_models(
    engine: Engine,
    runner: ModelRunner,
    config: SpeculativeConfig,
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    max_tokens: int,
    temperature: float,
) -> DraftQuality:
    """:func:`draft_quality` of a draft model that is loaded already; its KV cache must be free."""
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; allowed are numbers above 0")
    draft = Engine(runner, EngineConfig(max_model_len=runner.decoder.max_len))
    assert engine.config.max_model_len is not None
    limit, like = min(engine.config.max_model_len, runner.decoder.max_len), likeness(config)
    sums, choices = np.zeros(5 + len(TOP)), list[tuple[float, bool]]()
    for index, trace in enumerate(traces):
        first = trace.prompt_len
        end = min(len(trace.token_ids), limit, first + max_tokens - len(choices))
        if end <= first:
            continue
        request = trace_request(index, trace, meta)
        params = ranking_params(config, request.params)
        tokens: list[int] = trace.token_ids[:end].tolist()
        for begin, wanted, offered in _both(engine, draft, tokens, first):
            targets = tokens[begin : begin + len(wanted)]
            rows = [
                SamplingRow(request, tokens[first : begin + i], params) for i in range(len(targets))
            ]
            ranked, scores = rank_candidates(offered, rows, RANKED)
            estimates = np.nan_to_num(acceptance_estimates(rows, scores, like)[:, 0])
            hits = ranked[:, 0] == np.asarray(targets)
            choices += zip(estimates.tolist(), hits.tolist(), strict=True)
            step = max(1, ELEMENTS // wanted.shape[1])
            for one, two in zip(wanted.split(step), offered.split(step), strict=True):
                both = one.numpy(force=True), two.numpy(force=True)
                sums += _figures(*both, temperature).sum(axis=0)
    if not choices:
        raise TraceError("the traces hold no output token within the context of both models")
    bins, count = reliability(choices), len(choices)
    kl, outside, variation, rejection, coupled, *agreed = (sums / count).tolist()
    return DraftQuality(
        num_tokens=count,
        kl=kl,
        outside=outside,
        total_variation=variation,
        agreement=dict(zip(TOP, agreed, strict=True)),
        temperature=temperature,
        rejection_acceptance=rejection,
        coupled_acceptance=coupled,
        acceptance=sum(each.num_right for each in bins) / count,
        estimated_acceptance=sum(each.expected for each in bins) / count,
        calibration_error=calibration_error(bins),
    )


def _both(
    engine: Engine, draft: Engine, tokens: Sequence[int], first: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The logits of both models for ``tokens[first:]``, piece by piece."""
    ours, theirs = (forced_logits(each, tokens, first) for each in (engine, draft))
    head = draft.runner.decoder.pruned_head
    for (begin, wanted), (also, offered) in zip(ours, theirs, strict=True):
        assert begin == also
        whole = offered if head is None else head.by_token(offered)
        yield begin, wanted.float(), whole.float()


def _figures(wanted: Logits, offered: Logits, temperature: float) -> Floats:
    """Of each row: KL, what is outside, variation, both acceptances, and agreement by :data:`TOP`.

    Args:
        wanted, offered: ``[n, vocab]``.
    """
    log_p, log_q = log_softmax(wanted), log_softmax(offered)
    p, q = np.exp(log_p), np.exp(log_q)
    has = np.isfinite(log_q)
    log_kept = log_softmax(np.where(has, wanted, -np.inf))
    kept = np.exp(log_kept)
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        kl = np.where(kept > 0, kept * (log_kept - log_q), 0.0).sum(axis=1)
    warm_p, warm_q = (log_softmax(z, temperature) for z in (wanted, offered))
    placed = ranks(offered, wanted.argmax(axis=1))
    return np.column_stack(
        [
            kl,
            np.where(has, 0.0, p).sum(axis=1),
            np.abs(p - q).sum(axis=1) / 2,
            np.minimum(np.exp(warm_p), np.exp(warm_q)).sum(axis=1),
            coupled_acceptance(warm_p, warm_q),
            *(placed < k for k in TOP),
        ]
    )
