"""Makes the embedded models as large as a real one without changing what they say.

A small trained model is widened and deepened so that it costs what a large one costs, while its
text and its acceptance stay those of the small one. Widening is that of Net2Net (Chen, Goodfellow
and Shlens, 2015): units are repeated and what leaves them is divided among the repetitions. All
shares are powers of two, so the bfloat16 weights carry over exactly, and no weight is zero that was
not zero before: an engine can skip nothing.

* Hidden dimensions: the whole residual stream is repeated, so the mean square that an RMS norm
  divides by stays, and so does its epsilon. The norms' weights carry the shares.
* Heads and intermediate units: repeated; the columns of the projections that leave them
  (``o_proj``, ``down_proj``) carry the shares. The head size stays, and with it the rotary
  frequencies.
* Delta nets of hybrids: key and value heads are repeated together, with their channels of the
  convolution; the columns of ``out_proj`` carry the shares.
* Layers: an additional layer is a widened copy of the layer before it whose shares add up to zero:
  half of the repetitions take back what the other half adds. Its inputs are in another order, so
  that no two tensors are equal: an engine that stores equal constants once would read fewer bytes.

Knows no engine. The tests compare the two models' logits and greedy text in two engines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paceline.api.llm import embedded_model

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """How often the parts of a model are repeated.

    Attributes:
        hidden, heads, kv_heads, intermediate: repetitions of each. A small model with several key
            and value heads needs as many repetitions of those as of the others, so that each head
            keeps its own.
        layers: layers of the result.
    """

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    layers: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The shapes of a target model and of its draft model, which has about a tenth of its bytes."""

    target: Shape
    draft: Shape


PAIRS = {
    # 512 M parameters: hidden 1280, 24 layers, 40 heads on 8, intermediate 3456. Draft: 49 M.
    "0.5b": Pair(Shape(4, 8, 8, 4, 24), Shape(8, 8, 4, 8, 4)),
    # 1.52 G parameters: hidden 2560, 22 layers, 40 heads on 8, intermediate 6912. Draft: 144 M.
    "1.5b": Pair(Shape(8, 8, 8, 8, 22), Shape(8, 8, 4, 16, 7)),
    # For tests and for trying the programs out.
    "tiny": Pair(Shape(2, 2, 2, 2, 10), Shape(2, 2, 2, 2, 3)),
}
HYBRIDS = {
    # 846 M parameters: hidden 1280, 24 layers, 18 of them delta nets of 40 heads on 80.
    "0.8b": Shape(4, 8, 8, 4, 24),
    # 1.9 G parameters: hidden 2560, 22 layers.
    "2b": Shape(8, 8, 8, 8, 24),
}
LINEAR = "linear_attention"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


# --- the arithmetic -------------------------------------------------------------------------------


def shares(count: int) -> list[float]:
    """``count`` powers of two that add up to one; equal ones where ``count`` is such a power."""
    parts = [1.0]
    while len(parts) < count:
        largest = max(parts)
        at = parts.index(largest)
        parts[at : at + 1] = [largest / 2, largest / 2]
    return parts


def cancelling(count: int) -> list[float]:
    """``count`` powers of two whose signs alternate and which add up to zero."""
    if count < 2:
        raise ValueError("a layer can only be added where its heads and units are repeated")
    plus, minus = shares((count + 1) // 2), shares(count // 2)
    return [-minus[i // 2] if i % 2 else plus[i // 2] for i in range(count)]


def repeated(weight: Tensor, parts: Sequence[float], dim: int) -> Tensor:
    """A tensor after itself along ``dim``, once for each of ``parts`` and multiplied by it."""
    return torch.cat([weight * part for part in parts], dim)


def ones(count: int) -> list[float]:
    return [1.0] * count


def widened_norm(weight: Tensor, copies: int, config: Mapping[str, Any]) -> Tensor:
    """A norm before what reads the hidden dimensions; a hybrid's are stored less one."""
    if not is_hybrid(config):
        return repeated(weight, shares(copies), 0)
    return repeated(weight.float() + 1.0, shares(copies), 0) - 1.0


def is_hybrid(config: Mapping[str, Any]) -> bool:
    return LINEAR in config.get("layer_types", ())


def widened_layer(
    small: Mapping[str, Tensor], config: Mapping[str, Any], shape: Shape, live: bool
) -> Tensors:
    """A layer of the large model; unless it is ``live`` it adds nothing to the residual stream."""
    split = shares if live else cancelling
    attn, delta, mlp = "self_attn.", "linear_attn.", "mlp."

    def reading(name: str, copies: int) -> Tensor:
        """Reads every repetition of the hidden dimensions: the norm before it holds the shares."""
        return repeated(repeated(small[name], ones(shape.hidden), 1), ones(copies), 0)

    def writing(name: str, copies: int) -> Tensor:
        return repeated(repeated(small[name], split(copies), 1), ones(shape.hidden), 0)

    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    large = {name: widened_norm(small[name], shape.hidden, config) for name in norms}
    for name in (attn + "q_norm.weight", attn + "k_norm.weight", delta + "norm.weight"):
        if name in small:
            large[name] = small[name].clone()
    if delta + "out_proj.weight" in small:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        for name in ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"):
            large[delta + name] = reading(delta + name, shape.heads)
        for name in ("A_log", "dt_bias"):
            large[delta + name] = repeated(small[delta + name], ones(shape.heads), 0)
        wide = repeated(small[delta + "in_proj_qkv.weight"], ones(shape.hidden), 1)
        for name, rows in {
            "in_proj_qkv.weight": wide,
            "conv1d.weight": small[delta + "conv1d.weight"],
        }.items():
            parts = rows.split([keys, keys, len(rows) - 2 * keys])
            large[delta + name] = torch.cat([repeated(x, ones(shape.heads), 0) for x in parts])
        large[delta + "out_proj.weight"] = writing(delta + "out_proj.weight", shape.heads)
    else:
        large[attn + "q_proj.weight"] = reading(attn + "q_proj.weight", shape.heads)
        for name in ("k_proj.weight", "v_proj.weight"):
            large[attn + name] = reading(attn + name, shape.kv_heads)
        large[attn + "o_proj.weight"] = writing(attn + "o_proj.weight", shape.heads)
    for name in ("gate_proj.weight", "up_proj.weight"):
        large[mlp + name] = reading(mlp + name, shape.intermediate)
    large[mlp + "down_proj.weight"] = writing(mlp + "down_proj.weight", shape.intermediate)
    return large


def layer_plan(small: int, large: int) -> list[tuple[int, int]]:
    """For every layer of the large model which layer it is a copy of, and which copy; 0 is live."""
    if large < small:
        raise ValueError(f"{large} layers cannot hold the {small} of the small model")
    plan: list[tuple[int, int]] = []
    for index in range(small):
        copies = (index + 1) * large // small - len(plan)
        plan += [(index, copy) for copy in range(copies)]
    return plan


def reordered(small: Mapping[str, Tensor], copy: int) -> Tensors:
    """A layer whose matrices read their inputs in another order."""
    return {name: t.roll(copy, 1) if t.ndim == 2 else t for name, t in small.items()}


def inflate(tensors: Mapping[str, Tensor], config: Mapping[str, Any], shape: Shape) -> Tensors:
    """All tensors of the large model, under their Hugging Face names.

    Raises:
        ValueError: the small model has untied embeddings or more layers than ``shape``; or
            ``shape`` does not fit its heads.
    """
    if not config["tie_word_embeddings"]:
        raise ValueError("only models with tied embeddings can be inflated")
    if config["num_key_value_heads"] > 1 and shape.heads != shape.kv_heads:
        raise ValueError("several key/value heads are repeated as often as the others, or not")
    if config["num_attention_heads"] * shape.heads % shape.kv_heads:
        raise ValueError("the heads cannot be divided among the key/value heads")
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    large = {
        embedding: repeated(tensors[embedding], ones(shape.hidden), 1),
        norm: widened_norm(tensors[norm], shape.hidden, config),
    }
    for at, (index, copy) in enumerate(layer_plan(config["num_hidden_layers"], shape.layers)):
        prefix = f"model.layers.{index}."
        small = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        layer = widened_layer(reordered(small, copy), config, shape, live=copy == 0)
        large |= {f"model.layers.{at}.{name}": tensor for name, tensor in layer.items()}
    return large


def inflated_config(config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    small = config["num_hidden_layers"]
    kinds = config.get("layer_types", ["full_attention"] * small)
    heads = ("linear_num_key_heads", "linear_num_value_heads") if is_hybrid(config) else ()
    return {
        **config,
        "hidden_size": config["hidden_size"] * shape.hidden,
        "intermediate_size": config["intermediate_size"] * shape.intermediate,
        "num_attention_heads": config["num_attention_heads"] * shape.heads,
        "num_key_value_heads": config["num_key_value_heads"] * shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "layer_types": [kinds[index] for index, _ in layer_plan(small, shape.layers)],
        "max_window_layers": shape.layers,
        **{name: config[name] * shape.heads for name in heads},
    }


# --- folders --------------------------------------------------------------------------------------


def write_inflated(out: Path, source: Path, shape: Shape) -> dict[str, Any]:
    """Write a Hugging Face folder that any engine loads; returns what it holds."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = inflate(load_file(source / "model.safetensors"), config, shape)
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    for file in TOKENIZER_FILES:
        shutil.copyfile(source / file, out / file)
    large = inflated_config(config, shape)
    (out / "config.json").write_text(json.dumps(large, indent=2) + "\n", encoding="utf-8")
    total = sum(tensor.numel() for tensor in tensors.values())
    return {
        "parameters": total,
        "nonzero_share": sum(int(t.count_nonzero()) for t in tensors.values()) / total,
        "live_layers": config["num_hidden_layers"],
        "layers": shape.layers,
    }


def embedded_folder(draft: bool) -> Path:
    return Path(embedded_model("draft" if draft else "target"))


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--shape", choices=[*PAIRS, *HYBRIDS], default="0.5b")
    parser.add_argument("--draft", action="store_true", help="the draft model of that shape")
    parser.add_argument("--hybrid", type=Path, help="folder of a hybrid to inflate instead")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    if options.hybrid is not None:
        source, shape = options.hybrid, HYBRIDS[options.shape]
    else:
        source, pair = embedded_folder(options.draft), PAIRS[options.shape]
        shape = pair.draft if options.draft else pair.target
    facts = write_inflated(options.out, source, shape)
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
