"""A head's folder: its configuration and its weights, in the layouts in which heads come.

The `speculators` layout (``speculators_model_type``, the layers' own configuration inside
``transformer_layer_config``) and those of original checkpoints become one: EAGLE-3's (one
configuration, of a Llama, whose layer is called ``midlayer``) and DFlash's (one configuration, of a
Qwen 3, with a ``dflash_config``). Builds no decoder and knows no target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint, hub_folder, is_hub_id
from paceline.models.config import ModelConfig
from paceline.models.head_kinds import DFLASH, EAGLE3, head_kind
from paceline.models.hf_config import config_from_hf
from paceline.models.hf_fields import Fields
from paceline.models.json_file import read_json
from paceline.models.pruned_head import HEAD_TOKENS
from paceline.models.quantised.methods import schemes_of, split_quantisation
from paceline.models.quantised.tensors import QuantisedTensors
from paceline.models.safetensors_files import SafetensorsFolder
from paceline.models.stored import StoredTensors

LAYER = "transformer_layer_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
BLOCKS = "dflash_config"
_PLACES = (
    ("", LAYER_IDS, 0),
    ("eagle_config", LAYER_IDS, 0),
    ("", "aux_hidden_state_layer_ids", 0),
    (BLOCKS, "target_layer_ids", 1),
)
"""Where configurations name the layers that a head reads, and how far their count is behind that of
:mod:`paceline.models.taps`: EAGLE-3 heads at the top or, NVIDIA's, in a part of their own, DFlash
heads of both layouts."""
FUSION = re.compile(r"fc\.(weight|bias)|(input_norm|hidden_norm|fc_norm\.\d+)\.weight")
"""Tensors that make one vector of the hidden states of several layers."""
_NAMES = (
    (re.compile(r"^midlayer\."), "model.layers.0."),
    (re.compile(r"^(?=(layers|norm|embed_tokens)\.)"), "model."),
)
_VERIFIER = re.compile(r"^verifier_(norm|lm_head)\.")  # the target's own, for training alone
MOST_TAPS = 64
MOST_BLOCK_ROWS = 256
_OTHER_BLOCKS = {
    **dict.fromkeys(("use_swa", "attention_sink_bias"), False),
    **dict.fromkeys(("selector_rank", "final_logit_softcapping"), 0),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), 1),
}
"""Traits of DFlash's relatives, and the value at which a head has the trait not."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a DFlash head reads after the target's hidden states.

    Attributes:
        size: rows.
        mask_token: what all but the first one read.
        first_row: the row that predicts the first token.
    """

    size: int
    mask_token: int
    first_row: int


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """A head as it was found.

    Attributes:
        decoder: its layers, embedding and head under their Hugging Face names; the latter two may
            be missing.
        fusion: the tensors of :data:`FUSION`; None for a head that reads what the target puts out,
            after its last norm, as it is.
        layer_ids: taps of the target, as :mod:`paceline.models.taps` counts them; None where the
            configuration does not name them.
        norm_before_fc: one norm over the hidden states of all taps (``input_norm``).
        fc_norm: a norm for those of each tap (``fc_norm``).
        norm_output: a drafted node's children read its hidden state after the last norm.
        block: of a DFlash head; None of those that draft token by token.
    """

    decoder: Checkpoint
    fusion: StoredTensors | None
    layer_ids: tuple[int, ...] | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    block: Block | None = None

    @property
    def name(self) -> str:
        return self.decoder.name


def load_head(source: str) -> HeadCheckpoint:
    """Open an EAGLE-3 or DFlash head.

    Args:
        source: its folder, or ``org/name`` on the hub.

    Raises:
        ModelLoadError: there is no such folder, or what is there is incomplete or corrupt.
        UnsupportedModelError: it is no head, or of a kind that is not supported.
        ConfigError: fetching it needs an extra that is not installed.
    """
    folder, name = folder_of(source)
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    kind = head_kind(raw)
    if kind not in (EAGLE3, DFLASH):
        said = raw.get("speculators_model_type")
        found = f"a speculator of type {str(said)[:40]!r}" if said else "no head"
        raise UnsupportedModelError(
            f"{name} is {found}; heads say speculators_model_type = eagle3 or dflash, or have an "
            "architecture of that name"
        )
    fields = Fields(raw)
    shape = replace(config_from_hf(layer_config(raw)), entry=kind)
    block = None
    if kind == DFLASH:
        block, shape = _block(raw, fields, shape)
    else:
        shape = replace(shape, norm_before_residual=fields.flag("norm_before_residual"))
    files = SafetensorsFolder(folder)
    for stored in list(files):
        files.rename(stored, _plain_name(stored))
    tensors: StoredTensors = files
    if quantisation is not None:
        tensors = QuantisedTensors(files, schemes_of(quantisation))
    parts = {stored for stored in tensors if FUSION.fullmatch(stored)}
    whole = set() if shape.draft_vocab_size else {HEAD_TOKENS}  # a map that changes nothing
    left_out = parts | whole | {stored for stored in tensors if _VERIFIER.match(stored)}
    rest = tensors.only(stored for stored in tensors if stored not in left_out)
    return HeadCheckpoint(
        Checkpoint(shape, rest, None, name, is_quantised=quantisation is not None),
        tensors.only(parts),
        _layer_ids(raw),
        fields.flag("norm_before_fc"),
        fields.flag("fc_norm"),
        fields.flag("norm_output"),
        block,
    )


def folder_of(source: str) -> tuple[Path, str]:
    """The folder that a source names, and its name; raises as :func:`load_head`."""
    try:
        folder = Path(source).expanduser()
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # names that no file can have
        raise ModelLoadError(f"{source[:80]!r} is not a usable path: {error}") from error
    if is_folder:
        return folder, folder.resolve().name
    if is_hub_id(source):
        return hub_folder(source), source
    raise ModelLoadError(
        f"there is no head at {source}: give a folder with config.json and safetensors, or "
        "org/name of a head on the hub"
    )


def layer_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the head's layers as that of a language model."""
    own = Fields(raw).mapping(LAYER) or raw
    shared = ("draft_vocab_size", "dtype", "torch_dtype")
    return {
        **{key: value for key, value in own.items() if key != "architectures"},
        **{key: raw[key] for key in shared if key in raw},
        "tie_word_embeddings": False,
    }


def _layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    for inside, key, behind in _PLACES:
        place = Fields(raw).mapping(inside) if inside else raw
        ids = place.get(key)
        if isinstance(ids, list) and 0 < len(ids) <= MOST_TAPS:
            found = Fields(place).integers(key, len(ids), 0, 1 << 16)
            return tuple(layer + behind for layer in found)
        if ids is not None:
            raise ModelLoadError(
                f"the model configuration says {key} = {str(ids)[:80]}; it must be a list of "
                f"1 to {MOST_TAPS} numbers"
            )
    return None


def _block(raw: Mapping[str, Any], fields: Fields, shape: ModelConfig) -> tuple[Block, ModelConfig]:
    """How a DFlash head reads blocks, and the shape of its layers."""
    said = Fields({**raw, **fields.mapping(BLOCKS)})
    for trait, usual in _OTHER_BLOCKS.items():
        if said.get(trait) not in (None, usual):
            raise UnsupportedModelError(
                f"DFlash heads with {trait} = {str(said.get(trait))[:40]} are not supported"
            )
    is_causal = next((k for k in ("is_causal", "causal") if said.get(k) is not None), None)
    ahead = (
        said.flag("sliding_window_non_causal") if is_causal is None else not said.flag(is_causal)
    )
    layers = range(shape.num_layers)
    if is_causal is not None and not ahead and not all(map(shape.is_sliding, layers)):
        raise UnsupportedModelError(
            f"DFlash heads with {is_causal} = true are supported where all layers have a sliding "
            "window"
        )
    block = Block(
        said.integer("block_size", 2, MOST_BLOCK_ROWS),
        said.integer("mask_token_id", 0, shape.vocab_size - 1),
        0 if said.flag("sample_from_anchor") else 1,
    )
    has_bias = Fields(fields.mapping(LAYER) or raw).flag("attention_bias")
    shape = replace(shape, qk_norm=True, qkv_bias=has_bias, o_bias=has_bias)
    return block, replace(shape, sliding_sees_ahead=ahead)


def _plain_name(stored: str) -> str:
    for pattern, plain in _NAMES:
        stored = pattern.sub(plain, stored)
    return stored
