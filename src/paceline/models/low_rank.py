"""Low-rank additions to a model's linears (LoRA: Hu et al., 2021). Knows no file, no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.tensors.arrays import Array


class LowRank(NamedTuple):
    """An addition to some outputs of a linear: ``scale * up @ (down @ x)``.

    Attributes:
        first: of these outputs.
        down: ``[rank, inputs]``.
        up: ``[outputs, rank]``.
    """

    first: int
    down: Array
    up: Array
    scale: float


AdaptedLayers = Sequence[Mapping[str, Sequence[LowRank]]]
"""Of each layer: what is added to ``qkv``, ``o``, ``gate_up`` and ``down`` of
:class:`~paceline.models.weights.Layer`."""
