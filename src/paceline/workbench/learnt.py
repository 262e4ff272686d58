"""Which replayed prompts an n-gram model was trained on. Owns what is said of it.

A model drafts well where it has learnt the answer itself, which tells nothing of other prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline.config import SpeculativeConfig
from paceline.proposers.ngram_model.file import read_tables
from paceline.proposers.ngram_model.tables import context_key
from paceline.workbench.traces import Trace

MARK = " *"
"""Stands after the name of a row whose drafts come from such a model."""
FOOTNOTE = "* with n-grams learnt from answers to these very prompts: other prompts will gain less"


def learnt_prompts(configs: Iterable[SpeculativeConfig], traces: Sequence[Trace]) -> dict[str, int]:
    """How many traces have prompts that a model learnt the answers of, by its file.

    Models without any are left out, as are files that do not say what was learnt.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    keys = np.array(
        [context_key(trace.token_ids[: trace.prompt_len].tolist()) for trace in traces], np.uint64
    )
    files = {each.model for each in configs if each.method == "ngram_model" and each.model}
    found = {file: int(np.isin(keys, read_tables(file).prompts).sum()) for file in sorted(files)}
    return {file: count for file, count in found.items() if count}


def num_learnt(configs: Iterable[SpeculativeConfig], learnt: Mapping[str, int]) -> int:
    """Traces of :func:`learnt_prompts` that flatter the drafts of these proposers."""
    return max((learnt.get(each.model or "", 0) for each in configs), default=0)


def learnt_notes(learnt: Mapping[str, int], num_traces: int) -> list[str]:
    """A remark on each model that learnt answers to prompts that are replayed."""
    return [
        f"{Path(file).name} was trained on answers to {count} of these {num_traces} prompts, which "
        "flatters its drafts: replay prompts that it was not trained on"
        for file, count in learnt.items()
    ]
