"""Mixtures of experts: what a layer's packed weights are. Knows no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class FeedForward(NamedTuple):
    """Packed linears of one feed-forward layer or expert: to twice its width, and back."""

    gate_up: Any
    down: Any


class MixtureNorms(NamedTuple):
    """Norms of a mixture whose parts have their own; its shared expert reads the layer's.

    Attributes:
        router, experts: before them, ``[hidden]``.
        routed, shared: of the sum of the chosen experts' results, and of the shared expert's.
    """

    router: Any
    experts: Any
    routed: Any
    shared: Any


@dataclass(frozen=True, slots=True)
class Mixture:
    """Packed weights of a layer's mixture.

    Attributes:
        router: a linear in float32 on every backend, one output for each expert and, where a
            sigmoid weighs the shared expert, one more.
        experts: by their ids.
        shared: None where there is no shared expert.
        choice_bias: float32 ``[experts]``, added to the scores for the choice; None: there is none.
        scales: float32 ``[experts]``, what the weight of each is multiplied with; None: 1.
        norms: None where all parts read the layer's norm, and their results have none.
    """

    router: Any
    experts: Sequence[FeedForward]
    shared: FeedForward | None
    choice_bias: Any = None
    scales: Any = None
    norms: MixtureNorms | None = None
