"""The model families, by clan, and all of them in one table.

A clan's module holds one record for each ``model_type``: what its ``config.json`` may leave out,
how its checkpoints and GGUF files are laid out, and which fields of the model's shape it sets.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.models.families.deepseek import DEEPSEEK
from paceline.models.families.family import Family
from paceline.models.families.gemma import GEMMA
from paceline.models.families.glm_ernie import GLM_ERNIE
from paceline.models.families.hybrids import HYBRIDS
from paceline.models.families.llama import LLAMA
from paceline.models.families.mixtures import MIXTURES
from paceline.models.families.others import OTHERS
from paceline.models.families.qwen import QWEN

FAMILIES: Mapping[str, Family] = {
    **LLAMA,
    **QWEN,
    **GEMMA,
    **DEEPSEEK,
    **GLM_ERNIE,
    **MIXTURES,
    **HYBRIDS,
    **OTHERS,
}
"""All that are supported, by ``model_type``."""
GGUF_MODEL_TYPES: Mapping[str, str] = {
    architecture: model_type
    for model_type, family in FAMILIES.items()  # the last of those that are alike
    for architecture in family.gguf.architectures
}
"""``general.architecture`` of a GGUF file -> ``model_type``."""
_HEAD = Family({})
GGUF_ASSISTANT = "gemma4-assistant"
"""``general.architecture`` of a head whose layers are those of a family."""


def gguf_family(architecture: str) -> Family:
    """The family of a file; one that has no traits for most heads'."""
    if architecture == GGUF_ASSISTANT:
        return FAMILIES["gemma4_text"]
    return FAMILIES[GGUF_MODEL_TYPES[architecture]] if architecture in GGUF_MODEL_TYPES else _HEAD
