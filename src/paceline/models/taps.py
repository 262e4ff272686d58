"""Taps: hidden states that a forward hands out. Owns where they are copied; knows no layer.

Tap ``i`` is the residual stream that enters layer ``i``, before that layer's norm: 0 is the
embedding after its multiplier, and ``num_layers`` is what leaves the last layer, before the final
norm. ``num_layers + 1`` is what the head reads, after that norm. transformers counts its
``output_hidden_states`` like this up to the last layer's input (its last one is after the norm);
the layer ids of EAGLE-3 checkpoints and of the speculators format
(``eagle_aux_hidden_state_layer_ids``) do so up to ``num_layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.tensors.arrays import Floats


class Taps(NamedTuple):
    """Which residual streams a forward copies, and where to.

    Attributes:
        layers: the taps, in the order of their features.
        features: float32 ``[rows, taps, hidden_size]``, the batch's rows without padding.
    """

    layers: tuple[int, ...]
    features: Floats

    @staticmethod
    def of(layers: Sequence[int], rows: int, num_layers: int, hidden: int) -> Taps:
        """Make room for a forward's features; ``ValueError`` where the model has no such layer."""
        for layer in layers:
            if not 0 <= layer <= num_layers + 1:
                raise ValueError(f"a tap is {layer}; allowed: 0 to {num_layers + 1}")
        return Taps(tuple(layers), np.empty((rows, len(layers), hidden), np.float32))


NO_TAPS = Taps((), np.empty((0, 0, 0), np.float32))
