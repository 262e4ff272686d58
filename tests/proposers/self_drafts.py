"""Self-drafting proposers on a toy target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from paceline.backends.native.native import why_not_native
from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig
from paceline.models.config import ModelConfig
from paceline.proposers.base import DraftBudget
from paceline.proposers.draft_model.self_draft import SelfDraftProposer
from paceline.request.request import Request
from paceline.request.span import DraftTree, Span
from tests.proposers.drive import Target
from tests.toy import TOY, USUAL, toy_runner

ALL = TOY.num_layers
PROMPT = [5, 9, 2, 7, 7, 30, 11]
native = pytest.mark.skipif(why_not_native() is not None, reason="the extension was not built")


def self_config(layers: int | None = 1, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig("self", draft_layers=layers, **{"min_accept_prob": 0.0} | options)


def self_drafter(
    target: ModelRunner,
    layers: int = 1,
    kind: type[SelfDraftProposer] = SelfDraftProposer,
    **options: Any,
) -> SelfDraftProposer:
    """The first layers of a target; also all of them, which no engine would be built with."""
    whole = target.decoder
    decoder = whole.with_layers(whole.layers[:layers], whole.ops)
    return kind(self_config(layers, **options), ModelRunner(decoder, target.kv))


def read_all_but_last(target: ModelRunner, request: Request) -> tuple[int, Tensor | None]:
    """Let a target read what it lacks of a request, but for the last token.

    Returns:
        The first position that it read, and the features of those that it read.
    """
    kv, request_id = target.kv, request.request_id
    if request_id not in kv:
        kv.open(request_id)
    held = kv[request_id].length
    chunk = request.token_ids[held:-1]
    if not chunk:
        return held, None
    assert kv.reserve(request_id, len(chunk), len(chunk))
    spans = [Span.chunk(request_id, held, chunk, sample=False)]
    result = target.forward(target.pack(spans))
    kv.commit(request_id, range(len(chunk)))
    return held, result.features


class Following(SelfDraftProposer):
    """Its target reads all of a request but its last token whenever a draft is wanted."""

    whole: ModelRunner

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        for request in requests:
            read_all_but_last(self.whole, request)
        return super().propose(requests, budget)

    def finish(self, request: Request) -> None:
        """As a preemption, which frees the target's KV."""
        self.whole.kv.free(request.request_id)


def following(
    target_dtype: str = USUAL, shape: ModelConfig = TOY, **options: Any
) -> SelfDraftProposer:
    target = toy_runner(target_dtype, prefix_caching=False, shape=shape)
    proposer = self_drafter(target, kind=Following, **options)
    assert isinstance(proposer, Following)
    proposer.whole = target
    return proposer


def begun(model: Target, *requests: Request) -> None:
    """Read the prompts; the target holds all tokens but the last of each."""
    for request in requests:
        model.verify(request, DraftTree())
