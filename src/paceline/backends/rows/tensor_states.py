"""States and logs of recurrent layers in tensors, for the backends in torch. Knows no sequences.

When what is where :class:`~paceline.models.backend.StateMemory` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.backend import StateArrays
from paceline.models.config import ModelConfig
from paceline.models.shapes import DELTA, Recurrent

Tensor = torch.Tensor


class TensorStates(StateArrays):
    """Arrays of float32; the first dimension is a model's recurrent layers, in their order.

    Attributes:
        conv: ``[layers, slots, channels, kernel - 1]``, the oldest row first.
        state: ``[layers, slots, ...]``, as ``Recurrent.state_shape`` says.
        log_conv: ``[layers, lanes, nodes, channels]``, what the convolution read.
        log_key: ``[layers, lanes, nodes, groups, key_dim]``, normed keys, or Mamba-2's B.
        log_value: ``[layers, lanes, nodes, heads, value_dim]``, what a key is multiplied with:
            corrected values, or Mamba-2's x times its time step.
        log_decay: ``[layers, lanes, nodes, heads]``, factors of the state before that is added.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        num_lanes: int,
        num_nodes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        assert config.recurrent is not None
        self.shape: Recurrent = config.recurrent
        self.num_slots, self.num_lanes, self.num_nodes = num_slots, num_lanes, num_nodes
        r, layers = self.shape, sum(self.shape.layers)
        held, logged = (layers, num_slots), (layers, num_lanes, num_nodes)
        self.conv = torch.zeros(*held, r.channels, r.kernel - 1, device=device)
        self.state = torch.zeros(*held, *r.state_shape, device=device)
        self.log_conv = torch.zeros(*logged, r.channels, device=device)
        self.log_key = torch.zeros(*logged, r.groups, r.key_dim, device=device)
        values = r.value_dim if r.key_dim else 0
        self.log_value = torch.zeros(*logged, r.heads, values, device=device)
        self.log_decay = torch.zeros(*logged, r.heads, device=device)
        self.held = self.conv, self.state
        self.logs = self.log_conv, self.log_key, self.log_value, self.log_decay
        self.due = torch.zeros((layers, num_lanes), dtype=torch.bool)

    @torch.inference_mode()
    def fold(self, slot: int, lane: int, path: Sequence[int]) -> None:
        for layer in range(len(self.state)):
            self.fold_layer(layer, slot, lane, path)

    def fold_layer(self, layer: int, slot: int, lane: int, path: Sequence[int]) -> None:
        """:meth:`fold` of one layer."""
        if not self.due[layer, lane]:
            return
        self.due[layer, lane] = False
        read = self.log_conv[layer, lane, list(path)].t()  # [channels, path]
        window = torch.cat((self.conv[layer, slot], read), dim=1)
        self.conv[layer, slot] = window[:, len(path) :]
        if not self.shape.key_dim:
            return
        state = self.state[layer, slot][None]
        for entry in path:
            key, value, decay = (log[layer, lane, entry][None] for log in self.logs[1:])
            state = after_row(self.shape, state, key, value, decay)
        self.state[layer, slot] = state[0]


def after_row(shape: Recurrent, state: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """States ``[n, heads, ...]`` after one more row each, from what a log keeps of it.

    A walk makes its states by this too, so that what is folded later has the same bits.
    """
    each = key.repeat_interleave(shape.heads // shape.groups, dim=1)
    left, right = (each, value) if shape.kind == DELTA else (value, each)
    return state * decay[..., None, None] + left[..., None] * right[..., None, :]
