"""Taps: hidden states that a forward hands out. Owns where they are copied; knows no layer.

Tap ``i`` is the residual stream that enters layer ``i``, before that layer's norm: 0 is the
embedding after its multiplier, and the number of layers stands for what leaves the last layer,
before the final norm. transformers counts its ``output_hidden_states`` like this up to the last
layer's input, and so do the layer ids of an EAGLE-3 checkpoint
(``eagle_aux_hidden_state_layer_ids``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Taps(NamedTuple):
    """Which residual streams a forward copies, and where to.

    Attributes:
        layers: the taps, in the order of their features.
        features: float32 ``[rows, taps, hidden_size]``, the batch's rows without padding.
    """

    layers: tuple[int, ...]
    features: torch.Tensor

    @staticmethod
    def of(
        layers: Sequence[int], rows: int, num_layers: int, hidden: int, device: torch.device
    ) -> Taps:
        """Make room for a forward's features.

        Raises:
            ValueError: the model has no such layer.
        """
        for layer in layers:
            if not 0 <= layer <= num_layers:
                raise ValueError(f"a tap is {layer}; allowed are 0 to {num_layers}")
        return Taps(tuple(layers), torch.empty(rows, len(layers), hidden, device=device))

    def take(self, layer: int, x: torch.Tensor) -> None:
        """Copy what enters a layer, ``[rows, hidden_size]`` with or without padding."""
        for index, wanted in enumerate(self.layers):
            if wanted == layer:
                self.features[:, index] = x[: len(self.features)]


NO_TAPS = Taps((), torch.empty(0, 0, 0))
