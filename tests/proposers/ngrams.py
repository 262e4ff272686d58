"""N-gram models small enough to be trained in every test run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from paceline.config import SpeculativeConfig
from paceline.proposers.ngram_model import NgramModelProposer, NgramTables
from paceline.request.sampling_params import SamplingParams
from paceline_lab.train.ngram.counts import Corpus, Example, count_ngrams
from paceline_lab.train.ngram.estimation import prune, smooth
from tests.toy import VOCAB, Job, run_jobs, toy_engine

TREE = {"num_speculative_tokens": 5, "max_tree_nodes": 9, "max_branching": 3}


def train(
    texts: Sequence[Sequence[int]],
    order: int = 4,
    vocab_size: int = VOCAB,
    top_k: int = 64,
    max_bytes: int = 1 << 20,
) -> NgramTables:
    examples = [Example(np.array(text, np.int32)) for text in texts]
    counts = count_ngrams(Corpus.of(examples), order, vocab_size)
    return prune(smooth(counts, order), top_k, max_bytes)


@cache
def toy_tables() -> NgramTables:
    """Trained on what the toy target says."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    jobs = [Job([3 * i + 1, 3 * i + 2, 3 * i + 1], params) for i in range(8)]
    texts = [
        job.prompt + group[0].token_ids
        for job, group in zip(jobs, run_jobs(toy_engine(), jobs), strict=True)
    ]
    return train([*texts, [3, 4, 3, 4, 5, 3, 4, 6] * 3])


def ngram_config(**options: object) -> SpeculativeConfig:
    values = {"method": "ngram_model", "model": "toy", "min_accept_prob": 0.0} | TREE | options
    return SpeculativeConfig(**values)  # type: ignore[arg-type]


def ngram_proposer(*, is_native: bool | None = None, **options: object) -> NgramModelProposer:
    return NgramModelProposer(ngram_config(**options), toy_tables(), is_native=is_native)
