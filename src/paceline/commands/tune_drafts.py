"""Which drafts ``paceline tune`` tries: what each file or folder that was named is."""

from __future__ import annotations

from pathlib import Path

from paceline.commands.resolve import drafts_of
from paceline.commands.tune_options import TuneOptions
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.llm import embedded_model
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.proposers.draft_model.loading import check_unread_vocabulary, num_draft_layers
from paceline.proposers.draft_model.vocabulary import Vocabulary, VocabularyPair
from paceline.proposers.ngram_model.file import MAGIC, read_tables
from paceline.workbench.tune import Drafts


def target_model(options: TuneOptions) -> str:
    return options.model or embedded_model("target")


def drafts_to_try(options: TuneOptions) -> Drafts:
    """Who drafts besides ``suffix``, by names for people.

    Raises:
        ConfigError, ModelLoadError: one cannot draft for the target.
    """
    target = load_checkpoint(target_model(options))
    own = drafts_of(options.model)
    named = options.draft or [config.model for config in own if config.model is not None]
    found: dict[str, SpeculativeConfig] = {}
    for path in dict.fromkeys(named):
        name, config = _draft(path, target)
        found[path if name in found else name] = config
    layers, dtype = options.draft_layers, options.draft_dtype
    if layers is not None or dtype is not None:
        config = SpeculativeConfig("self", draft_layers=layers, dtype=dtype or "auto")
        num_draft_layers(config, target.config.num_layers)
        said = [f"{layers} layers"] if layers is not None else []
        found[", ".join(["self", *said, *([dtype] if dtype else [])])] = config
    return found


def _draft(path: str, target: Checkpoint) -> tuple[str, SpeculativeConfig]:
    """The name and the kind of a draft: a file of n-grams, or a model that is looked into."""
    if _is_ngram_model(path):
        fingerprint = target.tokenizer.fingerprint if target.tokenizer else None
        read_tables(path).check_fits(path, target.config.vocab_size, fingerprint)
        return Path(path).name, _parsed(method="ngram_model", model=path)
    draft = load_checkpoint(path)
    if draft.tokenizer is None or target.tokenizer is None:
        has_tokenizer = target.tokenizer is not None
        check_unread_vocabulary(draft, target.config.vocab_size, has_tokenizer)
    elif draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
        _check_translation(draft, target)
        return draft.name, _parsed(method="draft_model", model=path, use_heterogeneous_vocab=True)
    is_parallel = draft.config.mask_token_id is not None
    return draft.name, _parsed(
        method="parallel_draft" if is_parallel else "draft_model", model=path
    )


def _parsed(**said: object) -> SpeculativeConfig:
    (config,) = parse_speculative_config(said)
    return config


def _is_ngram_model(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:  # a folder, or a hub id
        return False


def _check_translation(draft: Checkpoint, target: Checkpoint) -> None:
    """Raise :class:`ConfigError` where texts of one are none of the other, before answers are."""
    assert draft.tokenizer is not None
    assert target.tokenizer is not None
    VocabularyPair(
        Vocabulary(target.tokenizer, target.config.vocab_size),
        Vocabulary(draft.tokenizer, draft.config.vocab_size),
        (),
    )
