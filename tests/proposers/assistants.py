"""Random Gemma 4 targets with assistants, made with transformers, and what that drafts by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from packaging import version
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from paceline.models.families.rope import FULL, SLIDING
from tests.loading.gguf_gemma import parameter_name, rope_factors, write_layers
from tests.loading.gguf_writing import write_sizes
from tests.models.reference import COMMON, FAMILIES, VOCAB, make_model


def _kv_sharing_modes(config: Any) -> list[str | None]:
    """As transformers has it from 5.24 on: before, no assistant and not every target ran."""
    own = config.num_hidden_layers - config.num_kv_shared_layers
    modes: list[str | None] = [None] * own + ["reuse"] * config.num_kv_shared_layers
    for kind in set(config.layer_types[:own]):
        modes[max(i for i in range(own) if config.layer_types[i] == kind)] = "store"
    return modes


if version.parse(transformers.__version__) < version.parse("5.24"):
    transformers.Gemma4TextConfig.kv_sharing_modes = property(_kv_sharing_modes)

LAYERS = [SLIDING, SLIDING, FULL]
WIDTH = 32
TARGETS = ("gemma4", "gemma4-inputs")
"""The first one's full layers have keys as values; the second one's last layers share theirs."""


@cache
def target_model(family: str, **changes: Any) -> Any:
    return make_model(family, **changes)


def assistant_config(family: str, clusters: int = 0, **changes: Any) -> Any:
    """Of an assistant for a random target."""
    options = {**COMMON, **FAMILIES[family][1]}
    text = transformers.Gemma4TextConfig(
        **{
            **options,
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": len(LAYERS),
            "layer_types": LAYERS,
            "num_kv_shared_layers": len(LAYERS),
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            **changes,
        }
    )
    return transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=options["hidden_size"],
        use_ordered_embeddings=clusters > 0,
        num_centroids=clusters or 2,
        centroid_intermediate_top_k=max(1, clusters // 3),
    )


def make_assistant(family: str, clusters: int = 0, seed: int = 1, **changes: Any) -> Any:
    config = assistant_config(family, clusters, **changes)
    config.text_config._attn_implementation = config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = transformers.Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:  # constants would hide mistakes
                parameter.add_(0.3 * drawn)
            else:
                parameter.copy_(0.8 * drawn / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.4 * torch.rand(buffer.shape, generator=generator))
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB, generator=generator))
    return model.eval()


def write_assistant(folder: Path, family: str, clusters: int = 0, **options: Any) -> Any:
    model = make_assistant(family, clusters, **options)
    model.save_pretrained(folder)
    return model


def write_gguf_assistant(path: Path, family: str, **options: Any) -> Any:
    """As llama.cpp's converter writes it, by its names and keys, in float32."""
    model = make_assistant(family, **options)
    config, arch = model.config.text_config, "gemma4-assistant"
    writer = gguf.GGUFWriter(path, arch)
    write_sizes(writer, config)
    write_layers(writer, config)
    writer.add_uint32(f"{arch}.embedding_length_out", model.config.backbone_hidden_size)
    writer.add_uint32(f"{arch}.nextn_predict_layers", config.num_hidden_layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stored = f"nextn.{name}" if "projection" in name else parameter_name(name)
        stored = stored or names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        writer.add_tensor(stored, tensor.float().numpy())
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@torch.inference_mode()
def drafted(
    target: Any, assistant: Any, tokens: Sequence[int], depth: int
) -> tuple[list[int], torch.Tensor]:
    """The greedy draft that transformers makes below a text's tokens, and its logits
    ``[depth, vocab]``."""
    known = torch.tensor([tokens])
    outputs = target(known[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    assistant.generation_config.num_assistant_tokens = depth
    limits = transformers.GenerationConfig(max_length=1 << 10)
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), limits
    )
    found, logits = generator.get_candidates(known, {}, outputs, False, 0)
    return found[0, len(tokens) :].tolist(), logits[0]
