"""Drafts by a head: a small decoder over the target's hidden states (EAGLE-3, MTP).

The hidden states are made one vector per position and lie by the slots of the target's KV cache,
each with its token: whatever a request finds there, in a prefix that another request has computed
as in a fork, it finds here as well, if somebody read the hidden states. A slot that holds another
token by now has none.

A request is taken in from the first position on from which its hidden states are known without a
gap. A request that is not drafted for is not read any more, since hidden states take time in every
step; asked again, it begins anew with what comes from then on.

Row i of a request is its token i + 1 with the target's hidden states at position i, so that the
head's KV holds a prefix of ``token_ids[1:]``. A drafted node reads, in their place, what the head
itself put out at the node's parent. The KV of drafted nodes is never kept: once tokens are
committed, their rows are read again, with the target's hidden states, in the forward that begins
the next tree. How trees grow is the affair of :mod:`paceline.proposers.base.drafter`.

Source: Li et al., EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import HeadConfig
from paceline.core.errors import ProposerError
from paceline.models.backend import BLOCK_SIZE, Ops, Slots
from paceline.planner.drafts import Prices
from paceline.planner.value import USUAL_LAG
from paceline.proposers.base.drafter import Drafter
from paceline.proposers.base.growth import Candidates, DraftState, Growth, can_grow, grow, ranked
from paceline.request.request import Request
from paceline.request.span import Span
from paceline.sampling.logit_edits import SamplingRow
from paceline.tensors.arrays import Array, Floats, sparse_zeros

LARGEST = float(np.finfo(np.float16).max)
Fuse = Callable[[Floats], Floats]
"""``[rows, taps, hidden_size]`` to ``[rows, width]``, float32."""
NO_TOKEN = -1
PENDING_ROWS = 256
"""Rows that wait to be made one vector each, together, which takes less than one by one."""


class Fusion:
    """One vector out of the hidden states of several layers: fc, and norms where a head has them.

    Args:
        ops: computes the linear.
        fc: the packed linear, ``taps * hidden_size`` to the width of the vector.
        norm: weights over all of its inputs; None for none.
        groups: parts of the inputs that are normalised each by itself.
        eps: of the norms.
        last_norm: weights over the vector; None for none.
    """

    def __init__(
        self,
        ops: Ops,
        fc: object,
        norm: Floats | None,
        groups: int,
        eps: float,
        last_norm: Floats | None = None,
    ) -> None:
        self._ops, self._fc = ops, fc
        self._last_norm = last_norm
        self._norm, self._groups, self._eps = norm, groups, eps

    def __call__(self, features: Floats) -> Floats:
        """``[rows, taps, hidden_size]`` to ``[rows, width]``, float32."""
        rows = len(features)
        x = features.reshape(rows, -1)
        if self._norm is not None:
            x = self._normed(x.reshape(rows, self._groups, -1)).reshape(rows, -1) * self._norm
        y = self._ops.linear(x, self._fc)
        return y if self._last_norm is None else self._normed(y) * self._last_norm

    def _normed(self, x: Floats) -> Floats:
        mean = np.square(x).mean(axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean + np.float32(self._eps))
        return normed


def first_tap(features: Floats) -> Floats:
    """The hidden states of a head that reads one tap as it is."""
    return features[:, 0]


class Features:
    """Fused hidden states, in 16 bits, by the slots of a KV cache.

    Args:
        kv: of the target.
        fuse: makes one vector out of those of all taps.
        inputs: taps, and the width of each.
        width: of the vector.
    """

    def __init__(
        self,
        kv: KVCache,
        fuse: Fuse,
        inputs: tuple[int, int],
        width: int,
    ) -> None:
        self.num_blocks = kv.memory.num_blocks
        self._rows = sparse_zeros((self.num_blocks * BLOCK_SIZE, width), np.float16)
        self._tokens = np.full(len(self._rows), NO_TOKEN, np.int32)
        self._fuse, self._inputs = fuse, inputs
        self._pending: list[tuple[Slots, Floats]] = []
        self._num_pending = 0
        kv.follow(self)

    @staticmethod
    def num_bytes(kv: KVCache, width: int) -> int:
        """Of the vectors and their tokens, once all slots are in use."""
        return kv.memory.num_blocks * BLOCK_SIZE * (width * 2 + 4)

    def known(self, slots: Slots, token_ids: Sequence[int]) -> int:
        """Of slots that hold these tokens, how many of the last ones have hidden states."""
        missing = np.flatnonzero(self._tokens[slots] != np.array(token_ids, np.int32))
        return len(slots) - (int(missing[-1]) + 1 if len(missing) else 0)

    def write(self, slots: Slots, token_ids: Sequence[int], features: Floats) -> None:
        """Take hidden states ``[slots, taps, hidden_size]`` of the tokens that these slots hold."""
        if features.shape != (len(slots), *self._inputs):
            raise ProposerError(
                f"hidden states {tuple(features.shape)} for {len(slots)} positions; the head reads "
                f"{self._inputs} of each"
            )
        self._tokens[slots] = token_ids
        self._pending.append((slots, features))
        self._num_pending += len(slots)
        if self._num_pending >= PENDING_ROWS:
            self._settle()

    def read(self, slots: Slots) -> Floats:
        """``[slots, width]`` float32."""
        self._settle()
        return self._rows[slots].astype(np.float32)

    def move(self, source: Slots, target: Slots) -> None:
        with suppress(Exception):  # the KV moves all the same, and reading fails again
            self._settle()
        self._rows[target] = self._rows[source]
        self._tokens[target] = self._tokens[source]

    def fill(self, slots: Slots, value: float) -> None:
        self._settle()
        self._rows[slots] = value
        self._tokens[slots] = NO_TOKEN

    def _settle(self) -> None:
        """Write what is pending; a slot that came twice holds what came last."""
        if not self._pending:
            return
        pending, self._pending, self._num_pending = self._pending, [], 0
        slots, features = map(joined, zip(*pending, strict=True))
        self._rows[slots] = np.minimum(np.maximum(self._fuse(features), -LARGEST), LARGEST)


def joined(parts: Sequence[Array]) -> Array:
    """All rows of some arrays; one alone, as a step of one request has it, is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


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


class HeadDrafter(Drafter):
    """Drafts by a decoder that reads hidden states of the target; owns whose states are wanted.

    Args:
        config: how to draft.
        runner: the head, over a KV cache.
        taps: layers of the target whose hidden states it reads.
    """

    def __init__(self, config: HeadConfig, runner: ModelRunner, taps: Sequence[int]) -> None:
        super().__init__(config, runner.kv, runner.decoder.max_len)
        self.name = config.method
        self.taps = tuple(taps)
        self._runner = runner
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

    def finish(self, request: Request) -> None:
        super().finish(request)
        if self._followed.pop(request.request_id, None) is not None:
            self._is_wanted = True

    def lag(self, request: Request) -> int | None:
        """Of a request that rests: what is read before its first draft."""
        followed = self._state(request)
        if followed is None:
            return self._rest_lag(request)
        return super().lag(request) if self._is_ready(request, followed) else None

    def _rest_lag(self, request: Request) -> int | None:
        """:meth:`lag` of a request that rests."""
        return LEAST_CONTEXT + 1 if request.remaining > 2 * LEAST_CONTEXT else None

    @abstractmethod
    def _is_ready(self, request: Request, followed: Followed) -> bool:
        """Whether the hidden states that the next draft reads are there."""

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


class FeatureDrafter(HeadDrafter):
    """See the module's docstring.

    Args: those of :class:`HeadDrafter`, whose runner has a KV cache of its own without prefix
        caching, and
        features: the hidden states, fused, by the slots of ``target_kv``.
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
        super().__init__(config, runner, taps)
        self._features = features
        self._target_kv = target_kv

    def read(self, request: Request, start: int, features: Floats) -> None:
        end = start + len(features)
        slots = self._target_kv[request.request_id].slots_at(range(start, end))
        self._features.write(slots, request.token_ids[start:end], features)

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

    def _features_of(self, span: Span) -> Floats:
        """Fused hidden states at the positions of a span of known tokens, ``[nodes, width]``."""
        followed = self._followed[span.request_id]
        assert followed is not None
        assert followed.begin is not None
        first = followed.begin + span.start
        positions = range(first, first + len(span.token_ids))
        return self._features.read(self._target_kv[span.request_id].slots_at(positions))


class HeadProposer(FeatureDrafter):
    """See the module's docstring.

    Args: those of :class:`~paceline.proposers.heads.proposer.FeatureDrafter`; the runner's one tap
        is what a node's children read.
    """

    rows_behind = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._outputs: dict[int, Floats] = {}
        """By request: what the head put out at the nodes of its span, ``[nodes, hidden_size]``."""

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._outputs.pop(request.request_id, None)

    def _kept(self, draft: DraftState, committed: Sequence[int]) -> Sequence[int]:
        return ()

    def _draft(self, growths: list[Growth], spans: Sequence[Span], prices: Prices) -> None:
        if can_grow(self._runner, growths):
            inputs = joined([self._features_of(span) for span in spans])
            grow(self.config, self._runner, growths, spans, inputs, prices, self._reserve)
        else:
            super()._draft(growths, spans, prices)

    def _candidates(
        self, spans: Sequence[Span], rows: Sequence[SamplingRow]
    ) -> Iterable[Candidates]:
        inputs = joined([self._inputs(span) for span in spans])
        result = self._runner.forward(self._runner.pack(spans), inputs=inputs)
        assert result.features is not None
        self._put_out(spans, result.features[:, 0])
        head = self._runner.decoder.pruned_head
        return ranked(result.logits, rows, self.config, head) if rows else ()

    def _inputs(self, span: Span) -> Floats:
        """What a span's nodes read beside their tokens, ``[nodes to compute, width]``."""
        if span.num_cached:  # drafted nodes
            outputs = self._outputs[span.request_id]
            return outputs[list(span.parents[span.num_cached :])]
        return self._features_of(span)

    def _put_out(self, spans: Sequence[Span], outputs: Floats) -> None:
        """Keep what the children of these spans' nodes will read.

        Of tokens that were read that is the last one's, which becomes node 0 of the draft's span.
        """
        first = 0
        for span in spans:
            last = first + len(span.token_ids) - span.num_cached
            if span.num_cached:
                known = self._outputs[span.request_id]
                self._outputs[span.request_id] = np.concatenate([known, outputs[first:last]])
            else:
                self._outputs[span.request_id] = outputs[last - 1 : last]
            first = last
