"""A head's folder: its configuration and its weights, in the layouts in which EAGLE-3 heads come.

The `speculators` layout (``speculators_model_type``, the layer's own configuration inside
``transformer_layer_config``) and that of original checkpoints (one configuration, of a Llama, whose
layer is called ``midlayer``) become one. Builds no decoder and knows no target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint, hub_folder, is_hub_id
from paceline.models.head_kinds import EAGLE3, head_kind
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
FUSION = re.compile(r"fc\.(weight|bias)|input_norm\.weight|fc_norm\.\d+\.weight")
"""Tensors that make one vector of the hidden states of several layers."""
_NAMES = (
    (re.compile(r"^midlayer\."), "model.layers.0."),
    (re.compile(r"^(?=(layers|norm|embed_tokens)\.)"), "model."),
)
MOST_TAPS = 64


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
    """

    decoder: Checkpoint
    fusion: StoredTensors | None
    layer_ids: tuple[int, ...] | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def name(self) -> str:
        return self.decoder.name


def load_head(source: str) -> HeadCheckpoint:
    """Open an EAGLE-3 head.

    Args:
        source: its folder, or ``org/name`` on the hub.

    Raises:
        ModelLoadError: there is no such folder, or what is there is incomplete or corrupt.
        UnsupportedModelError: it is no head, or of a kind that is not supported.
        ConfigError: fetching it needs an extra that is not installed.
    """
    folder, name = folder_of(source)
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    if head_kind(raw) != EAGLE3:
        kind = raw.get("speculators_model_type")
        found = f"a speculator of type {str(kind)[:40]!r}" if kind else "no head"
        raise UnsupportedModelError(
            f"{name} is {found}; an EAGLE-3 head says speculators_model_type = eagle3, or has an "
            "architecture of that name"
        )
    fields = Fields(raw)
    shape = config_from_hf(layer_config(raw))
    shape = replace(shape, entry="eagle3", norm_before_residual=fields.flag("norm_before_residual"))
    files = SafetensorsFolder(folder)
    for stored in list(files):
        files.rename(stored, _plain_name(stored))
    tensors: StoredTensors = files
    if quantisation is not None:
        tensors = QuantisedTensors(files, schemes_of(quantisation))
    parts = {stored for stored in tensors if FUSION.fullmatch(stored)}
    whole = set() if shape.draft_vocab_size else {HEAD_TOKENS}  # a map that changes nothing
    rest = tensors.only(stored for stored in tensors if stored not in parts | whole)
    return HeadCheckpoint(
        Checkpoint(shape, rest, None, name, is_quantised=quantisation is not None),
        tensors.only(parts),
        _layer_ids(raw),
        fields.flag("norm_before_fc"),
        fields.flag("fc_norm"),
        fields.flag("norm_output"),
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
    """Where a configuration names the taps: at its top, or as NVIDIA's originals do."""
    for place in (raw, Fields(raw).mapping("eagle_config")):
        ids = place.get(LAYER_IDS)
        if isinstance(ids, list) and 0 < len(ids) <= MOST_TAPS:
            return Fields(place).integers(LAYER_IDS, len(ids), 0, 1 << 16)
        if ids is not None:
            raise ModelLoadError(
                f"the model configuration says {LAYER_IDS} = {str(ids)[:80]}; it must be a list of "
                f"1 to {MOST_TAPS} numbers"
            )
    return None


def _plain_name(stored: str) -> str:
    for pattern, plain in _NAMES:
        stored = pattern.sub(plain, stored)
    return stored
