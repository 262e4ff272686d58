"""The names of a model's tensors, out of its folder or GGUF file. Reads none of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from paceline.core.json_file import MAX_JSON_BYTES, read_json
from paceline.loading.gguf.names import place_of
from paceline.loading.gguf.shards import read_shards
from paceline.tensors.expert_tensors import plain_expert_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Multimodal checkpoints keep their language model under a prefix, of two generations.
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
_BASE_EMBEDDINGS = {"embed_tokens.weight", "embeddings.weight", "embed_in.weight"}


def plain_name(stored: str) -> str:
    """What a tensor would be called in a checkpoint that is of text alone."""
    name = stored
    for prefix, plain in _PREFIXES.items():
        if stored.startswith(prefix):
            name = plain + stored[len(prefix) :]
            break
    return plain_expert_name(name)


def base_names(names: Iterable[str]) -> dict[str, str]:
    """What a whole model's checkpoint calls the tensors of one that was saved without its head.

    ``AutoModel`` and sentence-transformers save such; empty for a whole model's checkpoint.
    """
    known = list(names)
    if _BASE_EMBEDDINGS.isdisjoint(known):
        return {}
    below = [name for name in known if not name.startswith(("model.", "lm_head."))]
    return {name: plain_expert_name(f"model.{name}") for name in below}


def stored_names(model: Path) -> list[str]:
    """As Hugging Face names; empty for a folder without safetensors.

    Raises:
        ModelLoadError, OSError, ValueError: a file is damaged; whoever loads it says how.
    """
    if model.is_file():
        container = read_shards(model)
        architecture = str(container.metadata.get("general.architecture"))
        return [place_of(architecture, name).name for name in container.tensors]
    if (model / INDEX_FILE).is_file():
        return _keys(read_json(model / INDEX_FILE).get("weight_map"))
    if not (model / SINGLE_FILE).is_file():
        return []
    with (model / SINGLE_FILE).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return _keys(json.loads(file.read(min(size, MAX_JSON_BYTES))))


def _keys(found: object) -> list[str]:
    return [plain_name(str(name)) for name in found] if isinstance(found, dict) else []
