"""What an n-gram model learns from: traces and texts, in one vocabulary. Knows no counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import TrainingError, UnsupportedModelError
from paceline.core.files import read_json
from paceline.loading.fetching import model_path
from paceline.loading.quantised.methods import split_quantisation
from paceline.models.families.config_json import config_from_hf
from paceline.proposers.ngram_model import context_key
from paceline.request.traces import read_meta, read_traces
from paceline.text.tokenizer import Tokenizer
from paceline_lab.train.configs import NgramTrainingConfig
from paceline_lab.train.data import read_documents, tokenize
from paceline_lab.train.model_files import load_tokenizer
from paceline_lab.train.ngram.counts import Example

LARGEST_HELD_OUT_SHARE = 5
"""One part in so many of all tokens is the most that is held out."""


def read_examples(config: NgramTrainingConfig) -> tuple[list[Example], int, str | None]:
    """All examples, the size of their vocabulary and its fingerprint.

    Raises:
        TrainingError: texts cannot be read, or not all are in one vocabulary.
        TraceError: traces cannot be read.
        ModelLoadError: the target has no readable tokenizer.
    """
    fingerprints = {read_meta(folder).get("vocab_fingerprint"): folder for folder in config.traces}
    size, fingerprint = target_vocabulary(config)
    if fingerprint is not None and config.target is not None:
        fingerprints[fingerprint] = config.target
    known = [each for each in fingerprints if each is not None]
    if len(known) > 1:
        names = " and ".join(str(fingerprints[each]) for each in known[:2])
        raise TrainingError(f"{names} are of different vocabularies; one model has one")
    examples = _of_traces(config)
    if config.text or config.stdlib:
        examples += _of_texts(config)
    highest = max((int(each.tokens.max()) for each in examples if len(each.tokens)), default=-1)
    return examples, max(size, highest + 1), known[0] if known else None


def target_vocabulary(config: NgramTrainingConfig) -> tuple[int, str | None]:
    """Size and fingerprint of the target's vocabulary; nothing where no target is named.

    Some tokenizers have ids that their model has no logits for.

    Raises:
        ModelLoadError: the target has no readable tokenizer, or a damaged configuration.
    """
    if config.target is None:
        return 0, None
    folder = model_path(config.target)
    tokenizer = Tokenizer.from_folder(folder)
    size = tokenizer.vocab_size
    if (folder / "config.json").is_file():
        raw, _ = split_quantisation(read_json(folder / "config.json"), folder)
        with suppress(UnsupportedModelError):  # tables can be made for it, and exported
            size = min(size, config_from_hf(raw).vocab_size)
    return size, tokenizer.fingerprint


def _of_traces(config: NgramTrainingConfig) -> list[Example]:
    examples = []
    for folder in config.traces:
        answers = list(read_traces(folder))
        if config.soft_labels and not any(each.top_logprobs.any() for each in answers):
            raise TrainingError(
                f"{folder} holds no log-probabilities to learn soft labels from; record them with "
                "paceline trace"
            )
        if not all((each.top_logprobs <= 0.0).all() for each in answers):
            raise TrainingError(f"{folder} is damaged: its log-probabilities are invalid")
        examples += [
            Example(each.token_ids, each.prompt_len, each.top_ids, np.exp(each.top_logprobs))
            for each in answers
        ]
    return examples


def _of_texts(config: NgramTrainingConfig) -> list[Example]:
    if config.target is None:
        raise TrainingError("texts are read by the target's tokenizer; name its folder as target")
    documents = read_documents(config.text, config.exclude, config.stdlib)
    return [Example(each) for each in tokenize(documents, load_tokenizer(config.target))]


def prompt_keys(examples: Sequence[Example]) -> NDArray[np.uint64]:
    """The keys of the prompts of all examples that have one, ascending, no two alike."""
    keys = {context_key(each.tokens[: each.start].tolist()) for each in examples if each.start}
    return np.array(sorted(keys), np.uint64)


def split(
    examples: Sequence[Example], held_out_tokens: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Examples to learn and whole ones that are held out, chosen by ``seed`` alone."""
    sizes = [len(each.tokens) - each.start for each in examples]
    room = min(held_out_tokens, sum(sizes) // LARGEST_HELD_OUT_SHARE)
    held = set()
    for index in np.random.default_rng((seed, 0x5E1D)).permutation(len(examples)).tolist():
        if 0 < sizes[index] <= room:
            held.add(index)
            room -= sizes[index]
    learnt = [each for index, each in enumerate(examples) if index not in held]
    return learnt, [examples[index] for index in sorted(held)]
