"""The verdict on speculation: where two arms' outputs differ, and by how much tokens fell short.

Owns regret, by how much each token of a finished output fell short of the best one. The output is
scored again from beginning to end, past any divergence too, in forwards of one shape
(:mod:`paceline_lab.teacher_forcing`). Penalties, filters and noise are the sampler's own. The
definition and the rule are in ``docs/losslessness.md``.

An identity that holds for one prompt at a time, one temperature and one proposer says little. So
requests of every kind share each batch of a long run, with lengths that let them come and go at
different steps; the same seed makes the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.config import SpeculativeConfig
from paceline.engine.admission import make_requests
from paceline.engine.engine import Engine
from paceline.request.request import FinishReason, Request, TokenLogprobs
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.sampling.logit_edits import SamplingRow
from paceline.sampling.sampler import Logits, rank_candidates
from paceline_lab.teacher_forcing import forced_logits

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
    shortfall = np.where(agrees, 0.0, np.inf)
    # Only the tokens that lost need the scores of the whole vocabulary.
    for at in np.flatnonzero(~agrees).tolist():
        ids, scores = rank_candidates(logits[at : at + 1], [rows[at]], logits.shape[1])
        best, own = scores[0, 0], scores[0].max(where=ids[0] == tokens[at], initial=-np.inf)
        # Logits that are not numbers are never a reason to pass.
        shortfall[at] = best - own if np.isfinite(best) and best >= own else np.inf
    return shortfall


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


DEFAULT_MAX_REGRET = 0.5


class Answer(Protocol):
    """One finished output."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def logprobs(self) -> list[TokenLogprobs]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """How one prompt's speculative output differs from the plain one.

    Attributes:
        prompt_index: counted from 0.
        position: index in the output of the first difference.
        count: positions that differ, those that only one output has included; an end at the same
            place for another reason counts as one.
        wrong_length: the outputs end differently although they say the same up to the end of one
            of them, or both ended at the limit of length.
    """

    prompt_index: int
    position: int
    count: int
    wrong_length: bool


def difference(prompt_index: int, plain: Answer, speculative: Answer) -> Difference | None:
    """None for identical outputs."""
    one, two = plain.token_ids, speculative.token_ids
    differing = [i for i, (a, b) in enumerate(zip_longest(one, two)) if a != b]
    if not differing:
        if plain.finish_reason == speculative.finish_reason:
            return None
        return Difference(prompt_index, len(one), 1, wrong_length=True)
    contained = differing[0] >= min(len(one), len(two))
    both_full = plain.finish_reason == speculative.finish_reason == FinishReason.LENGTH
    wrong = contained or (both_full and len(one) != len(two))
    return Difference(prompt_index, differing[0], len(differing), wrong)


def compared_logprobs(plain: Answer, speculative: Answer) -> list[bool]:
    """For each token with log-probabilities, up to the first that differs: whether they are equal.

    Rows of logits may differ where the same token is the best one by far. After the first token
    that differs the texts are different ones. What one output lacks is a difference.
    """
    equal = []
    for one, two in zip_longest(plain.logprobs, speculative.logprobs):
        if one is not None and two is not None and one.token_id != two.token_id:
            break
        equal.append(one == two)
    return equal


@dataclass(slots=True)
class Tally:
    """Everything that was compared so far."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_logprob_tokens: int = 0
    num_logprob_differences: int = 0
    differences: list[Difference] = field(default_factory=list)
    _inner: list[Floats] = field(default_factory=list)
    _boundary: list[Floats] = field(default_factory=list)

    def add(self, plain: Answer, speculative: Answer, regrets: Regrets) -> None:
        """Count the next prompt: its two outputs and the scores of the speculative one."""
        change = difference(self.num_prompts, plain, speculative)
        if change is not None:
            self.differences.append(change)
        assert len(regrets.inner) + len(regrets.boundary) == len(speculative.token_ids)
        self.num_prompts += 1
        self.num_tokens += len(speculative.token_ids)
        equal = compared_logprobs(plain, speculative)
        self.num_logprob_tokens += len(equal)
        self.num_logprob_differences += equal.count(False)
        self._inner.append(regrets.inner)
        self._boundary.append(regrets.boundary)

    @property
    def num_differences(self) -> int:
        return sum(change.count for change in self.differences)

    @property
    def num_boundary_tokens(self) -> int:
        return sum(map(len, self._boundary))

    @property
    def max_regret(self) -> float:
        return _highest(self._inner)

    @property
    def max_boundary_excess(self) -> float:
        return _highest(self._boundary)

    def figures(self) -> dict[str, Any]:
        """All counts and figures, as they are reported."""
        inner = np.concatenate([*self._inner, np.zeros(0)])
        return {
            "identical": not self.differences and not self.num_logprob_differences,
            "num_tokens": self.num_tokens,
            "num_differences": self.num_differences,
            "num_logprob_tokens": self.num_logprob_tokens,
            "num_logprob_differences": self.num_logprob_differences,
            "max_regret": self.max_regret,
            "p99_regret": float(np.quantile(inner, 0.99, method="higher")) if len(inner) else 0.0,
            "mean_regret": float(inner.mean()) if len(inner) else 0.0,
            "num_prompts": self.num_prompts,
            "num_differing_prompts": len(self.differences),
            "num_wrong_lengths": sum(change.wrong_length for change in self.differences),
            "num_regret_tokens": int(np.count_nonzero(inner)),
            "num_boundary_tokens": self.num_boundary_tokens,
            "max_boundary_excess": self.max_boundary_excess,
            "first_differences": [
                {"prompt_index": change.prompt_index, "position": change.position}
                for change in self.differences
            ],
        }

    def failures(self, promises_identity: bool, max_regret: float) -> list[str]:
        """Why the comparison fails; empty when it passes.

        Args:
            promises_identity: nothing at all may differ, and no token may have regret.
            max_regret: the largest regret that rounding explains, where identity is not promised.
        """
        figures = self.figures()
        if promises_identity:
            checks = [
                (self.num_differences, "positions differ"),
                (self.num_logprob_differences, "log-probabilities differ"),
                (figures["num_regret_tokens"], "tokens have regret"),
                (self.num_boundary_tokens, "tokens are outside a filter"),
            ]
            return [f"{count} {what}" for count, what in checks if count]
        reasons = []
        if figures["num_wrong_lengths"]:
            reasons.append(f"{figures['num_wrong_lengths']} outputs have the wrong length")
        if self.max_regret > max_regret:
            reasons.append(f"the largest regret is {self.max_regret:.4g}, above {max_regret:g}")
        if self.max_boundary_excess > max_regret:
            excess = self.max_boundary_excess
            reasons.append(f"a token is {excess:.4g} outside a filter, more than {max_regret:g}")
        return reasons


def _highest(parts: Sequence[Floats]) -> float:
    return max((float(part.max()) for part in parts if len(part)), default=0.0)


MAX_JOINED = 3
"""A prompt is cut out of at most so many that are put one after another."""

RECIPES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "repetition_penalty": 1.2},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 2.0},
)


def mixed_requests(
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    max_tokens: int,
    context: int,
    vocab_size: int,
    methods: Sequence[str],
) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts and parameters without end.

    Args:
        prompts: token ids to cut from; none is empty.
        max_tokens: most tokens of one answer.
        context: most tokens of a prompt with its answer, at least 2.
        vocab_size: for token ids that get a bias.
        methods: the proposers there are; some requests ask for one of them only, some for none.
    """
    draw = random.Random(seed)
    max_tokens = min(max_tokens, context - 1)
    while True:
        # Longer than any ordinary run of equal requests, so that no two batches are composed alike.
        recipes = list(RECIPES)
        draw.shuffle(recipes)
        for recipe in recipes:
            length = draw.randint(1, max_tokens)
            params = SamplingParams(
                **recipe,
                max_tokens=length,
                min_tokens=draw.choice((0, 0, length // 2)),
                ignore_eos=draw.random() < 0.3,
                logit_bias=_bias(draw, vocab_size),
                logprobs=draw.choice((None, 0)),
                seed=draw.getrandbits(64),
                speculative=_speculative(draw, methods),
            )
            yield _cut(draw, prompts, context - length), params


def _bias(draw: random.Random, vocab_size: int) -> dict[int, float]:
    if draw.random() < 0.8:
        return {}
    return {draw.randrange(vocab_size): draw.uniform(-5.0, 5.0) for _ in range(4)}


def _speculative(draw: random.Random, methods: Sequence[str]) -> SpeculativeParams:
    chance = draw.random()
    if chance < 0.6:
        return SpeculativeParams()
    if chance < 0.85:
        return SpeculativeParams(methods=(draw.choice(methods),))
    if chance < 0.95:
        return SpeculativeParams(num_speculative_tokens=draw.randint(1, 3))
    return SpeculativeParams(enabled=False)


def _cut(draw: random.Random, prompts: Sequence[Sequence[int]], room: int) -> list[int]:
    count = draw.randint(1, MAX_JOINED)
    joined = [token for _ in range(count) for token in draw.choice(prompts)]
    length = draw.randint(1, min(len(joined), room))
    start = draw.randint(0, len(joined) - length)
    return joined[start : start + length]


def drafting_variants(
    configs: Sequence[SpeculativeConfig],
) -> list[tuple[SpeculativeConfig, ...]]:
    """The configuration itself, then its proposers with long chains, then with wide trees.

    Nothing that was drafted is left out for being unlikely in the latter two: rejections are what
    they are for.
    """
    chains = tuple(
        replace(c, num_speculative_tokens=8, max_branching=1, max_tree_nodes=0, min_accept_prob=0.0)
        for c in configs
    )
    trees = tuple(
        replace(
            c, num_speculative_tokens=4, max_branching=3, max_tree_nodes=16, min_accept_prob=0.0
        )
        for c in configs
    )
    return [tuple(configs), chains, trees]
