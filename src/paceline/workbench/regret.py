"""Regret: by how much each token of a finished output fell short of the best one.

The output is scored again from beginning to end, past any divergence too, in forwards of one shape
(:mod:`paceline.workbench.teacher_forcing`). Penalties, filters and noise are the sampler's own.
Knows no second output to compare with. The definition is in ``docs/losslessness.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.engine.admission import make_requests
from paceline.engine.engine import Engine
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import Logits, rank_candidates
from paceline.workbench.teacher_forcing import forced_logits

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Regrets:
    """The scores of one output's tokens; together the arrays have one entry per token.

    Attributes:
        inner: regret of the tokens that survive the filters, in order; at least 0.
        boundary: of the tokens that a filter excludes, how far beyond it they are: the larger of
            their distance to the least survivor before the noise, and of their regret if nothing
            were filtered. Infinite for a token that is masked.
    """

    inner: Floats
    boundary: Floats


def score_output(
    engine: Engine, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Regrets:
    """Score one output (sample 0) of a prompt.

    Call it where the engine is stepped, between two steps.

    Args:
        output: at least one token; with the prompt at most the engine's context.
        params: what the output was sampled with, seed included.

    Raises:
        ConfigError: the KV cache has no room for the text.
    """
    request = _request(engine, prompt, params)
    inner: list[Floats] = []
    boundary: list[float] = []
    for begin, logits in forced_logits(engine, [*prompt, *output], len(prompt)):
        done = begin - len(prompt)
        tokens = output[done : done + len(logits)]
        rows = [SamplingRow(request, output[: done + i]) for i in range(len(tokens))]
        regrets = _shortfall(logits, rows, tokens)
        outside = np.flatnonzero(np.isinf(regrets)).tolist()
        for at in outside:
            boundary.append(_beyond_filter(logits[at : at + 1], rows[at], tokens[at]))
        inner.append(np.delete(regrets, outside))
    return Regrets(np.concatenate(inner), np.asarray(boundary))


def _request(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Request:
    config = engine.runner.decoder.config
    assert engine.config.max_model_len is not None
    assert params.is_greedy or params.seed is not None
    (request,) = make_requests(
        0,
        prompt,
        replace(params, n=1),
        seed=params.seed or 0,
        context=engine.config.max_model_len,
        eos_token_ids=frozenset(i for i in config.eos_token_ids if 0 <= i < engine.vocab_size),
        cache_salt="",
        stop_checkers=(),
    )
    return request


def _shortfall(logits: Logits, rows: Sequence[SamplingRow], tokens: Sequence[int]) -> Floats:
    """Each row's best score minus its token's; infinite where the token does not survive."""
    ids, scores = rank_candidates(logits, rows, 1)
    agrees = (ids[:, 0] == tokens) & np.isfinite(scores[:, 0])
    found = np.where(agrees, 0.0, np.inf)
    # Only the tokens that lost need the scores of the whole vocabulary.
    for at in np.flatnonzero(~agrees).tolist():
        ids, scores = rank_candidates(logits[at : at + 1], [rows[at]], logits.shape[1])
        best, own = scores[0, 0], scores[0].max(where=ids[0] == tokens[at], initial=-np.inf)
        # Logits that are not numbers are never a reason to pass.
        found[at] = best - own if np.isfinite(best) and best >= own else np.inf
    return found


def _beyond_filter(logits: Logits, row: SamplingRow, token: int) -> float:
    """How far a token is from surviving; see :class:`Regrets`."""
    params, width = row.sampling, logits.shape[1]
    unfiltered = replace(row, params=replace(params, top_k=0, top_p=1.0, min_p=0.0))
    regret = float(_shortfall(logits, [unfiltered], [token])[0])
    if np.isinf(regret):
        return regret
    ids, values = rank_candidates(
        logits, [replace(row, params=replace(params, temperature=0))], width
    )
    edited = dict(zip(ids[0].tolist(), values[0].tolist(), strict=True))
    survivors, scores = rank_candidates(logits, [row], width)
    least = min(edited[i] for i in survivors[0][scores[0] > -np.inf].tolist())
    return float(max(regret, (least - edited[token]) / params.temperature))
