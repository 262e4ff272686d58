"""An MTP layer as a head: out of the target's own checkpoint, another model's, or a head's folder.

It reads the target's output after the last norm, and at drafted nodes its own after its last norm:
vLLM and SGLang do so for every model that they have (vLLM since its pull request 45895), llama.cpp
for Qwen's, and DeepSeek's modelling code for the target's. Owns whose layer it is; what it is like
is the affair of :mod:`paceline.loading.checkpoint`.
"""

from __future__ import annotations

from paceline.config.speculative import HeadConfig
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.json_file import read_json
from paceline.loading.checkpoint import Checkpoint, load_checkpoint, mtp_head
from paceline.loading.quantised.methods import QuantisedTensors, schemes_of, split_quantisation
from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.models.families.config_json import config_from_hf
from paceline.models.heads import MTP, head_kind
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads.checkpoint import HeadCheckpoint, layer_config, place_of
from paceline.tensors.stored import StoredTensors


def load_mtp(config: HeadConfig, target: TargetInfo) -> HeadCheckpoint:
    """The MTP layer of the model that a configuration names, or else of the target.

    Raises:
        ModelLoadError: that model cannot be read.
        ConfigError: it has no MTP layer.
        UnsupportedModelError: the layer is of a kind that does not run here.
    """
    model = target.checkpoint if config.model is None else _opened(config.model)
    if model is None:
        raise ConfigError('method "mtp" drafts with a layer of the target, and none is loaded here')
    head = mtp_head(model)
    if head is None:
        raise ConfigError(
            f"{model.name} has no MTP layer: none of its tensors is called mtp.fc, mtp_layers.0 or "
            "nextn, nor eh_proj behind its last layer. Conversions often leave it out: name a form "
            'of the model that has it by "model", or choose another method'
        )
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
