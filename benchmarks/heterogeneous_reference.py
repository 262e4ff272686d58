"""What a draft would reach if it had the target's vocabulary, counted on the target's own answers.

That cannot be run. Instead, before every token of an answer the draft reads the text up to there
and goes on with the text that it finds likeliest; the token is one that it drafts when that text
begins with the token's. Steps of at most as many tokens as a chain has are then taken over these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline import SamplingParams
from paceline.config import SpeculativeConfig
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.proposers.base import DraftBudget, TargetInfo
from paceline.proposers.draft_model.heterogeneous import shadow_config
from paceline.proposers.draft_model.loading import draft_runner
from paceline.proposers.draft_model.shadows import Shadow, ShadowDrafter
from paceline.proposers.draft_model.translation import Translation
from paceline.proposers.draft_model.vocabulary import Vocabulary, VocabularyPair
from paceline.request import Request, VerifyResult

Answers = list[list[int]]
CONTEXT = 1024
"""Tokens of the draft for which there is room."""
KV_BYTES = 1 << 28


def foreseen(
    target: Path, draft: Path, tokens: Answers, prompt_lens: Sequence[int]
) -> list[list[bool]]:
    """For every token of every answer whether the draft's likeliest text begins with it."""
    own, other = load_checkpoint(str(target)), load_checkpoint(str(draft))
    pair = VocabularyPair(_vocabulary(own), _vocabulary(other))
    config = SpeculativeConfig("draft_model", str(draft), use_heterogeneous_vocab=True)
    config = replace(shadow_config(config), max_tree_nodes=0, max_branching=1, min_accept_prob=0.0)
    info = TargetInfo(other.config.vocab_size, None, "cpu", CONTEXT, 1, KV_BYTES)
    drafter = ShadowDrafter(config, draft_runner(other, config, info), pair, 1)
    limit = other.config.max_position - 64
    found = []
    for index, (ids, prompt_len) in enumerate(zip(tokens, prompt_lens, strict=True)):
        request = Request(index, [], 0, SamplingParams(temperature=0.0), 0, 1 << 20)
        drafter.shadows[index] = shadow = Shadow(request, request, Translation(pair, limit))
        found.append([_says(drafter, shadow, ids, at) for at in range(prompt_len, len(ids))])
        drafter.finish(request)
    return found


def _vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    assert checkpoint.tokenizer is not None
    return Vocabulary(checkpoint.tokenizer, checkpoint.config.vocab_size)


def _says(drafter: ShadowDrafter, shadow: Shadow, ids: Sequence[int], at: int) -> bool:
    """Whether the draft, having read the tokens before ``at``, goes on with that one's text."""
    translation, request = shadow.translation, shadow.request
    drafter.rewind(request, translation.update(ids[:at]))
    translation.is_direct = False
    request.token_ids = translation.view
    drafter.observe(request, VerifyResult([0], [], []))
    piece = translation.pair.target.piece(ids[at])
    if piece is None:
        return False
    wanted = translation.pending + piece
    (tree,) = drafter.propose([request], DraftBudget([len(wanted)], [len(wanted)]))
    written = translation.pair.draft.written(tree.token_ids)
    return written.startswith(wanted)


def steps_over(flags: Sequence[bool], chain: int) -> tuple[int, int]:
    """Steps for an answer, and tokens accepted in them, when just the flagged ones are drafted."""
    steps = accepted = at = 0
    while at < len(flags):
        run = 0
        while run < chain and at + run < len(flags) and flags[at + run]:
            run += 1
        steps, accepted, at = steps + 1, accepted + run, at + run + 1
    return steps, accepted
