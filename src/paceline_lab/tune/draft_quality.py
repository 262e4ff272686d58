"""How close a draft model is to its target, along outputs of the target.

Both models score every output token given the true ones before it; their distributions are compared
a few rows at a time, so that memory does not grow with text or vocabulary. Knows neither trees nor
steps: what a draft is worth in a batch is for a replay to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig
from paceline.config.speculative import ForwardingConfig
from paceline.core.errors import TraceError
from paceline.engine.engine import Engine
from paceline.loading.checkpoint import Checkpoint
from paceline.proposers.base import TargetInfo
from paceline.proposers.draft_model.loading import load_draft
from paceline.request.traces import Trace
from paceline_lab.quality.quality import Floats, Logits, log_softmax
from paceline_lab.simulate.recorded_drafts import check_vocabulary
from paceline_lab.teacher_forcing import forced_logits

TOP = (1, 2, 4, 8)
TEMPERATURE = 0.8
"""Of the predicted acceptance."""
ELEMENTS = 1 << 20
"""Numbers of one array of a slice of rows: 8 MB."""


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
        agreement: how often the target's likeliest token is among the draft's k likeliest, by k.
        coupled_acceptance: chance of the draft's first choice at :data:`TEMPERATURE` where both add
            the same noise.
    """

    num_tokens: int
    kl: float
    agreement: Mapping[int, float]
    coupled_acceptance: float


def draft_quality(
    engine: Engine,
    config: ForwardingConfig,
    traces: Sequence[Trace],
    meta: Mapping[str, Any],
    max_tokens: int,
    checkpoint: Checkpoint | None = None,
) -> DraftQuality:
    """Load a draft model and measure it; of a parallel draft what it says without masks.

    Call it where the engine is stepped, between two steps.

    Args:
        engine: of the target, whose traces these are.
        config: of the draft model.
        meta: of the traces.
        max_tokens: output tokens that are scored, those of the first traces.
        checkpoint: of the target; only ``self`` needs it.

    Raises:
        ConfigError, ModelLoadError: the draft model cannot be used, or the KV cache has no room.
        TraceError: the traces are of another vocabulary, or hold no output token within both
            contexts.
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
    return compare_models(engine, load_draft(config, target), traces, max_tokens)


def compare_models(
    engine: Engine, runner: ModelRunner, traces: Sequence[Trace], max_tokens: int
) -> DraftQuality:
    """:func:`draft_quality` of a draft model that is loaded already; its KV cache must be free."""
    draft = Engine(runner, EngineConfig(max_model_len=runner.decoder.max_len))
    assert engine.config.max_model_len is not None
    limit = min(engine.config.max_model_len, runner.decoder.max_len)
    count, sums, head = 0, np.zeros(2 + len(TOP)), runner.decoder.pruned_head
    for trace in traces:
        first = trace.prompt_len
        end = min(len(trace.token_ids), limit, first + max_tokens - count)
        if end <= first:
            continue
        tokens: list[int] = trace.token_ids[:end].tolist()
        ours, theirs = (forced_logits(each, tokens, first) for each in (engine, draft))
        for (_, wanted), (_, offered) in zip(ours, theirs, strict=True):
            whole = offered if head is None else head.by_token(offered)
            step = max(1, ELEMENTS // wanted.shape[1])
            for at in range(0, len(wanted), step):
                sums += _figures(wanted[at : at + step], whole[at : at + step]).sum(axis=0)
        count += end - first
    if not count:
        raise TraceError("the traces hold no output token within the context of both models")
    kl, coupled, *agreed = (sums / count).tolist()
    return DraftQuality(count, kl, dict(zip(TOP, agreed, strict=True)), coupled)


def _figures(wanted: Logits, offered: Logits) -> Floats:
    """Of each row ``[n, vocab]``: KL, acceptance with shared noise, agreement by :data:`TOP`."""
    log_q = log_softmax(offered)
    log_p = log_softmax(np.where(np.isfinite(log_q), wanted, -np.inf))
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        kl = np.where(p > 0, p * (log_p - log_q), 0.0).sum(axis=1)
    coupled = coupled_acceptance(*(log_softmax(z, TEMPERATURE) for z in (wanted, offered)))
    placed = ranks(offered, wanted.argmax(axis=1))
    return np.column_stack([kl, coupled, *(placed < k for k in TOP)])
