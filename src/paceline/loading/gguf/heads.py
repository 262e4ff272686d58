"""What GGUF files of heads say beyond a model's keys, told as the `speculators` library says it.

A head of llama.cpp, of the architectures that :data:`paceline.loading.gguf.names.HEADS` lists, is a
file of its own. The layers of the target that it reads are counted by their inputs, as
:mod:`paceline.models.taps` does; embedding and output are there where they are not the target's,
and ``d2t`` has the tokens of the output's rows.

Source: llama.cpp, ``src/models/eagle3.cpp`` and ``dflash.cpp``, and its conversion.
"""

from __future__ import annotations

from typing import Any

from paceline.core.errors import UnsupportedModelError
from paceline.loading.gguf.container import GgufContainer

_OTHERS = ("markov_w1.weight", "selector_hidden.weight", "hc_head_fn.weight")
"""Tensors of DSpark, DFlash 2 and DeepSeek's drafts, whose architecture is called like DFlash."""


def head_keys(container: GgufContainer, architecture: str) -> dict[str, Any]:
    """What a ``config.json`` of the head would say, apart from its layers."""
    metadata, tensors = container.metadata, container.tensors
    foreign = next((name for name in _OTHERS if name in tensors), None)
    if foreign is not None:
        raise UnsupportedModelError(
            f"{container.path} has {foreign}: it is a relative of DFlash that does not run here"
        )

    def value(*keys: str) -> Any:
        found = (metadata.get(f"{architecture}.{key}") for key in keys)
        return next((each for each in found if each is not None), None)

    rows = tensors.get("d2t")
    return {
        "speculators_model_type": architecture,
        "aux_hidden_state_layer_ids": value("target_layers", "extract_layers"),
        "draft_vocab_size": rows and rows.shape[0],
        "tie_word_embeddings": False,
        "block_size": value("block_size"),
        "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        "norm_before_residual": value("norm_before_residual"),
        "norm_before_fc": value("norm_before_fc"),
        "final_logit_softcapping": value("final_logit_softcapping"),
        "output_multiplier": value("logit_scale"),
    }
