"""What drafters by a target's hidden states share: whose they read, and that these have come.

They take a request in from the first position on from which its hidden states are known without a
gap. A request that is not drafted for is not read any more, since hidden states take time in every
step; asked again, they begin anew with what comes from then on. Knows no kind of head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import HeadConfig
from paceline.planner.value import USUAL_LAG
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Growth
from paceline.proposers.heads.features import Features
from paceline.request.request import Request
from paceline.request.span import Span
from paceline.tensors.arrays import Floats

PATIENCE = 16
"""Tokens that a request may get without being drafted for before it is not read any more."""
LEAST_CONTEXT = USUAL_LAG
"""Positions that are read, where it begins amid a request, before it drafts."""


@dataclass(slots=True)
class Followed:
    """A request whose hidden states are read.

    Attributes:
        asked_at: tokens that it had when a draft of it was last wanted.
        is_late: it was not read from its first step on.
        begin: position from which its hidden states are known without a gap; None while it was not
            drafted for.
    """

    asked_at: int
    is_late: bool = False
    begin: int | None = None


class FeatureDrafter(Drafter):
    """See the module's docstring.

    Args:
        config: how to draft.
        runner: the head with a KV cache of its own, without prefix caching.
        taps: layers of the target whose hidden states it reads.
        features: these, fused, by the slots of ``target_kv``.
        target_kv: the target's KV cache.
    """

    rows_behind = 0
    """By how many tokens a row's token stands behind the position whose hidden states it reads."""

    def __init__(
        self,
        config: HeadConfig,
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
        self._followed: dict[int, Followed | None] = {}
        """None: a request that rests."""
        self._is_wanted = True
        """Requests that come are read from their first step on: the latest one was, to its end."""

    @property
    def runner(self) -> ModelRunner:
        """The head itself."""
        return self._runner

    @property
    def num_forwards(self) -> int:
        return self._runner.num_forwards

    def follows(self, request: Request) -> bool:
        followed = self._state(request)
        if followed is not None and len(request.token_ids) - followed.asked_at > PATIENCE:
            self.finish(request)
            self._followed[request.request_id] = followed = None
            self._is_wanted = False
        return followed is not None

    def _state(self, request: Request) -> Followed | None:
        """Of a request that may be seen for the first time; None of one that rests."""
        if request.request_id not in self._followed:
            state = Followed(len(request.token_ids)) if self._is_wanted else None
            self._followed[request.request_id] = state
        return self._followed[request.request_id]

    def read(self, request: Request, start: int, features: Floats) -> None:
        end = start + len(features)
        slots = self._target_kv[request.request_id].slots_at(range(start, end))
        self._features.write(slots, request.token_ids[start:end], features)

    def finish(self, request: Request) -> None:
        super().finish(request)
        if self._followed.pop(request.request_id, None) is not None:
            self._is_wanted = True

    def lag(self, request: Request) -> int | None:
        """Of a request that rests: what is read before its first draft."""
        followed = self._state(request)
        if followed is None:
            return LEAST_CONTEXT + 1 if request.remaining > 2 * LEAST_CONTEXT else None
        return super().lag(request) if self._is_ready(request, followed) else None

    def _is_ready(self, request: Request, followed: Followed) -> bool:
        """Whether the hidden states of all known positions are there, and enough of them."""
        target_kv, request_id = self._target_kv, request.request_id
        needed = len(request.token_ids) - 1
        if request_id not in target_kv or target_kv[request_id].length < needed:
            return False
        if followed.begin is None:
            first = max(0, needed - LEAST_CONTEXT) if followed.is_late else 0
            slots = target_kv[request_id].slots_at(range(first, needed))
            known = self._features.known(slots, request.token_ids[first:needed])
            if followed.is_late and known < needed - first:
                return False
            followed.begin = needed - known
        return True

    def _first(self, request: Request) -> int:
        followed = self._followed.get(request.request_id)
        begin = followed.begin if followed else None
        return self.rows_behind + (begin or 0)

    def _start(self, index: int, request: Request, nodes: int, depth: int) -> Growth | None:
        """None also of a request that rested, which is read from now on."""
        followed = self._state(request)
        if followed is None:
            self._followed[request.request_id] = Followed(len(request.token_ids), is_late=True)
            return None
        followed.asked_at = len(request.token_ids)
        if not self._is_ready(request, followed):
            return None
        return super()._start(index, request, nodes, depth)

    def _features_of(self, span: Span) -> Floats:
        """Fused hidden states at the positions of a span of known tokens, ``[nodes, width]``."""
        followed = self._followed[span.request_id]
        assert followed is not None
        assert followed.begin is not None
        first = followed.begin + span.start
        positions = range(first, first + len(span.token_ids))
        return self._features.read(self._target_kv[span.request_id].slots_at(positions))
