"""What drafters by a target's hidden states share: which they read, and that these have come.

Knows no kind of head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.config import SpeculativeConfig
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Growth
from paceline.proposers.heads.features import Features
from paceline.request import Request
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.model_runner import ModelRunner
from paceline.span import Span


class FeatureDrafter(Drafter):
    """See the module's docstring.

    Args:
        config: how to draft.
        runner: the head with a KV cache of its own, without prefix caching.
        taps: layers of the target whose hidden states it reads.
        features: these, fused, by the slots of ``target_kv``.
        target_kv: the target's KV cache.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        runner: ModelRunner,
        taps: Sequence[int],
        features: Features,
        target_kv: KVCache,
    ) -> None:
        super().__init__(config, runner.kv, runner.decoder.max_len)
        self.name = config.method
        self.taps = tuple(taps)
        self._runner = runner
        self._features = features
        self._target_kv = target_kv

    @property
    def runner(self) -> ModelRunner:
        """The head itself."""
        return self._runner

    @property
    def num_forwards(self) -> int:
        return self._runner.num_forwards

    def read(self, request: Request, start: int, features: torch.Tensor) -> None:
        positions = range(start, start + len(features))
        self._features.write(self._target_kv[request.request_id].slots_at(positions), features)

    def _start(self, index: int, request: Request, nodes: int, depth: int) -> Growth | None:
        """None also where the target has not computed all positions whose hidden states count."""
        target_kv, request_id = self._target_kv, request.request_id
        needed = len(request.token_ids) - 1
        if request_id not in target_kv or target_kv[request_id].length < needed:
            return None
        return super()._start(index, request, nodes, depth)

    def _features_of(self, span: Span) -> torch.Tensor:
        """Fused hidden states at the positions of a span of known tokens, ``[nodes, width]``."""
        positions = range(span.start, span.start + len(span.token_ids))
        return self._features.read(self._target_kv[span.request_id].slots_at(positions))
