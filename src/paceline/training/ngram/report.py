"""How well an n-gram model does on text that it has not seen. Owns the figures, not their form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.speculative import NgramModelConfig, PromptLookupConfig
from paceline.proposers.base import DraftBudget, Proposer
from paceline.proposers.ngram_model import NgramModelProposer
from paceline.proposers.ngram_model.lookup import LONGEST_CONTEXT, NgramLookup
from paceline.proposers.ngram_model.tables import NgramTables
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.request import TARGET_ORIGIN, Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.training.ngram.counts import Example

CANDIDATES = (1, 2, 4)
_ONE_LEVEL: dict[str, Any] = {
    "num_speculative_tokens": 1,
    "max_tree_nodes": max(CANDIDATES),
    "max_branching": max(CANDIDATES),
    "min_accept_prob": 0.0,
}
"""As many candidates for the next token as are looked at."""
_LEAST_PROB = 1e-12
"""What a token is taken to have that the model rules out."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of all tokens: with any draft, and whose token was among so many of its candidates."""

    drafted: float
    accepted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NgramReport:
    """Figures on held-out text.

    Attributes:
        num_tokens: that were predicted.
        hit_rates: by order, share of the tokens before which its n-grams were the longest known.
        cross_entropy: in nats per token.
        acceptance: of the trained model alone.
    """

    num_tokens: int
    hit_rates: dict[int, float]
    cross_entropy: float
    acceptance: Acceptance


def measure(tables: NgramTables, held_out: Sequence[Example]) -> NgramReport:
    """The figures of a model."""
    lookup, hits, loss, count = NgramLookup(tables), Counter[int](), 0.0, 0
    for example in held_out:
        tokens = example.tokens.tolist()
        for at in range(example.start, len(tokens)):
            tail = tokens[max(0, at - LONGEST_CONTEXT) : at]
            hits[1 + lookup.context_length(tail)] += 1
            loss -= math.log(max(_LEAST_PROB, lookup.probability(tail, tokens[at])))
            count += 1
    return NgramReport(
        count,
        {order: hits[order] / max(1, count) for order in range(1, tables.order + 1)},
        loss / max(1, count),
        acceptance_of(_trained(tables, ngram_window=0), held_out),
    )


def measure_others(tables: NgramTables, held_out: Sequence[Example]) -> dict[str, Acceptance]:
    """The model with what each text itself teaches, and prompt lookup on the same texts."""
    makers: dict[str, Callable[[], Proposer]] = {
        "with the text itself": _trained(tables),
        "prompt lookup": lambda: PromptLookupProposer(PromptLookupConfig(**_ONE_LEVEL)),
    }
    return {name: acceptance_of(make, held_out) for name, make in makers.items()}


def acceptance_of(make: Callable[[], Proposer], held_out: Sequence[Example]) -> Acceptance:
    """What a proposer's first candidates are worth, token by token."""
    proposer, accepted, drafted, count = make(), [0] * len(CANDIDATES), 0, 0
    budget = DraftBudget([max(CANDIDATES)], [1])
    for index, example in enumerate(held_out):
        tokens = example.tokens.tolist()
        begin = max(1, example.start)
        request = Request(index, tokens[:begin], begin, SamplingParams(), 0, len(tokens) + 1)
        for token in tokens[begin:]:
            (tree,) = proposer.propose([request], budget)
            order = sorted(range(len(tree)), key=lambda node: -tree.accept_probs[node])
            ranked = [tree.token_ids[node] for node in order]
            for at, most in enumerate(CANDIDATES):
                accepted[at] += token in ranked[:most]
            drafted += bool(ranked)
            count += 1
            request.token_ids.append(token)
            proposer.observe(request, VerifyResult((0,), (token,), (TARGET_ORIGIN,)))
        proposer.finish(request)
    total = max(1, count)
    return Acceptance(drafted / total, tuple(each / total for each in accepted))


def _trained(tables: NgramTables, **settings: Any) -> Callable[[], Proposer]:
    config = NgramModelConfig(model="held-out report", **_ONE_LEVEL, **settings)
    return lambda: NgramModelProposer(config, tables)
