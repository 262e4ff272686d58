"""Drafts by the target itself, made cheaper: fewer layers, fewer bits, or both. No checkpoint more.

Owns the cheaper decoder and where its KV goes. The decoder shares embedding, head and, at the
target's own precision, its layers; with fewer bits these are rounded once from the target's
checkpoint. And it shares the target's KV cache: of a request that decodes the target holds the KV
of all tokens but the last, so drafting needs to read nothing first.

The KV of the last token and of drafted nodes is written behind the committed tokens, into slots
that the verification of the same step writes anew before it reads them. It is never committed,
and what was reserved for it is given back before :meth:`SelfDraftProposer.propose` returns.
Likewise states of recurrent layers are the target's, and drafted nodes are written into a log that
the verification writes anew; what was due of it is folded into the state by who reads it first.
How trees grow is the affair of :mod:`paceline.proposers.base.drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.backends.native.packing import read_layers
from paceline.backends.resolve import fewer_bits
from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import SelfDraftConfig
from paceline.core.errors import ConfigError
from paceline.loading.checkpoint import Checkpoint
from paceline.models.decoder import Decoder
from paceline.proposers.base import DraftBudget, TargetInfo
from paceline.proposers.base.growth import DraftState, Growth, ranking_params
from paceline.proposers.draft_model.loading import num_draft_layers
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.request.request import Request, VerifyResult
from paceline.request.span import Span

ROOT_SLOTS = 1
"""What the scheduler has reserved for every request that may draft."""


class SelfDraftProposer(DraftModelProposer):
    """See the module's docstring.

    A request whose last token is not the only one that the target has not computed gets no draft.

    Args:
        config: how to draft.
        runner: the cheaper decoder over the KV cache of the target.
    """

    name = "self"
    config: SelfDraftConfig

    def grow(self, requests: Sequence[Request], budget: DraftBudget) -> list[Growth | None]:
        try:
            return super().grow(requests, budget)
        finally:
            for request in requests:
                if request.request_id in self._kv:
                    self._kv.rollback(request.request_id, kept=ROOT_SLOTS)

    def observe(self, request: Request, result: VerifyResult) -> None:
        """Nothing is kept of a request."""

    def finish(self, request: Request) -> None:
        """Nothing is kept of a request, and its KV is the target's."""

    def lag(self, request: Request) -> int:
        """Tokens to be read before drafting: the target has read them."""
        return 0

    def context_length(self, request: Request) -> int:
        return len(request.token_ids)

    def _start(self, index: int, request: Request, nodes: int, depth: int) -> Growth | None:
        held, tokens = len(request.token_ids) - 1, request.token_ids
        nodes = min(nodes, self.config.tree_nodes)
        depth = min(depth, self.config.num_speculative_tokens, self.max_len - held)
        if nodes < 1 or depth < 1 or request.request_id not in self._kv:
            return None
        if self._kv[request.request_id].length != held:
            return None
        draft = DraftState(ranking_params(self.config, request.params), tokens)
        return Growth(index, request, draft, nodes, depth)

    def _commit_read(self, spans: Sequence[Span]) -> None:
        """The target has read all but the last token."""

    def _read(self, growths: Sequence[Growth]) -> tuple[list[Growth], list[Span]]:
        ready = [g for g in growths if self._kv.reserve(g.request.request_id, ROOT_SLOTS)]
        spans = []
        for growth in ready:
            request, held = growth.request, len(growth.draft.tokens) - 1
            spans.append(Span.chunk(request.request_id, held, request.token_ids[held:], True))
        return ready, spans

    def _reserve(self, growth: Growth, drafted: int) -> bool:
        return super()._reserve(growth, ROOT_SLOTS + drafted)


def build(config: SelfDraftConfig, target: TargetInfo) -> SelfDraftProposer:
    """A proposer over the target's own weights and KV.

    Raises:
        ConfigError: there is no target to draft with, it has fewer layers than are asked for, the
            draft would cost as much as the target, or cannot share its KV.
        ModelLoadError: the checkpoint's weights cannot be rounded to fewer bits.
    """
    if target.runner is None or target.checkpoint is None:
        raise ConfigError('method "self" drafts with the target, and none is loaded here')
    decoder = cheaper_decoder(config, target.runner.decoder, target.checkpoint)
    return SelfDraftProposer(config, ModelRunner(decoder, target.runner.kv))


def cheaper_decoder(config: SelfDraftConfig, whole: Decoder, checkpoint: Checkpoint) -> Decoder:
    """The first layers of a decoder, or all of them, in its own precision or in fewer bits.

    Args:
        checkpoint: what ``whole`` was loaded from.

    Raises:
        ConfigError, ModelLoadError: as :func:`build`.
    """
    most = whole.config.num_layers
    count = num_draft_layers(config, most)
    ops = fewer_bits(config.dtype, whole.ops)
    if ops is not whole.ops:
        shape = whole.config.first_layers(count)
        return whole.with_layers(read_layers(checkpoint, shape, ops), ops)
    if count == most:
        raise ConfigError(
            f"method self with all {most} layers in the target's own precision costs as much as "
            "the target: give it fewer draft_layers, or a dtype of fewer bits"
        )
    return whole.with_layers(whole.layers[:count], ops)
