"""What of a checkpoint cannot be read, or not be left unread. Knows no file and no arithmetic.

A tensor that is left out in silence (the scales of quantised weights, a bias, a router) makes
another model of the checkpoint, so all but a few known ones are an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.heads import mtp_layers_behind
from paceline.tensors.arrays import FLOAT_NAMES

_SHOWN = 4
# What follows from the configuration, or belongs to parts that plain decoding of text does not run.
_HARMLESS = re.compile(
    r"""
    (.*\.)? rotary_emb \. (inv_freq | cos_cached | sin_cached)  # tables that are computed anew
    | .*\. attn_rot_embd \. weight                               # the same in GGUF files
    | (.*\.)? masked_bias                                        # a constant of old exports
    | t2d                                                        # follows from d2t
    | (model\.)? (visual | vision_tower | vision_model | audio_tower) \. .*
    | (model\.)? (multi_modal_projector | embed_vision | embed_audio) \. .*
    | (model\.)? image_newline
    | (v | a | mm) \. .*                                          # these parts in GGUF files
    | v_head \. .*                                               # values, for training alone
    | (model\.)? (mtp | mtp_layers) \. .*                         # drafts of several tokens
    """,
    re.VERBOSE,
)


def is_harmless(name: str) -> bool:
    """Whether a tensor may stay unread."""
    return _HARMLESS.fullmatch(name) is not None


def check_leftovers(tensors: Mapping[str, Any], used: Collection[str]) -> None:
    """Refuse a checkpoint that has more than what was used of it.

    A bias of zeros adds nothing; some tools write one for every linear.

    Args:
        tensors: all that it has.
        used: those that the decoder took.

    Raises:
        UnsupportedModelError: some of the others are not known to be harmless.
    """
    left = sorted(name for name in tensors if name not in used and not is_harmless(name))
    behind = [p for p in mtp_layers_behind(left) if not any(n.startswith(p) for n in used)]
    left = [name for name in left if not name.startswith(tuple(behind))]
    left = [name for name in left if not name.endswith(".bias") or _adds_something(tensors, name)]
    if left:
        shown = ", ".join(name[:80] for name in left[:_SHOWN])
        raise UnsupportedModelError(
            f"the configuration has no use for {len(left)} of the checkpoint's tensors: {shown}"
            f"{', ...' if len(left) > _SHOWN else ''}; without them it would be another model. "
            "Either config.json does not describe this checkpoint, or it is of a kind that is not "
            "supported, such as a quantised one"
        )


def _adds_something(tensors: Mapping[str, Any], name: str) -> bool:
    try:
        return bool((tensors[name] != 0).any())
    except ModelLoadError:  # not of the shape that it would have
        return True


def check_floats(name: str, tensor: Any, kind: str) -> None:
    """Refuse weights that are not floats of 16 bits or more, and so need scales to be read."""
    if str(tensor.dtype).removeprefix("torch.") not in FLOAT_NAMES:
        raise UnsupportedModelError(
            f"tensor {name} is of type {kind}, which is not a weight by itself: the checkpoint is "
            "quantised, and config.json does not say how. Use its unquantised form with --dtype "
            "int8, or a GGUF file"
        )
