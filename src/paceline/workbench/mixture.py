"""Requests for a long identity run: prompts cut anew, all ways of sampling, different drafts.

An identity that holds for one prompt at a time, one temperature and one proposer says little. So
requests of every kind share each batch, with lengths that let them come and go at different steps.
The same seed makes the same requests. Knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.request.sampling_params import SamplingParams, SpeculativeParams

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
