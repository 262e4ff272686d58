"""``train_ngram``: traces and texts to the file of an n-gram model, and what it is worth.

Owns the recipe; data, counts, probabilities, the file and the figures are its neighbours'.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.proposers.ngram_model.file import write_tables
from paceline.proposers.ngram_model.tables import NO_PROMPTS
from paceline.training.ngram.counts import Example, NgramCounts
from paceline.training.ngram.data import prompt_keys, read_examples, split, target_vocabulary
from paceline.training.ngram.exchange import read_llama_lookup, read_uzu, write_llama_lookup
from paceline.training.ngram.options import NgramTrainingConfig
from paceline.training.ngram.pruning import prune
from paceline.training.ngram.report import Acceptance, NgramReport, measure, measure_others
from paceline.training.ngram.smoothing import smooth
from paceline.training.ngram.streaming import count_examples


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
    others: dict[str, Acceptance] = field(default_factory=dict)


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
