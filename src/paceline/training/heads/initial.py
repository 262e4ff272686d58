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
from paceline.training.model_files import EMBEDDING

Tensor = torch.Tensor
HEAD = "lm_head.weight"
TOKEN_FLAGS = "t2d"
FRESH_DEVIATION = 0.02  # of weights that the target has no counterpart of


def default_taps(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer's input, as EAGLE-3 chooses them."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(0, num_layers - 3)}))


def layer_config(target: ModelConfig) -> ModelConfig:
    """The shape of a head's layer: the target's, without what only some families have.

    Multipliers of the target are part of the weights that the head begins with.
    """
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
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        logits_softcap=0.0,
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

    def stacked(self, prefix: str, sizes: Mapping[str, int], fused: str) -> dict[str, Tensor]:
        """Matrices by their short names, of so many rows each, which may be fused in the file."""
        whole = f"{prefix}{fused}_proj.weight"
        if whole in self._tensors:
            return dict(zip(sizes, self(whole).split(list(sizes.values())), strict=True))
        return {name: self(f"{prefix}{name}_proj.weight") for name in sizes}

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
    c, width = weights.config, weights.config.hidden_size
    last = f"model.layers.{c.num_layers - 1}."
    mlp_norm = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
    params = {
        "fc.weight": torch.cat((torch.zeros(width, (num_taps - 1) * width), torch.eye(width)), 1),
        LAYER + "input_layernorm.weight": torch.ones(width),
        LAYER + "hidden_norm.weight": weights.norm(last + "input_layernorm.weight"),
        **_attention_params(weights, last, seed),
        LAYER + "post_attention_layernorm.weight": weights.norm(f"{last}{mlp_norm}.weight"),
        "norm.weight": weights.norm("model.norm.weight"),
        HEAD: weights.head[token_ids] / c.logits_divisor,
    }
    inner = dict.fromkeys(("gate", "up"), c.intermediate_size)
    for name, matrix in weights.stacked(last + "mlp.", inner, "gate_up").items():
        params[f"{LAYER}mlp.{name}_proj.weight"] = matrix
    down = weights(last + "mlp.down_proj.weight") * c.residual_multiplier
    params[LAYER + "mlp.down_proj.weight"] = down
    return {name: p.clone().contiguous() for name, p in params.items()}


def _attention_params(weights: TargetWeights, last: str, seed: int) -> dict[str, Tensor]:
    """The target's for what reads the hidden state, small random numbers for the embedding."""
    c, attention = weights.config, last + "self_attn."
    generator = torch.Generator().manual_seed(seed)
    rows = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
    sizes = {name: heads * c.head_dim for name, heads in rows.items()}
    out = weights(attention + "o_proj.weight") * c.residual_multiplier
    params = {ATTENTION + "o_proj.weight": out}
    for name, known in weights.stacked(attention, sizes, "qkv").items():
        fresh = torch.empty(known.shape).normal_(0.0, FRESH_DEVIATION, generator=generator)
        params[f"{ATTENTION}{name}_proj.weight"] = torch.cat((fresh, known), dim=1)
    for name in ("q", "k") if c.qk_norm else ():
        params[f"{ATTENTION}{name}_norm.weight"] = weights.norm(f"{attention}{name}_norm.weight")
    scaled = "q_norm" if c.qk_norm else "q_proj"
    params[f"{ATTENTION}{scaled}.weight"] *= c.scale * c.head_dim**0.5
    return params


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
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_steps,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    architectures = list(target.hf_config.get("architectures") or [])
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layer_description(target),
        "draft_vocab_size": num_columns,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }


def _layer_description(target: Checkpoint) -> dict[str, Any]:
    """The head's layer as transformers would describe it."""
    told = {**target.hf_config, **(target.hf_config.get("text_config") or {})}
    c = layer_config(target.config)
    rope = {k: told[k] for k in ("rope_theta", "rope_scaling", "rope_parameters") if k in told}
    return {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": told.get("hidden_act") or told.get("hidden_activation") or "silu",
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **rope,
    }
