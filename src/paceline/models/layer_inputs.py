"""Packed weights of the inputs that layers have beside the residual stream. Knows no arithmetic.

:class:`~paceline.models.per_layer.LayerInputs` has their sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class LayerInputWeights(NamedTuple):
    """What a token's inputs of all layers are made of.

    The inputs are the mean of the token's row of the embedding and of the projection of its row of
    the residual stream, which enters the first layer, times the square root of 2.

    Attributes:
        embedding: of tokens, ``[vocab_size, layers * width]``.
        projection: linear from the residual stream; its results are divided by the square root of
            the stream's width, and normed.
        norm: of each layer's part of them, ``[width]``.
    """

    embedding: Any
    projection: Any
    norm: Any


class LayerGate(NamedTuple):
    """How a layer takes its input: ``x + norm(projection(activation(gate(x)) * input))``.

    Attributes:
        gate: linear from the residual stream to the input's width.
        projection: linear back.
        norm: of its results.
    """

    gate: Any
    projection: Any
    norm: Any
