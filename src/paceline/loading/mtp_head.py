"""The MTP layer of a model as a checkpoint of its own, which is like a layer of the model.

The names are the affair of :mod:`paceline.models.mtp_names`. Knows no proposer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.errors import UnsupportedModelError
from paceline.loading.checkpoint import Checkpoint
from paceline.loading.quantised.tensors import QuantisedTensors
from paceline.models.config import EntryConfig, ModelConfig
from paceline.models.entry import JOIN
from paceline.models.latent import LatentTensors
from paceline.models.mtp_names import mtp_part
from paceline.models.recurrent_tensors import RecurrentTensors
from paceline.tensors.stored import RenamedTensors, StoredTensors


def mtp_head(model: Checkpoint) -> Checkpoint | None:
    """A decoder with the entry ``mtp``; None without such a layer. Not all kinds can be run."""
    part = mtp_part(model.tensors)
    if part is None:
        return None
    unlike = part.foreign
    unlike = unlike or (None if model.config.mlp.experts else part.expert)
    unlike = unlike or (None if model.config.attention.latent else part.latent)
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
    quantised = model.is_quantised
    return Checkpoint(shape, tensors, None, model.name, is_quantised=quantised, packed=model.packed)


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
    experts = model.mlp.experts if is_mixture else None
    sees_all = {"attention.sliding_window": 0, "positions.local_rope": None}
    traits = {
        "num_layers": 1,
        "tie_embeddings": False,
        "recurrent": None,
        "entry": EntryConfig("mtp"),
        "mlp.experts": experts and replace(experts, sparse_layers=()),
        "attention.sliding_layers": (),
        **(sees_all if model.attention.sliding_layers else {}),
    }
    return model.with_traits(traits)
