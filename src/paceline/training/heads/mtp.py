"""An MTP head with gradients: what it makes of hidden states and tokens. Knows no data, no loss.

What it computes is what drafts (:mod:`paceline.proposers.heads.mtp`). The tensors have the names of
the speculators format.

Source: DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437; one layer for every depth: Cai et al., FastMTP,
arXiv 2509.18362.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.training.heads.chains import ChainHead

Tensor = torch.Tensor
LAYER = "mtp_layers.0."


class Mtp(ChainHead):
    """A linear makes tokens and the target's output after its last norm the residual stream."""

    layer = LAYER
    last_norm = LAYER + "final_layernorm"
    norm_output = True

    def _enter(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._norm(F.embedding(tokens, self.embedding), LAYER + "token_layernorm")
        joined = torch.cat((embedded, self._norm(x, LAYER + "hidden_layernorm")), dim=-1)
        stream = self._linear(joined, LAYER + "input_proj")
        return stream, self._norm(stream, LAYER + "input_layernorm")
