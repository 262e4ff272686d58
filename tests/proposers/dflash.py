"""Random DFlash heads for the toy target, on disk and ready to draft, and DFlash in plain torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig
from paceline.proposers.heads import build
from paceline.proposers.heads.blocks import DFlashProposer
from tests.proposers.heads import (
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KEPT,
    KV_HEADS,
    TAPS,
    Follows,
    Tensors,
    made_to_follow,
    target_info,
    turned,
    write_head,
)
from tests.toy import TOY, USUAL, VOCAB, toy_runner

LAYERS, SIZE, MASK = 2, 6, 47
SLIDING = ["sliding_attention", "full_attention"]


def dflash_tensors(seed: int = 0, own_ends: bool = True, taps: int = 3) -> Tensors:
    """Under their names in both layouts; without ends of its own it takes the target's."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    q, kv, inner = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, TOY.intermediate_size
    tensors = {"fc.weight": drawn(HIDDEN, taps * HIDDEN)}
    norms = {"norm.weight": HIDDEN, "hidden_norm.weight": HIDDEN}
    for layer in range(LAYERS):
        p = f"layers.{layer}."
        tensors |= {
            p + "self_attn.q_proj.weight": drawn(q, HIDDEN),
            p + "self_attn.k_proj.weight": drawn(kv, HIDDEN),
            p + "self_attn.v_proj.weight": drawn(kv, HIDDEN),
            p + "self_attn.o_proj.weight": drawn(HIDDEN, q),
            p + "mlp.gate_proj.weight": drawn(inner, HIDDEN),
            p + "mlp.up_proj.weight": drawn(inner, HIDDEN),
            p + "mlp.down_proj.weight": drawn(HIDDEN, inner),
        }
        norms |= {p + f"{n}_layernorm.weight": HIDDEN for n in ("input", "post_attention")}
        norms |= {p + f"self_attn.{n}_norm.weight": HEAD_DIM for n in "qk"}
    tensors |= {name: 1.0 + 0.2 * drawn(1, size)[0] for name, size in norms.items()}
    if own_ends:
        tensors["embed_tokens.weight"] = drawn(VOCAB, HIDDEN)
        tensors["lm_head.weight"] = 3 * drawn(len(KEPT), HIDDEN)
        tensors["d2t"] = torch.tensor(KEPT) - torch.arange(len(KEPT))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(KEPT), 1)
    return tensors


def layer_config(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": TOY.intermediate_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
    } | fields


def sliding_layers(window: int = 7) -> dict[str, Any]:
    """The first layer slides, the other does not."""
    fields = {"use_sliding_window": True, "sliding_window": window, "layer_types": SLIDING}
    return {"transformer_layer_config": layer_config(**fields)}


def dflash_config(own_ends: bool = True, **fields: Any) -> dict[str, Any]:
    """In the speculators layout."""
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": len(KEPT) if own_ends else VOCAB,
        "aux_hidden_state_layer_ids": list(TAPS),
        "block_size": SIZE,
        "mask_token_id": MASK,
    } | fields


def as_original(config: dict[str, Any]) -> dict[str, Any]:
    """The same head in the original layout, which counts from the first layer's output on."""
    return {
        **config["transformer_layer_config"],
        "architectures": ["DFlashDraftModel"],
        "draft_vocab_size": config["draft_vocab_size"],
        "block_size": config["block_size"],
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [tap - 1 for tap in config["aux_hidden_state_layer_ids"]],
        },
    }


def dflash_options(**options: Any) -> SpeculativeConfig:
    options = {"min_accept_prob": 0.0, "dtype": "float32", "deterministic": True} | options
    chain = {"model": "toy", "max_tree_nodes": 0, "max_branching": 1, "num_speculative_tokens": 4}
    return SpeculativeConfig("dflash", **(chain | options))


def toy_dflash(
    runner: ModelRunner,
    tensors: Tensors | None = None,
    fields: dict[str, Any] | None = None,
    kind: type[DFlashProposer] = DFlashProposer,
    **options: Any,
) -> DFlashProposer:
    """A random head for a toy target; ``fields`` are of its configuration, other than usual."""
    tensors = dflash_tensors() if tensors is None else tensors
    config = dflash_config("lm_head.weight" in tensors, **(fields or {}))
    with tempfile.TemporaryDirectory() as folder:
        write_head(Path(folder), config, tensors)
        proposer = build(dflash_options(model=folder, **options), target_info(runner))
    proposer.__class__ = kind
    assert isinstance(proposer, DFlashProposer)
    return proposer


class FollowingBlocks(Follows, DFlashProposer):
    pass


def following_dflash(target_dtype: str = USUAL, **options: Any) -> DFlashProposer:
    target = toy_runner(target_dtype, prefix_caching=False)
    return made_to_follow(toy_dflash(target, **options), FollowingBlocks, target)


class PlainDFlash:
    """DFlash as its paper and the speculators library have it, without any cache.

    Args:
        tensors, config: of the speculators layout.
        target: of a target that lends what the head has not: its embedding and its head.
    """

    def __init__(self, tensors: Tensors, config: dict[str, Any], target: Tensors) -> None:
        self.tensors, self.config = tensors, config
        shared = target["model.embed_tokens.weight"]
        self.embedding = tensors.get("embed_tokens.weight", shared)
        self.lm_head = tensors.get("lm_head.weight", shared)
        self.kept = torch.tensor(KEPT if "d2t" in tensors else range(VOCAB))
        self.first = 0 if config.get("sample_from_anchor") else 1

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * self.tensors[name + ".weight"]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """``[rows, taps, hidden]`` to ``[rows, hidden]``, rounded as they are kept."""
        return self.norm(features.flatten(1) @ self.tensors["fc.weight"].T, "hidden_norm").half()

    def seen(self, layer: int, known: int, size: int) -> torch.Tensor:
        """``[block, known + block]``: whether a row sees a key."""
        own = self.config["transformer_layer_config"]
        if own.get("layer_types", [""] * LAYERS)[layer] != "sliding_attention":
            return torch.ones(size, known + size, dtype=torch.bool)
        at, key = torch.arange(known, known + size)[:, None], torch.arange(known + size)
        ahead = self.config.get("sliding_window_non_causal")
        return (at - key < own["sliding_window"]) & ((key <= at) | bool(ahead))

    def logits(
        self, token: int | torch.Tensor, known: torch.Tensor, size: int = SIZE
    ) -> torch.Tensor:
        """Of the rows of a block that begins with a token after fused hidden states."""
        return self.hidden(token, known, size) @ self.lm_head.T

    def hidden(
        self, token: int | torch.Tensor, known: torch.Tensor, size: int = SIZE
    ) -> torch.Tensor:
        """What the head reads of these rows."""
        t, known = self.tensors, known.float()
        read = torch.cat([torch.as_tensor(token).reshape(1), torch.full((size - 1,), MASK)])
        x, groups = self.embedding[read], HEADS // KV_HEADS
        for layer in range(LAYERS):
            p = f"layers.{layer}."
            read, deltas = self.convolved_in(
                p + "attention_conv", self.norm(x, p + "input_layernorm")
            )
            own = torch.cat([known, read])

            def heads(name: str, own: torch.Tensor = own, p: str = p) -> torch.Tensor:
                y = (own @ t[f"{p}self_attn.{name}_proj.weight"].T).view(len(own), -1, HEAD_DIM)
                y = y if name == "v" else self.norm(y, f"{p}self_attn.{name}_norm")
                return y.transpose(0, 1)

            q, k, v = turned(heads("q"))[:, len(known) :], turned(heads("k")), heads("v")
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
            scores = scores.where(self.seen(layer, len(known), size), -torch.inf)
            attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(size, -1)
            attended = attended @ t[p + "self_attn.o_proj.weight"].T
            x = x + self.convolved(p + "attention_conv", 1, attended, deltas)
            y, deltas = self.convolved_in(
                p + "mlp_conv", self.norm(x, p + "post_attention_layernorm")
            )
            gate, up = y @ t[p + "mlp.gate_proj.weight"].T, y @ t[p + "mlp.up_proj.weight"].T
            inner = (torch.nn.functional.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T
            x = x + self.convolved(p + "mlp_conv", 1, inner, deltas)
        return self.norm(x, "norm")

    def convolved_in(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a part reads of a block's rows, and its deltas ``[rows, 2, kernel, groups]``."""
        if name + ".base_kernel" not in self.tensors:
            return x, x
        kernel = self.config["conv_kernel_size"]
        deltas = x @ self.tensors[name + ".kernel_projection.weight"].T
        deltas = deltas.view(len(x), 2, kernel, -1)
        return self.convolved(name, 0, x, deltas), deltas

    def convolved(
        self, name: str, side: int, x: torch.Tensor, deltas: torch.Tensor
    ) -> torch.Tensor:
        """Row by row, what goes into a part (side 0) or comes out of it."""
        if name + ".base_kernel" not in self.tensors:
            return x
        base, rows = self.tensors[name + ".base_kernel"][side], []
        for row in range(len(x)):
            total = torch.zeros_like(x[0])
            for tap in range(min(len(base), row + 1)):
                delta = deltas[row, side, tap].repeat_interleave(self.config["conv_group_size"])
                total = total + (base[tap] + delta) * x[row - tap]
            rows.append(total)
        return torch.stack(rows)

    def levels(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> torch.Tensor:
        """The likeliest tokens of every depth, ``[depths, count]``.

        Args:
            features: of all positions but the last, ``[len(tokens) - 1, taps, hidden]``.
        """
        logits = self.logits(tokens[-1], self.fuse(features))[self.first :]
        return self.kept[logits.topk(count, dim=-1).indices]
