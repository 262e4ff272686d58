"""Random MTP layers within the toy target, in every layout, and what they say in plain torch."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads import build
from paceline.proposers.heads.proposer import HeadProposer
from paceline.request.span import Span
from tests import heads
from tests.loading.gguf_writing import write_gguf
from tests.models.test_entry import block, norm
from tests.proposers.heads import (
    Following,
    PlainHead,
    Tensors,
    Tokens,
    made_to_follow,
    target_info,
)
from tests.toy import TOY, USUAL, toy_folder, toy_runner, toy_tensors

CONFIG = heads.head_config("mtp")
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def mtp_tensors(seed: int = 3, own_ends: bool = False) -> Tensors:
    """Under the names that a decoder reads, all of them other than the target's."""
    tensors = heads.head_tensors(CONFIG, seed)
    return {name: tensor for name, tensor in tensors.items() if own_ends or name not in ENDS}


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """By patterns of which the first that fits a name counts."""
    return {
        next(re.sub(old, new, name) for old, new in pairs if re.match(old, name)): tensor
        for name, tensor in tensors.items()
    }


def deepseek(tensors: Tensors) -> Tensors:
    behind = f"model.layers.{TOY.num_layers}."
    return renamed(
        tensors,
        (r"model\.layers\.0\.", behind),
        (r"model\.norm", behind + "shared_head.norm"),
        (r"lm_head", behind + "shared_head.head"),
        (r"model\.", behind),
    )


def qwen(tensors: Tensors) -> Tensors:
    return renamed(
        tensors,
        (r"model\.layers", "mtp.layers"),
        (r"model\.eh_proj", "mtp.fc"),
        (r"model\.enorm", "mtp.pre_fc_norm_embedding"),
        (r"model\.hnorm", "mtp.pre_fc_norm_hidden"),
        (r"model\.", "mtp."),
    )


def speculators(tensors: Tensors) -> Tensors:
    return renamed(
        tensors,
        (r"model\.layers\.0\.", "mtp_layers.0."),
        (r"model\.eh_proj", "mtp_layers.0.input_proj"),
        (r"model\.enorm", "mtp_layers.0.token_layernorm"),
        (r"model\.hnorm", "mtp_layers.0.hidden_layernorm"),
        (r"model\.norm", "mtp_layers.0.final_layernorm"),
    )


def mimo(tensors: Tensors) -> Tensors:
    join = tensors["model.eh_proj.weight"]
    token, hidden = join.chunk(2, dim=1)
    swapped = tensors | {"model.eh_proj.weight": torch.cat([hidden, token], dim=1)}
    return {f"model.{name}": tensor for name, tensor in speculators(swapped).items()}


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "deepseek": deepseek,
    "qwen": qwen,
    "mimo": mimo,
}
"""Those that lie in a model's folder."""


def with_mtp(folder: Path, extra: Tensors, **fields: Any) -> Path:
    """The toy model's folder with further tensors, and with further fields of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    toy_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file(toy_tensors() | extra, folder / "model.safetensors")
    return folder


def speculators_folder(folder: Path, tensors: Tensors) -> Path:
    """The layer alone, as the speculators library writes it."""
    layer = json.loads((with_mtp(folder, {}) / "config.json").read_text())
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "transformer_layer_config": layer,
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(speculators(tensors), folder / "model.safetensors")
    return folder


def gguf_file(path: Path, tensors: Tensors, count: int = 1, qtype: str = "F32") -> Path:
    """The toy model in a GGUF file, with its MTP layer as llama.cpp has them."""
    config = transformers.Qwen3Config(
        vocab_size=TOY.vocab_size,
        hidden_size=TOY.hidden_size,
        intermediate_size=TOY.intermediate_size,
        num_hidden_layers=TOY.num_layers + 1,
        num_attention_heads=TOY.num_heads,
        num_key_value_heads=TOY.num_kv_heads,
        head_dim=TOY.head_dim,
        max_position_embeddings=TOY.max_position,
        tie_word_embeddings=True,
    )
    behind = f"model.layers.{TOY.num_layers}."
    kept = {n: t for n, t in deepseek(tensors).items() if re.search("self_attn|mlp|layernorm", n)}
    nextn = {n: t.numpy() for n, t in deepseek(tensors).items() if n not in kept}
    extra = {
        n.replace(behind, f"blk.{TOY.num_layers}.nextn.").replace("shared_head.", "shared_head_"): t
        for n, t in nextn.items()
    }
    down = {f"blk.{i}.ffn_down.weight": "F32" for i in range(TOY.num_layers + 1)}
    metadata = {"ARCH.nextn_predict_layers": count}
    return write_gguf(
        path, config, toy_tensors() | kept, qtype, metadata, extra_tensors=extra, other_types=down
    )


def mtp_options(**options: Any) -> SpeculativeConfig:
    options = {"min_accept_prob": 0.0, "dtype": "float32", "deterministic": True} | options
    chain = {"max_tree_nodes": 0, "max_branching": 1, "num_speculative_tokens": 4}
    return SpeculativeConfig("mtp", **(chain | options))


def info(runner: ModelRunner, checkpoint: Checkpoint | None) -> TargetInfo:
    return replace(target_info(runner), checkpoint=checkpoint)


@cache
def toy_checkpoint() -> Checkpoint:
    """The toy target with an MTP layer."""
    with tempfile.TemporaryDirectory() as folder:
        with_mtp(Path(folder), qwen(mtp_tensors()))
        return load_checkpoint(folder, load_format="memory", with_tokenizer=False)


def toy_mtp(
    runner: ModelRunner, checkpoint: Checkpoint | None = None, **options: Any
) -> HeadProposer:
    """The MTP layer of a toy target."""
    return build(mtp_options(**options), info(runner, checkpoint or toy_checkpoint()))


def following_mtp(
    checkpoint: Checkpoint | None = None, target_dtype: str = USUAL, **options: Any
) -> HeadProposer:
    target = toy_runner(target_dtype, prefix_caching=False)
    return made_to_follow(toy_mtp(target, checkpoint, **options), Following, target)


def forward(
    proposer: HeadProposer, request_id: int, tokens: list[int], inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and outputs of rows that each follow all before them."""
    runner, count = proposer._runner, len(tokens)
    runner.kv.open(request_id)
    runner.kv.reserve(request_id, count)
    span = Span(request_id, 0, tokens, range(-1, count - 1), range(count))
    result = runner.forward(runner.pack([span]), inputs=inputs.float().numpy())
    assert result.features is not None
    return torch.from_numpy(result.logits), torch.from_numpy(result.features)[:, 0]


class PlainMtp(PlainHead):
    """An MTP layer as vLLM's and SGLang's models have it, without any cache.

    Args:
        tensors: under the names that a decoder reads.
        lent: of the target; by default the toy's.
    """

    def __init__(self, tensors: Tensors, lent: Tensors | None = None) -> None:
        target = (lent or toy_tensors())["model.embed_tokens.weight"]  # its head, too
        self.tensors, self.config, self.ids = tensors, {}, None
        self.embedding = tensors.get("model.embed_tokens.weight", target)
        self.lm_head = tensors.get("lm_head.weight", target)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features[:, 0].half().float()

    def outputs(self, tokens: Tokens, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.embedding is not None
        assert self.lm_head is not None
        t, token = self.tensors, self.embedding[tokens]
        pair = norm(token, t, "model.enorm.weight"), norm(hidden, t, "model.hnorm.weight")
        x = torch.cat(pair, dim=1) @ t["model.eh_proj.weight"].T
        read = norm(x, t, "model.layers.0.input_layernorm.weight")
        last = norm(block(CONFIG, t, 0, x, read), t, "model.norm.weight")
        return last @ self.lm_head.T, last
