"""What GGUF files of dense families say in keys of their own, told as a ``config.json`` would.

Pure: reads no tensor. What the format leaves to its readers comes from the families' defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from paceline.models.config import LEARNT_KEYS

_WINDOW = "attention.sliding_window"


def dense_keys(
    get: Callable[..., Any],
    architecture: str,
    layer_types: list[str] | None,
    tensors: Collection[str],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """What the family's configuration says beyond what all have."""
    listed = {} if layer_types is None else {"layer_types": layer_types}
    if architecture == "olmo2" and get(_WINDOW):
        base = get("rope.freq_base_swa", get("rope.freq_base"))
        return {"model_type": "olmo3", "rope_local_base_freq": base, **listed}
    if architecture == "exaone4":
        return listed
    if architecture in ("command-r", "cohere2"):
        return {**listed, "logit_scale": get("logit_scale", 1.0)}
    if architecture == "stablelm":  # whose key for this is always true
        return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors}
    if architecture == "apertus":  # one list each, under keys without the architecture
        return {key: metadata.get(key.replace("_", ".", 1)) for key in LEARNT_KEYS}
    if architecture == "gptneox":
        return {"use_parallel_residual": get("use_parallel_residual", True)}
    if architecture == "minicpm" and get("embedding_scale") is None:  # of the first models' files
        return {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
    if architecture == "minicpm":
        return {
            "scale_emb": get("embedding_scale", 1.0),
            "scale_depth": get("residual_scale", 1.0) * max(get("block_count", 1), 1) ** 0.5,
            "dim_model_base": get("embedding_length", 1) / (get("logit_scale", 1.0) or 1.0),
        }
    return {}
