"""A head to begin with, made of its target's own weights. Knows no data beyond token counts.

From random weights a head of this size needs many hours to learn what the target's last layer and
its output matrix know already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from paceline.errors import TrainingError
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.pruned_head import HEAD_TOKENS, PrunedHead
from paceline.traces import Trace
from paceline.training.heads.eagle3 import ATTENTION, LAYER

Tensor = torch.Tensor
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKEN_FLAGS = "t2d"
FRESH_DEVIATION = 0.02  # of weights that the target has no counterpart of


def default_taps(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer's input, as EAGLE-3 chooses them."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(0, num_layers - 3)}))


def layer_config(target: ModelConfig) -> ModelConfig:
    """The shape of a head's layer: the target's, without what only some families have."""
    return dataclasses.replace(
        target,
        num_layers=1,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        post_norms=False,
        norm_plus_one=False,
        sliding_window=0,
        sliding_layers=(),
        local_rope=None,
        attention_softcap=0.0,
        attention_scale=0.0,
    )


def frequent_tokens(
    traces: Iterable[Trace], count: int, vocab_size: int, kept: Iterable[int]
) -> Tensor:
    """The tokens that the answers have most often, ascending; of equals those of lower ids.

    Args:
        kept: tokens that are among them in any case, such as the end of an answer.
    """
    seen = np.zeros(vocab_size)
    for trace in traces:
        np.add.at(seen, trace.output_token_ids, 1.0)
    seen[list(kept)] = np.inf
    chosen = np.argsort(-seen, kind="stable")[: min(count, vocab_size)]
    return torch.from_numpy(np.sort(chosen))


class TargetWeights:
    """A target's weights as floats, by their names in its checkpoint.

    Raises:
        TrainingError: on construction, where the layer of a head cannot be made of them.
    """

    def __init__(self, target: Checkpoint) -> None:
        if target.packed is not None:
            raise TrainingError(
                f"{target.name} has packed weights; name the model that it was converted from"
            )
        self._tensors, self.config = target.tensors, target.config

    def __call__(self, name: str) -> Tensor:
        return self._tensors[name].float()

    def norm(self, name: str) -> Tensor:
        return self(name) + (1.0 if self.config.norm_plus_one else 0.0)

    @property
    def embedding(self) -> Tensor:
        return self(EMBEDDING)

    @property
    def head(self) -> Tensor:
        return self.embedding if self.config.tie_embeddings else self(HEAD)


def initial_params(
    weights: TargetWeights, num_taps: int, token_ids: Tensor, seed: int
) -> dict[str, Tensor]:
    """The tensors that are trained, float32, under their names in a head's checkpoint."""
    c, last = weights.config, f"model.layers.{weights.config.num_layers - 1}."
    generator = torch.Generator().manual_seed(seed)
    width = c.hidden_size

    def fresh(*size: int) -> Tensor:
        return torch.empty(size).normal_(0.0, FRESH_DEVIATION, generator=generator)

    fc = torch.zeros(width, num_taps * width)
    fc[:, -width:] = torch.eye(width)  # the highest tap
    params = {"fc.weight": fc}
    input_norm = weights.norm(last + "input_layernorm.weight")
    params[LAYER + "input_layernorm.weight"] = torch.ones(width)
    params[LAYER + "hidden_norm.weight"] = input_norm
    for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
        known = weights(f"{last}self_attn.{name}_proj.weight")
        params[f"{ATTENTION}{name}_proj.weight"] = torch.cat(
            (fresh(heads * c.head_dim, width), known), dim=1
        )
        if c.qk_norm and name != "v":
            params[f"{ATTENTION}{name}_norm.weight"] = weights.norm(
                f"{last}self_attn.{name}_norm.weight"
            )
    mlp_norm = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
    params[ATTENTION + "o_proj.weight"] = weights(last + "self_attn.o_proj.weight")
    params[LAYER + "post_attention_layernorm.weight"] = weights.norm(f"{last}{mlp_norm}.weight")
    for name in ("gate", "up", "down"):
        params[f"{LAYER}mlp.{name}_proj.weight"] = weights(f"{last}mlp.{name}_proj.weight")
    params["norm.weight"] = weights.norm("model.norm.weight")
    params[HEAD] = weights.head[token_ids] / c.logits_divisor
    return {name: p.clone().contiguous() for name, p in params.items()}


def embedding_param(target: Checkpoint) -> dict[str, Tensor]:
    """The target's embedding under its name in a head's checkpoint."""
    return {"embed_tokens.weight": TargetWeights(target).embedding}


def vocabulary_maps(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """What a checkpoint says of the head's tokens: ``d2t`` and ``t2d``."""
    flags = torch.zeros(vocab_size, dtype=torch.bool)
    flags[token_ids] = True
    return {HEAD_TOKENS: PrunedHead(token_ids, vocab_size).offsets, TOKEN_FLAGS: flags}


def speculators_config(
    target: Checkpoint, verifier: str, taps: tuple[int, ...], num_columns: int, num_steps: int
) -> Mapping[str, Any]:
    """The ``config.json`` of a head in the speculators format.

    Args:
        verifier: the target's name or path for engines that read this.
    """
    told, c = dict(target.hf_config), layer_config(target.config)
    kind = "qwen3" if c.qk_norm else "llama"
    rope: dict[str, Any] = {
        k: told[k] for k in ("rope_theta", "rope_scaling", "rope_parameters") if k in told
    }
    layer = {
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": told.get("hidden_act", "silu"),
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": num_columns,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": verifier,
                "architectures": list(told.get("architectures") or []),
            },
        },
    }
