"""Random heads for the toy target, on disk and ready to draft, and EAGLE-3 in plain torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig
from paceline.loading.catalogue import embedded_model
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.config import ModelConfig
from paceline.proposers.base import DraftBudget, TargetInfo
from paceline.proposers.heads import build
from paceline.proposers.heads.proposer import FeatureDrafter, HeadProposer
from paceline.request.request import Request
from paceline.request.span import DraftTree, Span
from tests.proposers.self_drafts import read_all_but_last
from tests.toy import TOY, USUAL, VOCAB, toy_runner

Tensors = dict[str, torch.Tensor]
Tokens = Sequence[int] | torch.Tensor
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = TOY.hidden_size, 4, 2, 8
TAPS = (0, 1, 2)
KEPT = [token for token in range(VOCAB) if token % 4 != 1]
"""The tokens of a pruned head."""
EPS = 1e-5
TREE = {"max_tree_nodes": 10, "max_branching": 3, "num_speculative_tokens": 4}


def head_tensors(
    seed: int = 0, taps: int = 3, own_ends: bool = True, target: ModelConfig = TOY
) -> Tensors:
    """Under the names of the speculators layout; without ends of its own it takes the target's."""
    hidden, inner = target.hidden_size, target.intermediate_size
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    p = "layers.0."
    q, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    tensors = {
        "fc.weight": drawn(hidden, taps * hidden),
        p + "self_attn.q_proj.weight": drawn(q, 2 * hidden),
        p + "self_attn.k_proj.weight": drawn(kv, 2 * hidden),
        p + "self_attn.v_proj.weight": drawn(kv, 2 * hidden),
        p + "self_attn.o_proj.weight": drawn(hidden, q),
        p + "mlp.gate_proj.weight": drawn(inner, hidden),
        p + "mlp.up_proj.weight": drawn(inner, hidden),
        p + "mlp.down_proj.weight": drawn(hidden, inner),
    }
    norms = [p + f"{n}.weight" for n in ("input_layernorm", "hidden_norm")]
    for name in (*norms, p + "post_attention_layernorm.weight", "norm.weight"):
        tensors[name] = 1.0 + 0.2 * drawn(1, hidden)[0]
    if own_ends:
        tensors["embed_tokens.weight"] = drawn(VOCAB, HIDDEN)
        tensors["lm_head.weight"] = 3 * drawn(len(KEPT), HIDDEN)
        tensors["d2t"] = torch.tensor(KEPT) - torch.arange(len(KEPT))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(KEPT), 1)
    return tensors


def head_config(own_ends: bool = True, target: ModelConfig = TOY, **fields: Any) -> dict[str, Any]:
    """In the speculators layout."""
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": len(KEPT) if own_ends else target.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
    } | fields


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def embedded_head(folder: Path) -> SpeculativeConfig:
    """A random head for the embedded target."""
    target = load_checkpoint(embedded_model("target"), with_tokenizer=False).config
    config = head_config(False, target)
    config["transformer_layer_config"]["max_position_embeddings"] = target.max_position
    write_head(folder, config, head_tensors(own_ends=False, target=target))
    return SpeculativeConfig("eagle3", str(folder))


def as_original(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The same head in the layout of original EAGLE-3 checkpoints."""
    flat = {
        **config["transformer_layer_config"],
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"]
        },
    }
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    return flat, renamed


def head_options(method: str = "eagle3", **options: Any) -> SpeculativeConfig:
    options = {"min_accept_prob": 0.0, "dtype": "float32", "deterministic": True} | options
    chain = {"model": "toy", "max_tree_nodes": 0, "max_branching": 1, "num_speculative_tokens": 4}
    return SpeculativeConfig(method, **(chain | options))


def target_info(runner: ModelRunner) -> TargetInfo:
    backend = "reference" if runner.decoder.ops.name == "reference" else "native"
    return TargetInfo(
        VOCAB, None, runner.decoder.ops.device, TOY.max_position, 8, 1 << 22, backend, runner
    )


def toy_head(
    runner: ModelRunner,
    tensors: Tensors | None = None,
    fields: dict[str, Any] | None = None,
    kind: type[HeadProposer] = HeadProposer,
    **options: Any,
) -> HeadProposer:
    """A random head for a toy target.

    Args:
        fields: of its configuration, other than usual.
        options: of drafting.
    """
    tensors = head_tensors() if tensors is None else tensors
    config = head_config("lm_head.weight" in tensors, **(fields or {}))
    with tempfile.TemporaryDirectory() as folder:
        write_head(Path(folder), config, tensors)
        proposer = build(head_options(model=folder, **options), target_info(runner))
    proposer.__class__ = kind
    assert isinstance(proposer, HeadProposer)
    return proposer


class Follows(FeatureDrafter):
    """Its target reads all of a request but its last token whenever a draft is wanted."""

    whole: ModelRunner

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        for request in requests:
            start, features = read_all_but_last(self.whole, request)
            if features is not None:
                self.read(request, start, features)
        return super().propose(requests, budget)

    def finish(self, request: Request) -> None:
        """As a preemption, which frees the target's KV."""
        super().finish(request)
        self.whole.kv.free(request.request_id)


T = TypeVar("T", bound=Follows)


class Following(Follows, HeadProposer):
    pass


def made_to_follow(proposer: FeatureDrafter, kind: type[T], target: ModelRunner) -> T:
    """The proposer, which lets its target read what it drafts for."""
    proposer.__class__ = kind
    assert isinstance(proposer, kind)
    proposer.whole, target.taps = target, proposer.taps
    return proposer


def following_head(target_dtype: str = USUAL, **options: Any) -> HeadProposer:
    target = toy_runner(target_dtype, prefix_caching=False)
    return made_to_follow(toy_head(target, **options), Following, target)


class PlainHead:
    """EAGLE-3 as its paper and the speculators library have it, without any cache.

    Args:
        tensors: of the speculators layout; layers after the first are ordinary ones.
        config: in the same.
        target: of a target that lends what the head has not: its embedding and its head.
    """

    def __init__(
        self, tensors: Tensors, config: dict[str, Any], target: Tensors | None = None
    ) -> None:
        self.tensors, self.config = tensors, config
        lent = {} if target is None else target
        embedding = lent.get("model.embed_tokens.weight")
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.lm_head = tensors.get("lm_head.weight", embedding)
        d2t = tensors.get("d2t")
        self.ids = None if d2t is None else d2t + torch.arange(len(d2t))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * self.tensors[name]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """``[rows, taps, hidden]`` to ``[rows, hidden]``, rounded as they are kept."""
        return self.fuse_exactly(features).half().float()

    def fuse_exactly(self, features: torch.Tensor) -> torch.Tensor:
        if self.config.get("fc_norm"):
            parts = [self.norm(features[:, i], f"fc_norm.{i}.weight") for i in range(len(TAPS))]
            features = torch.stack(parts, dim=1)
        x = features.flatten(1)
        if self.config.get("norm_before_fc"):
            x = self.norm(x, "input_norm.weight")
        return x @ self.tensors["fc.weight"].T

    def forward(self, tokens: Tokens, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and output of the last of rows that each follow all before them."""
        logits, outputs = self.outputs(tokens, hidden)
        return logits[-1], outputs[-1]

    def outputs(self, tokens: Tokens, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and outputs of rows that each follow all before them."""
        p = "layers.0."
        assert self.embedding is not None
        assert self.lm_head is not None
        tokens_in = self.norm(self.embedding[tokens], p + "input_layernorm.weight")
        normed = self.norm(hidden, p + "hidden_norm.weight")
        h = normed if self.config.get("norm_before_residual") else hidden
        h = self.layer(p, h, torch.cat([tokens_in, normed], dim=-1))
        for layer in range(1, self.config["transformer_layer_config"]["num_hidden_layers"]):
            p = f"layers.{layer}."
            h = self.layer(p, h, self.norm(h, p + "input_layernorm.weight"))
        last = self.norm(h, "norm.weight")
        return last @ self.lm_head.T, last if self.config.get("norm_output") else h

    def layer(self, p: str, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The residual stream after a layer whose attention reads ``x``."""
        t, rows = self.tensors, len(x)

        def heads(name: str, count: int) -> torch.Tensor:
            y = x @ t[f"{p}self_attn.{name}_proj.weight"].T
            return y.view(rows, count, HEAD_DIM).transpose(0, 1)

        q, k, v = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        q, k = turned(q), turned(k)
        groups = HEADS // KV_HEADS
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
        mask = torch.full((rows, rows), -torch.inf).triu(1)
        attended = ((scores + mask).softmax(-1) @ v).transpose(0, 1).reshape(rows, -1)
        h = residual + attended @ t[p + "self_attn.o_proj.weight"].T
        y = self.norm(h, p + "post_attention_layernorm.weight")
        gate, up = y @ t[p + "mlp.gate_proj.weight"].T, y @ t[p + "mlp.up_proj.weight"].T
        return h + (torch.nn.functional.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T

    def chain(self, tokens: Sequence[int], features: torch.Tensor, depth: int) -> list[int]:
        """The greedy draft below a request's tokens.

        Args:
            features: of all positions but the last, ``[len(tokens) - 1, taps, hidden]``.
        """
        read, hidden, drafted = list(tokens[1:]), self.fuse(features), list[int]()
        for _ in range(depth):
            logits, output = self.forward(read, hidden)
            best = int(logits.argmax())
            drafted.append(best if self.ids is None else int(self.ids[best]))
            read.append(drafted[-1])
            hidden = torch.cat([hidden, output[None]])
        return drafted


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[heads, rows, head_dim]`` at positions 0, 1, 2 and so on."""
    half = HEAD_DIM // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


@cache
def fresh_runner() -> ModelRunner:
    return toy_runner(prefix_caching=False)


def fresh_features(tokens: Sequence[int], taps: Sequence[int] = TAPS) -> torch.Tensor:
    """What the toy target says of all tokens, read at once: ``[len(tokens), taps, hidden]``."""
    runner = fresh_runner()
    runner.taps = tuple(taps)
    runner.kv.open(1)
    assert runner.kv.reserve(1, len(tokens))
    result = runner.forward(runner.pack([Span.chunk(1, 0, list(tokens), sample=False)]))
    runner.kv.free(1)
    assert result.features is not None
    return torch.from_numpy(result.features)
