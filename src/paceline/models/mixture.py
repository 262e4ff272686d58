"""Mixtures of experts: what a layer's packed weights are. Knows no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class FeedForward(NamedTuple):
    """Packed linears of one feed-forward layer or expert: to twice its width, and back."""

    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class Mixture:
    """Packed weights of a layer's mixture.

    Attributes:
        router: a linear in float32 on every backend, one output for each expert and, where a
            sigmoid weighs the shared expert, one more.
        experts: by their ids.
        shared: None where there is no shared expert.
        choice_bias: float32 ``[experts]``, added to the scores for the choice; None: there is none.
    """

    router: Any
    experts: Sequence[FeedForward]
    shared: FeedForward | None
    choice_bias: Any = None
