"""From a configuration to a draft model proposer: of the target's vocabulary, or of another."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.draft_model.heterogeneous import HeterogeneousProposer, shadow_config
from paceline.proposers.draft_model.loading import draft_runner, load_draft, open_draft
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.draft_model.vocabulary import Vocabulary, VocabularyPair

EXPANSION = 4
"""Tokens of the draft per token of the target for which there is room. Beyond that the oldest
text is forgotten sooner."""


def build(config: SpeculativeConfig, target: TargetInfo) -> Proposer:
    """The proposer of a draft model.

    Raises:
        ModelLoadError: the draft cannot be read.
        ConfigError: it has another vocabulary and ``use_heterogeneous_vocab`` is not set, or one
            that cannot be translated; or there is no memory for its KV cache.
    """
    if not config.use_heterogeneous_vocab:
        return DraftModelProposer(config, load_draft(config, target))
    if target.tokenizer is None:
        raise ConfigError(
            "use_heterogeneous_vocab needs texts, and the target was loaded without a tokenizer"
        )
    checkpoint = open_draft(config, target)
    tokenizer, shape = checkpoint.tokenizer, checkpoint.config
    assert tokenizer is not None
    if tokenizer.fingerprint == target.fingerprint:
        return DraftModelProposer(config, draft_runner(checkpoint, config, target))
    pair = VocabularyPair(
        Vocabulary(target.tokenizer, target.vocab_size),
        Vocabulary(tokenizer, shape.vocab_size),
        config.vocab_replacements,
    )
    own = replace(target, vocab_size=shape.vocab_size)  # its logits stay as they are
    runner = draft_runner(checkpoint, shadow_config(config), own, EXPANSION)
    return HeterogeneousProposer(config, runner, pair)
