"""Heads: small decoders that draft from a target's hidden states, alone or in its checkpoint.

Owns which kind of head a ``config.json`` describes, and where checkpoints keep their MTP layer, a
head that was trained with its model:

* DeepSeek-V3 and GLM-4.5: a decoder layer behind the last one, ``model.layers.N``. GGUF files have
  the same, as ``blk.N`` with what is of the head alone under ``nextn``.
* Qwen3-Next and Qwen3.5: ``mtp``, beside ``model``, in multimodal checkpoints too.
* MiMo: ``model.mtp_layers.0``, whose linear reads the hidden state first and the token after it.
* The `speculators` library: ``mtp_layers.0``, MiMo's names in the usual order.
* Folders of ``paceline convert``: what a decoder reads, under ``mtp``.

Several layers, one for each further token, are allowed: the first is used for all of them, which is
how engines draft beyond the layers that a model has. Knows no tensors, and imports nothing slow.

Sources: vLLM's and SGLang's models (deepseek_mtp and deepseek_nextn, glm4_moe_mtp, qwen3_next_mtp,
mimo_mtp), llama.cpp's tensor names and MTP graphs, and the speculators package, version 0.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.config.speculative import HEAD_METHODS
from paceline.models.config import MASK_TOKEN_KEYS

EAGLE3, PEAGLE, MTP, DFLASH, DSPARK = "eagle3", "peagle", "mtp", "dflash", "dspark"
DFLASH2 = "dflash2"
ASSISTANT = "gemma4_assistant"
_ARCHITECTURES = {  # whole names: those of relatives begin or end with the same letters
    "DFlashDraftModel": DFLASH,
    "DominoDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH2,
    "DSparkDraftModel": DSPARK,
    "Qwen3DSparkModel": DSPARK,
    "Gemma4AssistantForCausalLM": ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": ASSISTANT,
}


def head_kind(raw: Mapping[str, Any]) -> str | None:
    """Which kind of head a configuration describes; None where it describes no head.

    The `speculators` layout says so itself; original checkpoints have an architecture that is named
    after the method. P-EAGLE's is EAGLE-3's, and a mask token tells them apart.
    """
    said = raw.get("speculators_model_type")
    if said in HEAD_METHODS:
        return str(said)
    names = raw.get("architectures")
    if said is not None or not isinstance(names, list):
        return None
    for name in map(str, names):
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        if EAGLE3 in name.lower():
            is_parallel = any(raw.get(key) is not None for key in MASK_TOKEN_KEYS)
            return PEAGLE if is_parallel else EAGLE3
    return None


_ENDS = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
_MIMO = {
    "input_proj": "model.eh_proj",
    "token_layernorm": "model.enorm",
    "hidden_layernorm": "model.hnorm",
    "final_layernorm": "model.norm",
}
_QWEN = {
    "fc": "model.eh_proj",
    "pre_fc_norm_embedding": "model.enorm",
    "pre_fc_norm_hidden": "model.hnorm",
    "norm": "model.norm",
}
_DEEPSEEK = {
    **{name: f"model.{name}" for name in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm": "model.norm",
}
_JOIN, _NORM, _LAYER = "model.eh_proj.", "model.norm.weight", "model.layers.0."
PACKED = "mtp."
"""What the names of a head in a converted folder begin with."""
LINEAR_ATTENTION = re.compile(r".*(linear_attn|ssm_).*")
EXPERTS = re.compile(r".*\.mlp\.(gate|experts)\..*")
LATENT_ATTENTION = re.compile(r".*\.kv_a_proj.*")
"""What the names of tensors of these parts look like."""


class MtpPart(NamedTuple):
    """A model's MTP layer.

    Attributes:
        names: what a decoder reads -> the checkpoint's name for it.
        hidden_first: the linear reads the hidden state before the token.
    """

    names: Mapping[str, str]
    hidden_first: bool

    def tensor_of(self, what: re.Pattern[str]) -> str | None:
        """The name of a tensor of :data:`LINEAR_ATTENTION`, :data:`EXPERTS` or
        :data:`LATENT_ATTENTION`; None where there is none."""
        return next((name for name in self.names.values() if what.fullmatch(name)), None)


@dataclass(frozen=True, slots=True)
class _MtpLayout:
    prefix: re.Pattern[str]  # its group is the layer's number
    names: Mapping[str, str]  # what does not belong to the decoder layer itself
    hidden_first: bool = False

    def layers(self, stored: Iterable[str]) -> dict[int, dict[str, str]]:
        """By number: what a decoder reads -> the checkpoint's name for it."""
        found: dict[int, dict[str, str]] = {}
        for name in stored:
            match = self.prefix.match(name)
            if match is not None:
                stem, _, kind = name[match.end() :].rpartition(".")
                plain = {**_ENDS, **self.names}.get(stem, _LAYER + stem)
                found.setdefault(int(match[1] or 0), {})[f"{plain}.{kind}"] = name
        return found


_BEHIND = _MtpLayout(re.compile(r"(?:model\.layers|blk)\.(\d{1,4})\."), _DEEPSEEK)
_LAYOUTS = (
    _BEHIND,
    _MtpLayout(re.compile(r"mtp\.(?:layers\.(\d{1,4})\.)?"), _QWEN),
    _MtpLayout(re.compile(r"model\.mtp_layers\.(\d{1,4})\."), _MIMO, hidden_first=True),
    _MtpLayout(re.compile(r"mtp_layers\.(\d{1,4})\."), _MIMO),
)


def mtp_part(stored: Iterable[str]) -> MtpPart | None:
    """The first MTP layer among a checkpoint's tensors; None where it has none."""
    stored = list(stored)
    packed = {name.removeprefix(PACKED): name for name in stored if name.startswith(PACKED)}
    if any(plain.startswith(_JOIN) for plain in packed):
        return MtpPart(packed, hidden_first=False)
    for layout in _LAYOUTS:
        for _, names in sorted(layout.layers(stored).items()):
            if any(plain.startswith(_JOIN) for plain in names):
                if _NORM not in names and _NORM in stored:  # shared with the model
                    names[_NORM] = _NORM
                return MtpPart(names, layout.hidden_first)
    return None


def mtp_layers_behind(stored: Iterable[str]) -> tuple[str, ...]:
    """What the names of MTP layers behind a model's own begin with."""
    layers = _BEHIND.layers(stored).items()
    numbers = [i for i, names in layers if any(plain.startswith(_JOIN) for plain in names)]
    return tuple(f"{prefix}.{i}." for i in numbers for prefix in ("model.layers", "blk"))
