"""Adapters in PEFT's layout, with random weights, and the same merged into a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LINEARS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
SETTINGS: Mapping[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}


def adapter_tensors(
    tensors: Mapping[str, torch.Tensor],
    seed: int = 0,
    targets: Sequence[str] = tuple(LINEARS),
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Under PEFT's names what is added to the linears of a model whose tensors these are."""
    generator = torch.Generator().manual_seed(100 + seed)
    found = {}
    for name, weight in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in targets:
            out, width = weight.shape
            for letter, shape in (("A", (rank, width)), ("B", (out, rank))):
                drawn = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                found[f"base_model.model.{module}.lora_{letter}.weight"] = drawn.to(dtype)
    return found


def adapter_folder(folder: Path, tensors: Mapping[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merged(
    tensors: Mapping[str, torch.Tensor], added: Mapping[str, torch.Tensor], scale: float = 2.0
) -> dict[str, torch.Tensor]:
    """The weights of the model that an adapter makes of another, in float32."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, down in added.items():
        if ".lora_A." in name:
            up = added[name.replace(".lora_A.", ".lora_B.")]
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            found[weight] = found[weight] + scale * (up.float() @ down.float())
    return found
