"""``train_ngram``: traces and texts to the file of an n-gram model, and what it is worth.

Owns the recipe, and the figures on text that the model has not seen; data, counts,
probabilities and the file are its neighbours'.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.speculative import NgramModelConfig, PromptLookupConfig
from paceline.proposers.base import DraftBudget, Proposer
from paceline.proposers.ngram_model import (
    LONGEST_CONTEXT,
    NO_PROMPTS,
    NgramLookup,
    NgramModelProposer,
    NgramTables,
    write_tables,
)
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.request import TARGET_ORIGIN, Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline_lab.train.configs import NgramTrainingConfig
from paceline_lab.train.ngram.counts import Example, NgramCounts, count_examples
from paceline_lab.train.ngram.data import prompt_keys, read_examples, split, target_vocabulary
from paceline_lab.train.ngram.estimation import prune, smooth
from paceline_lab.train.ngram.exchange import read_llama_lookup, read_uzu, write_llama_lookup

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
class NgramAcceptance:
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
    acceptance: NgramAcceptance


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


def measure_others(tables: NgramTables, held_out: Sequence[Example]) -> dict[str, NgramAcceptance]:
    """The model with what each text itself teaches, and prompt lookup on the same texts."""
    makers: dict[str, Callable[[], Proposer]] = {
        "with the text itself": _trained(tables),
        "prompt lookup": lambda: PromptLookupProposer(PromptLookupConfig(**_ONE_LEVEL)),
    }
    return {name: acceptance_of(make, held_out) for name, make in makers.items()}


def acceptance_of(make: Callable[[], Proposer], held_out: Sequence[Example]) -> NgramAcceptance:
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
    return NgramAcceptance(drafted / total, tuple(each / total for each in accepted))


def _trained(tables: NgramTables, **settings: Any) -> Callable[[], Proposer]:
    config = NgramModelConfig(model="held-out report", **_ONE_LEVEL, **settings)
    return lambda: NgramModelProposer(config, tables)


@dataclass(frozen=True, slots=True)
class NgramTrainingResult:
    """What a finished training reports.

    Attributes:
        num_tokens: that were learnt.
        seconds: of reading, counting, smoothing and pruning.
        report: None where nothing was held out.
        others: acceptance on the same held-out text, by name.
    """

    file: Path
    num_bytes: int
    num_tokens: int
    num_ngrams: int
    seconds: float
    report: NgramReport | None = None
    others: dict[str, NgramAcceptance] = field(default_factory=dict)


def train_ngram(config: NgramTrainingConfig) -> NgramTrainingResult:
    """Train a model, or take over another program's, and write its file.

    Raises:
        TrainingError: texts cannot be used, or nothing fits into the file.
        TraceError: traces cannot be read.
        ModelLoadError: a tokenizer or a file cannot be read or written.
    """
    began = time.perf_counter()
    held_out = list[Example]()
    if config.import_uzu is not None:
        tables = read_uzu(config.import_uzu, *target_vocabulary(config))
    else:
        counts, held_out, fingerprint, prompts = _counted(config)
        smoothed = smooth(counts, config.order)
        tables = prune(smoothed, config.top_k, config.max_bytes, fingerprint, prompts)
        if config.export_llama is not None:
            write_llama_lookup(counts, config.export_llama)
    num_bytes = write_tables(tables, config.output)
    return NgramTrainingResult(
        file=Path(config.output),
        num_bytes=num_bytes,
        num_tokens=tables.num_tokens,
        num_ngrams=sum(len(level.tokens) for level in tables.levels),
        seconds=time.perf_counter() - began,
        report=measure(tables, held_out) if held_out else None,
        others=measure_others(tables, held_out) if held_out else {},
    )


def _counted(
    config: NgramTrainingConfig,
) -> tuple[NgramCounts, list[Example], str | None, NDArray[np.uint64]]:
    """What was counted, what was held out, the vocabulary's fingerprint, the prompts' keys."""
    if config.import_llama is not None:
        vocab_size, fingerprint = target_vocabulary(config)
        return read_llama_lookup(config.import_llama, vocab_size), [], fingerprint, NO_PROMPTS
    examples, vocab_size, fingerprint = read_examples(config)
    learnt, held_out = split(examples, config.held_out_tokens, config.seed)
    counts = count_examples(learnt, config.order, vocab_size, is_soft=config.soft_labels)
    return counts, held_out, fingerprint, prompt_keys(learnt)
