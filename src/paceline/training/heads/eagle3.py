"""EAGLE-3's head with gradients: what it makes of features and tokens. Knows no data, no loss.

Source: Li et al., EAGLE-3, arXiv 2503.01840. The tensors have the names of the speculators format.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.training.heads.chains import ChainHead

Tensor = torch.Tensor
LAYER = "layers.0."
ATTENTION = LAYER + "self_attn."


class Eagle3(ChainHead):
    """Its layer reads tokens beside what ``fc`` makes of features, which is its residual stream."""

    layer = LAYER
    last_norm = "norm"
    norm_output = False

    def fused(self, features: Tensor) -> Tensor:
        return self._linear(features, "fc")

    def _enter(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._norm(F.embedding(tokens, self.embedding), LAYER + "input_layernorm")
        return x, torch.cat((embedded, self._norm(x, LAYER + "hidden_norm")), dim=-1)
