"""A head that was trained before, for a training that goes on from it.

Owns which of its files' statements have to agree with the training. Knows no data and no target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import TrainingError
from paceline.core.json_file import read_json
from paceline.loading.quantised.methods import schemes_of, split_quantisation
from paceline.loading.quantised.tensors import QuantisedTensors
from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.models.families.config_json import config_from_hf
from paceline.models.families.fields import Fields
from paceline.models.tensor_checks import check_floats
from paceline.proposers.heads.checkpoint import LAYER
from paceline.tensors.arrays import floats
from paceline.tensors.stored import RenamedTensors, StoredTensors
from paceline.tensors.torch_arrays import to_torch
from paceline.training.model_files import TrainableModel

_FREE = ("speculators_config", "speculators_version", "dtype")
"""What ``config.json`` says of a head without saying how it computes."""
_OWN = "head."
"""Without it an MTP head's tensors would be passed over, as a model does without them."""


def continued(folder: Path, fresh: TrainableModel) -> TrainableModel:
    """A head with the tensors of an earlier one, quantised ones as the floats they stand for.

    Args:
        folder: of the earlier head, in the speculators format.
        fresh: what training would begin with otherwise; the earlier head's output matrix may have
            other tokens.

    Raises:
        TrainingError: the earlier head is of another kind or shape.
        ModelLoadError: it cannot be read.
    """
    raw, quantisation = split_quantisation(read_json(folder / "config.json"), folder)
    _check_same(folder, raw, fresh.raw)
    tensors = _tensors(folder, quantisation)
    for name, wanted in fresh.tensors.items():
        found = tensors.shape_of(_OWN + name) if _OWN + name in tensors else None
        if found != tuple(wanted.shape):
            raise TrainingError(
                f"{folder}: {name} is {'missing' if found is None else found}; a head that "
                f"this training can go on from has {tuple(wanted.shape)}"
            )
    params = {}
    for name in fresh.params:
        stored = tensors[_OWN + name]
        check_floats(name, stored, tensors.type_of(_OWN + name))
        params[name] = to_torch(floats(stored).copy())
    # Copies, because a file that is mapped here may be replaced, and training writes to these.
    fixed = {name: to_torch(tensors[_OWN + name].copy()) for name in fresh.fixed}
    return TrainableModel(fresh.raw, params, fixed)


def known_mask_token(folder: Path, vocab_size: int) -> int | None:
    """The mask token with which an earlier head was trained; None where it names none.

    Raises:
        ModelLoadError: its configuration cannot be read, or the token is not in the vocabulary.
    """
    said = Fields(read_json(folder / "config.json"))
    if said.get("mask_token_id") is None:
        return None
    return said.integer("mask_token_id", 0, vocab_size - 1)


def _tensors(folder: Path, quantisation: Mapping[str, Any] | None) -> StoredTensors:
    """What the folder holds, under its names behind :data:`_OWN`."""
    files = SafetensorsFolder(folder)
    tensors = RenamedTensors(files, {_OWN + name: name for name in files})
    return QuantisedTensors(tensors, schemes_of(quantisation)) if quantisation else tensors


def _check_same(folder: Path, raw: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        found = raw.get(key)
        if key == LAYER and isinstance(found, dict):  # which can say the same in other words
            is_same = config_from_hf(found) == config_from_hf(value)
        else:
            is_same = found == value
        if key not in _FREE and not is_same:
            raise TrainingError(
                f"{folder} says {key} = {str(found)[:80]}; this training makes a head with "
                f"{str(value)[:80]}: name a head of the same kind, taps and sizes"
            )
