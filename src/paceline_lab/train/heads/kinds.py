"""The kinds of heads that can be trained: all in which they differ.

Among that is what ``config.json`` says of each in the speculators format. Knows no loop.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import TrainingError
from paceline.loading.checkpoint import Checkpoint
from paceline.models.config import ModelConfig, Multipliers
from paceline.models.families.config_json import config_from_hf
from paceline.models.heads import EAGLE3, MTP
from paceline.models.layer_sizes import RopeConfig
from paceline.request.traces import Trace
from paceline_lab.train.configs import HeadTrainingConfig
from paceline_lab.train.heads.features import HeadBatch
from paceline_lab.train.heads.initial import (
    TargetWeights,
    dflash_params,
    eagle3_params,
    known_mask_token,
    mtp_params,
    rarest_token,
)
from paceline_lab.train.heads.losses import TrainableHead
from paceline_lab.train.heads.modules import DFlash, Eagle3, Mtp
from paceline_lab.train.ops import TrainingOps

Tensor = torch.Tensor
BLOCKS_PER_POSITION = 2
"""In how many blocks a position is on average. More cost time for what is much the same."""


@dataclass(frozen=True, slots=True)
class Kind(ABC):
    """A kind of head, with its options.

    Attributes:
        layers: the shape of its layers.
    """

    config: HeadTrainingConfig
    layers: ModelConfig

    @property
    @abstractmethod
    def depth(self) -> int:
        """Tokens that it is trained to draft one after another."""

    @property
    @abstractmethod
    def most(self) -> int:
        """Tokens that it can draft one after another."""

    @property
    @abstractmethod
    def recipe(self) -> str:
        """How it is trained, for the card."""

    @abstractmethod
    def description(self, taps: Sequence[int]) -> dict[str, Any]:
        """What its ``config.json`` says and those of other kinds do not."""

    @abstractmethod
    def params(
        self, weights: TargetWeights, token_ids: Tensor, sample: Tensor
    ) -> dict[str, Tensor]:
        """What it begins with.

        Args:
            token_ids: of its output matrix.
            sample: features of some texts, ``[rows, taps * hidden_size]``.
        """

    @abstractmethod
    def head(
        self, params: Mapping[str, Tensor], embedding: Tensor, ops: TrainingOps, max_len: int
    ) -> TrainableHead: ...

    @abstractmethod
    def chosen(self, batch: HeadBatch, generator: torch.Generator) -> Tensor:
        """The wanted rows after which a training step drafts to the end, ascending."""


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


class _ChainKind(Kind):
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

    def chosen(self, batch: HeadBatch, generator: torch.Generator) -> Tensor:
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
    ) -> TrainableHead:
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
    ) -> TrainableHead:
        return Mtp(self.layers, params, embedding, ops, max_len)


@dataclass(frozen=True, slots=True)
class _DFlashKind(Kind):
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
    ) -> TrainableHead:
        size = self.config.block_size
        return DFlash(self.layers, params, embedding, ops, max_len, size, self.mask_token)

    def chosen(self, batch: HeadBatch, generator: torch.Generator) -> Tensor:
        drawn = _drawn(len(batch.wanted), generator)
        share = BLOCKS_PER_POSITION / self.config.block_size
        rows = (drawn < share).nonzero().squeeze(1)
        return rows if len(rows) else drawn.argmin()[None]


def _drawn(count: int, generator: torch.Generator) -> Tensor:
    """The same numbers in 0 to 1 on every device."""
    return torch.as_tensor(torch.rand(count, generator=generator, device="cpu"))


_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
"""What configurations call them, where it is not their name."""
_TRAINED = "original_max_position_embeddings"


def dflash_layers(target: ModelConfig, num_layers: int) -> ModelConfig:
    """A DFlash head's layers, whose keys and values, as many as queries, bring features in."""
    layers = layers_config(target)
    kv_heads = target.num_heads
    sizes = {"num_layers": num_layers, "num_kv_heads": kv_heads}
    return layers.with_traits({**sizes, "attention.qk_norm": True})


def layers_config(target: ModelConfig) -> ModelConfig:
    """The shape of a head's layer: the target's, without what only some families have.

    Multipliers of the target are part of the weights that the head begins with.
    """
    traits = {
        "num_layers": 1,
        "attention.qkv_bias": False,
        "attention.o_bias": False,
        "attention.sliding_window": 0,
        "attention.sliding_layers": (),
        "attention.softcap": 0.0,
        "attention.scale": 0.0,
        "mlp.bias": False,
        "norms.after": False,
        "norms.plus_one": False,
        "positions.local_rope": None,
        "multipliers": Multipliers(),
    }
    return target.with_traits(traits)


def speculators_config(
    target: Checkpoint,
    verifier: str,
    layers: ModelConfig,
    num_columns: int,
    kind: str,
    num_drafted: int,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """The ``config.json`` of a head in the speculators format.

    Args:
        verifier: the target's name or path for engines that read this.
        layers: the shape of the head's layers.
        num_columns: of the output matrix; 0 where it is the target's.
        num_drafted: tokens that the head was trained to draft.
        own: what this kind of head alone says.

    Raises:
        TrainingError: a configuration cannot say how the head's layers compute.
    """
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    architectures = list(target.hf_config.get("architectures") or [])
    if kind == MTP:  # the format describes the target's layers here, of which the head has one
        layers = dataclasses.replace(layers, num_layers=target.config.num_layers)
    output = {"draft_vocab_size": num_columns} if num_columns else {}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layers_description(target, layers),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        **output,
        **own,
    }


def _layers_description(target: Checkpoint, c: ModelConfig) -> dict[str, Any]:
    """The head's layers as transformers would describe them."""
    description: dict[str, Any] = {
        "model_type": "qwen3" if c.attention.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": _ACTIVATIONS.get(c.mlp.activation, c.mlp.activation),
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norms.eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": c.positions.rope.theta,
    }
    if c.positions.rope.scaling != "default":
        description["rope_scaling"] = _scaling(c.positions.rope)
    read = config_from_hf(description)
    if any(
        ours != said
        for ours, said in (
            (c.mlp.activation, read.mlp.activation),
            (c.positions.rope, read.positions.rope),
            (c.norms.eps, read.norms.eps),
        )
    ):
        raise TrainingError(
            f"{target.name} has {c.mlp.activation} as its activation and rotary embeddings of type "
            f"{c.positions.rope.scaling}, which the configuration of a head cannot say"
        )
    return description


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    """A rotary rule by its Hugging Face names."""
    numbers: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in rope.params
    }
    if _TRAINED in numbers:
        numbers[_TRAINED] = int(numbers[_TRAINED])
    if "truncate" in numbers:
        numbers["truncate"] = bool(numbers["truncate"])
    return {"rope_type": rope.scaling, "factor": rope.factor, **numbers}
