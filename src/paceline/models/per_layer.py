"""What differs from layer to layer in some families, as parts of a model's shape. Knows no weights.

Gemma 4 has larger heads in its full layers than in the sliding ones, lets its last layers read keys
and values of earlier ones, and gives every layer an input of its own beside the residual stream.
Gemma 3n has several residual streams besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Heads(NamedTuple):
    """The heads of one layer's attention.

    Attributes:
        dim: dimensions of a head.
        kv_heads: heads of keys and values.
        has_values: whether there is a linear for values; if not, they are the keys as the linear
            for keys gives them, before norms and rotation.
    """

    dim: int
    kv_heads: int
    has_values: bool = True

    @property
    def kv_width(self) -> int:
        """Outputs of the linears of keys and values."""
        return self.dim * self.kv_heads * (2 if self.has_values else 1)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """An input that each layer has for each token, beside the residual stream.

    It is made of an embedding of the token and of a linear that reads the residual stream that
    enters the first layer; at a layer's end it is gated by the residual stream and added to it.

    Attributes:
        width: of the input of one layer.
        vocab_size: tokens that the embedding has; others are read as token 0.
        layers: whose inputs the embedding and the linear hold; at least as many as the model has.
        multiplier: of the embedding.
    """

    width: int
    vocab_size: int
    layers: int
    multiplier: float

    @property
    def total(self) -> int:
        """Numbers of a token's inputs of all layers."""
        return self.layers * self.width

    def num_weights(self, hidden_size: int, layers: int) -> int:
        """Of the embedding and all matrices, the gates and projections of so many layers."""
        return (self.vocab_size + hidden_size) * self.total + 2 * layers * hidden_size * self.width


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several residual streams, of which layers read and write one (AltUp, arXiv 2301.13310).

    Before a layer all streams are predicted from all, after it all are corrected by what the layer
    made of the active one. Beside its attention a layer has a linear of low rank (LAuReL, arXiv
    2411.07501).

    Attributes:
        streams: their number.
        active: the one that layers read.
        scaled: whether a vector scales the active stream, for the gate of a layer's input alone.
        rank: of the linear beside attention.
    """

    streams: int
    active: int
    scaled: bool
    rank: int

    def num_weights(self, hidden_size: int, layers: int) -> int:
        """Of the matrices between streams, before and after so many layers and in them."""
        between = self.streams * (hidden_size + self.streams + self.streams**2)
        ends = 2 * (self.streams - 1) * hidden_size**2
        return ends + layers * (between + 2 * hidden_size * self.rank)
