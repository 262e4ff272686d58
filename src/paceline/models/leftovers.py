"""Tensors of a checkpoint that its configuration has no use for: which may stay unread.

A tensor that is left out in silence (the scales of quantised weights, a bias, a router) makes
another model of the checkpoint, so all but a few known ones are an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from paceline.errors import UnsupportedModelError

_SHOWN = 4
# What follows from the configuration, or belongs to parts that plain decoding of text does not run.
_HARMLESS = re.compile(
    r"""
    (.*\.)? rotary_emb \. (inv_freq | cos_cached | sin_cached)  # tables that are computed anew
    | .*\. attn_rot_embd \. weight                               # the same in GGUF files
    | (.*\.)? masked_bias                                        # a constant of old exports
    | t2d                                                        # follows from d2t
    | (model\.)? (vision_tower | audio_tower | multi_modal_projector) \. .*
    | (model\.)? image_newline
    | (model\.)? (mtp | mtp_layers) \. .*                         # drafts of several tokens
    """,
    re.VERBOSE,
)


def check_leftovers(names: Iterable[str], used: Collection[str]) -> None:
    """Refuse a checkpoint that has more than what was used of it.

    Args:
        names: all of its tensors.
        used: those that the decoder took.

    Raises:
        UnsupportedModelError: some of the others are not known to be harmless.
    """
    left = sorted(name for name in names if name not in used and not _HARMLESS.fullmatch(name))
    if left:
        shown = ", ".join(name[:80] for name in left[:_SHOWN])
        raise UnsupportedModelError(
            f"the configuration has no use for {len(left)} of the checkpoint's tensors: {shown}"
            f"{', ...' if len(left) > _SHOWN else ''}; without them it would be another model. "
            "Either config.json does not describe this checkpoint, or it is of a kind that is not "
            "supported, such as a quantised one"
        )
