"""The kinds of heads that can be trained: all in which they differ. Knows no loss and no loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.loading.checkpoint import Checkpoint
from paceline.loading.head_kinds import EAGLE3, MTP
from paceline.models.config import ModelConfig
from paceline.request.traces import Trace
from paceline.training.configs import HeadTrainingConfig
from paceline.training.heads.batches import Batch
from paceline.training.heads.continued import known_mask_token
from paceline.training.heads.dflash import DFlash
from paceline.training.heads.eagle3 import Eagle3
from paceline.training.heads.initial import (
    TargetWeights,
    dflash_params,
    eagle3_params,
    mtp_params,
    rarest_token,
)
from paceline.training.heads.layout import dflash_layers, layers_config
from paceline.training.heads.losses import Head
from paceline.training.heads.mtp import Mtp
from paceline.training.ops import TrainingOps

Tensor = torch.Tensor
BLOCKS_PER_POSITION = 2
"""In how many blocks a position is on average. More cost time for what is much the same."""


class Kind(Protocol):
    """A kind of head, with its options.

    Attributes:
        layers: the shape of its layers.
        depth: tokens that it is trained to draft one after another.
        most: tokens that it can draft one after another.
        recipe: how it is trained, for the card.
    """

    @property
    def layers(self) -> ModelConfig: ...
    @property
    def depth(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def recipe(self) -> str: ...

    def description(self, taps: Sequence[int]) -> dict[str, Any]:
        """What its ``config.json`` says and those of other kinds do not."""
        ...

    def params(
        self, weights: TargetWeights, token_ids: Tensor, sample: Tensor
    ) -> dict[str, Tensor]:
        """What it begins with.

        Args:
            token_ids: of its output matrix.
            sample: features of some texts, ``[rows, taps * hidden_size]``.
        """
        ...

    def head(
        self, params: Mapping[str, Tensor], embedding: Tensor, ops: TrainingOps, max_len: int
    ) -> Head: ...

    def chosen(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The wanted rows after which a training step drafts to the end, ascending."""
        ...


def kind_of(config: HeadTrainingConfig, target: Checkpoint, traces: Sequence[Trace]) -> Kind:
    """The kind that a configuration names; ``traces`` tell which tokens texts hardly have."""
    if config.kind == EAGLE3:
        return _Eagle3Kind(config, layers_config(target.config))
    if config.kind == MTP:
        return _MtpKind(config, layers_config(target.config))
    layers, known = dflash_layers(target.config, config.num_layers), None
    if config.init:
        known = known_mask_token(Path(config.init), target.config.vocab_size)
    if known is None:
        known = rarest_token(traces, TargetWeights(target).embedding)
    return _DFlashKind(config, layers, known)


@dataclass(frozen=True, slots=True)
class _ChainKind:
    config: HeadTrainingConfig
    layers: ModelConfig

    @property
    def depth(self) -> int:
        return self.config.num_steps

    @property
    def most(self) -> int:
        return self.config.eval_steps  # it goes on as long as one likes

    @property
    def recipe(self) -> str:
        c = self.config
        return (
            f"{c.num_steps} steps unrolled (each weighs {c.step_decay:g} of the one before, "
            f"{c.deep_share:.0%} of the positions beyond the first)"
        )

    def chosen(self, batch: Batch, generator: torch.Generator) -> Tensor:
        drawn = _drawn(len(batch.wanted), generator)
        return ((drawn < self.config.deep_share) & (batch.left > 0)).nonzero().squeeze(1)


class _Eagle3Kind(_ChainKind):
    def description(self, taps: Sequence[int]) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(taps),
        }

    def params(
        self, weights: TargetWeights, token_ids: Tensor, sample: Tensor
    ) -> dict[str, Tensor]:
        num_taps = sample.shape[1] // self.layers.hidden_size
        return eagle3_params(weights, num_taps, token_ids, self.config.seed)

    def head(
        self, params: Mapping[str, Tensor], embedding: Tensor, ops: TrainingOps, max_len: int
    ) -> Head:
        return Eagle3(self.layers, params, embedding, ops, max_len)


class _MtpKind(_ChainKind):
    def description(self, taps: Sequence[int]) -> dict[str, Any]:
        return {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}

    def params(
        self, weights: TargetWeights, token_ids: Tensor, sample: Tensor
    ) -> dict[str, Tensor]:
        return mtp_params(weights, self.config.seed)

    def head(
        self, params: Mapping[str, Tensor], embedding: Tensor, ops: TrainingOps, max_len: int
    ) -> Head:
        return Mtp(self.layers, params, embedding, ops, max_len)


@dataclass(frozen=True, slots=True)
class _DFlashKind:
    config: HeadTrainingConfig
    layers: ModelConfig
    mask_token: int

    @property
    def depth(self) -> int:
        return self.config.block_size - 1

    @property
    def most(self) -> int:
        return self.depth

    @property
    def recipe(self) -> str:
        c = self.config
        return f"blocks of {c.block_size} (each depth weighs {c.step_decay:g} of the one before)"

    def description(self, taps: Sequence[int]) -> dict[str, Any]:
        return {
            "architectures": ["DFlashSpeculator"],
            "aux_hidden_state_layer_ids": list(taps),
            "block_size": self.config.block_size,
            "mask_token_id": self.mask_token,
        }

    def params(
        self, weights: TargetWeights, token_ids: Tensor, sample: Tensor
    ) -> dict[str, Tensor]:
        seed = self.config.seed
        return dflash_params(weights, self.layers, token_ids, sample, self.mask_token, seed)

    def head(
        self, params: Mapping[str, Tensor], embedding: Tensor, ops: TrainingOps, max_len: int
    ) -> Head:
        size = self.config.block_size
        return DFlash(self.layers, params, embedding, ops, max_len, size, self.mask_token)

    def chosen(self, batch: Batch, generator: torch.Generator) -> Tensor:
        drawn = _drawn(len(batch.wanted), generator)
        share = BLOCKS_PER_POSITION / self.config.block_size
        found = (drawn < share).nonzero().squeeze(1)
        return found if len(found) else drawn.argmin()[None]


def _drawn(count: int, generator: torch.Generator) -> Tensor:
    """The same numbers in 0 to 1 on every device."""
    return torch.as_tensor(torch.rand(count, generator=generator, device="cpu"))
