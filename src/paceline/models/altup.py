"""Packed weights of several residual streams. Knows no arithmetic.

:class:`~paceline.models.per_layer.AltUp` says what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class AltUpEnds(NamedTuple):
    """Linears between the one stream outside the layers and the others, without the first."""

    spread: Sequence[Any]
    gather: Sequence[Any]


class AltUpLayer(NamedTuple):
    """How a layer takes its stream and gives it back, float32 vectors but for two linears.

    Attributes:
        router_norm: of the active stream ``[hidden]``, divided by the stream's width.
        router: ``[streams * hidden]``, whose results' tanh decide.
        predict: ``[streams * streams * streams]``: the weight of stream j in the prediction of
            stream k is what the router's results make of row ``k * streams + j``.
        correct: ``[streams * streams]``: how much of the difference each stream takes, less 1.
        scale: of the active stream before the gate of the layer's input, ``[hidden]``; None: 1.
        left, right: linears to the low rank and back.
        norm: of their results.
    """

    router_norm: Any
    router: Any
    predict: Any
    correct: Any
    scale: Any
    left: Any
    right: Any
    norm: Any
