"""An MTP layer as a head: out of the target's own checkpoint, another model's, or a head's folder.

It reads the target's output after the last norm, and at drafted nodes its own after its last norm:
vLLM and SGLang do so for every model that they have (vLLM since its pull request 45895), llama.cpp
for Qwen's, and DeepSeek's modelling code for the target's. Owns whose layer it is and what it is
like; the names are the affair of :mod:`paceline.models.mtp_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError, ModelLoadError, UnsupportedModelError
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.config import ModelConfig
from paceline.models.entry import JOIN
from paceline.models.head_kinds import MTP, head_kind
from paceline.models.hf_config import config_from_hf
from paceline.models.json_file import read_json
from paceline.models.latent import LatentTensors
from paceline.models.mtp_names import mtp_part
from paceline.models.quantised.methods import schemes_of, split_quantisation
from paceline.models.quantised.tensors import QuantisedTensors
from paceline.models.recurrent_tensors import RecurrentTensors
from paceline.models.safetensors_files import SafetensorsFolder
from paceline.models.stored import RenamedTensors, StoredTensors
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads.checkpoint import HeadCheckpoint, layer_config, place_of


def load_mtp(config: SpeculativeConfig, target: TargetInfo) -> HeadCheckpoint:
    """The MTP layer of the model that a configuration names, or else of the target.

    Raises:
        ModelLoadError: that model cannot be read.
        ConfigError: it has no MTP layer.
        UnsupportedModelError: the layer is of a kind that does not run here.
    """
    model = target.checkpoint if config.model is None else _opened(config.model)
    if model is None:
        raise ConfigError('method "mtp" drafts with a layer of the target, and none is loaded here')
    part = mtp_part(model.tensors)
    if part is None:
        raise ConfigError(
            f"{model.name} has no MTP layer: none of its tensors is called mtp.fc, mtp_layers.0 or "
            "nextn, nor eh_proj behind its last layer. Conversions often leave it out: name a form "
            'of the model that has it by "model", or choose another method'
        )
    unlike = part.foreign
    unlike = unlike or (None if model.config.experts else part.expert)
    unlike = unlike or (None if model.config.latent else part.latent)
    if unlike is not None:
        raise UnsupportedModelError(
            f"the MTP layer of {model.name} is a mixture of experts or has an attention (it has "
            f"{unlike}) that the model itself has not, or of a kind that does not run here"
        )
    assert isinstance(model.tensors, StoredTensors)
    shape = _shape(model.config, is_mixture=part.expert is not None)
    tensors = _renamed(model.tensors, part.names, shape)
    if part.hidden_first:
        tensors = RenamedTensors(tensors, {name: name for name in tensors}, f"{JOIN}.weight")
    head = Checkpoint(shape, tensors, None, model.name, is_quantised=model.is_quantised)
    return HeadCheckpoint(MTP, head, None, norm_output=True)


def _opened(source: str) -> Checkpoint:
    """A whole model, or a head in the `speculators` layout."""
    try:
        folder, name = place_of(source)
    except ModelLoadError:  # a name of the catalogue, or nothing
        return load_checkpoint(source, with_tokenizer=False)
    if folder.is_file():
        return load_checkpoint(source, with_tokenizer=False)
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    if head_kind(raw) != MTP:
        return load_checkpoint(source, with_tokenizer=False)
    tensors: StoredTensors = SafetensorsFolder(folder)
    if quantisation is not None:
        tensors = QuantisedTensors(tensors, schemes_of(quantisation))
    shape = config_from_hf(layer_config(raw))
    return Checkpoint(shape, tensors, None, name, is_quantised=quantisation is not None)


def _renamed(tensors: StoredTensors, names: Mapping[str, str], shape: ModelConfig) -> StoredTensors:
    """The tensors under the names that a decoder reads.

    Of a quantised checkpoint the parts of weights are renamed, and put together afterwards: those
    of MTP layers were not, since the target does without them.
    """
    if not isinstance(tensors, QuantisedTensors | LatentTensors | RecurrentTensors):
        return RenamedTensors(tensors, names)
    part = mtp_part(tensors.stored)
    assert part is not None
    if not isinstance(tensors, QuantisedTensors):
        return type(tensors)(_renamed(tensors.stored, part.names, shape), shape)
    return QuantisedTensors(RenamedTensors(tensors.stored, part.names), tensors.schemes)


def _shape(model: ModelConfig, is_mixture: bool) -> ModelConfig:
    """One layer of the model, which sees the whole text where some of the model's do."""
    shape = replace(model, num_layers=1, entry="mtp", sliding_layers=(), tie_embeddings=False)
    kind = replace(model.experts, sparse_layers=()) if model.experts and is_mixture else None
    shape = replace(shape, experts=kind, recurrent=None)
    return replace(shape, sliding_window=0, local_rope=None) if model.sliding_layers else shape
