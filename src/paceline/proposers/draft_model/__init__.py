"""From a configuration to a draft model proposer: of the target's vocabulary, or of another."""

from __future__ import annotations

import logging
from dataclasses import replace

from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import DraftModelConfig, ForwardingConfig
from paceline.loading.checkpoint import Checkpoint
from paceline.proposers.base import Proposer, TargetInfo
from paceline.proposers.draft_model.heterogeneous import (
    HeterogeneousProposer,
    ShadowDrafter,
    shadow_config,
)
from paceline.proposers.draft_model.loading import (
    check_goes_back,
    check_unread_vocabulary,
    draft_runner,
    load_draft,
    open_draft,
)
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.draft_model.translation import Vocabulary, VocabularyPair

log = logging.getLogger(__name__)

EXPANSION = 4
"""Tokens of the draft per token of the target for which there is room. Beyond that the oldest
text is forgotten sooner."""


def build(config: DraftModelConfig, target: TargetInfo) -> Proposer:
    """The proposer of a draft model.

    Raises:
        ModelLoadError: the draft cannot be read.
        ConfigError: it has another vocabulary and ``use_heterogeneous_vocab`` is not set, or one
            that cannot be translated; or there is no memory for its KV cache.
    """
    if not config.use_heterogeneous_vocab:
        return DraftModelProposer(config, load_draft(config, target))
    checkpoint = open_draft(config, target)
    pair = vocabulary_pair(checkpoint, config, target)
    if pair is None:
        return DraftModelProposer(config, draft_runner(checkpoint, config, target))
    log.warning(
        "%s has another vocabulary than the target: what it drafts is translated, which takes time",
        checkpoint.name,
    )
    runner = foreign_runner(checkpoint, config, target)
    drafter = ShadowDrafter(shadow_config(config), runner, pair, config.tree_branching)
    return HeterogeneousProposer(config, drafter, pair)


def vocabulary_pair(
    checkpoint: Checkpoint, config: ForwardingConfig, target: TargetInfo
) -> VocabularyPair | None:
    """The vocabularies of a target and a draft, which can be translated; None where they are one.

    Raises:
        ConfigError: one has no tokenizer, and nothing says that its tokens are the other's.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or target.tokenizer is None:
        has_tokenizer = target.tokenizer is not None
        check_unread_vocabulary(checkpoint, target.vocab_size, has_tokenizer)
        return None
    if tokenizer.fingerprint == target.fingerprint:
        return None
    return VocabularyPair(
        Vocabulary(target.tokenizer, target.vocab_size),
        Vocabulary(tokenizer, checkpoint.config.vocab_size),
        config.vocab_replacements if isinstance(config, DraftModelConfig) else (),
    )


def foreign_runner(
    checkpoint: Checkpoint, config: ForwardingConfig, target: TargetInfo
) -> ModelRunner:
    """A draft of another vocabulary ready to run; its logits stay as they are."""
    check_goes_back(checkpoint.config, "another vocabulary")
    own = replace(target, vocab_size=checkpoint.config.vocab_size)
    return draft_runner(checkpoint, shadow_config(config), own, EXPANSION)
