"""Which weights a model has, as a short name. Knows no format and reads little of any."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from paceline.loading.checkpoint import Checkpoint
from paceline.tensors.arrays import Array
from paceline.tensors.stored import StoredTensors

SAMPLED_MATRICES = 48
"""Whose first numbers are part of a model's fingerprint."""
SAMPLED_NUMBERS = 64
_REORDERED = ("q_proj.weight", "k_proj.weight")
"""Whose rows a GGUF file keeps in another order, so that one is not had without all."""


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """Hex hash of every tensor's name, type and shape, and of some matrices' first numbers.

    Reads a page or so of at most :data:`SAMPLED_MATRICES`: a fraction of a second for a model of
    any size.
    """
    digest, tensors, matrices = xxhash.xxh3_128(), checkpoint.tensors, []
    for name in sorted(tensors):
        kind, shape = _type_and_shape(tensors, name)
        digest.update(f"{name} {kind} {shape};".encode())
        if len(shape) > 1 and not name.endswith(_REORDERED):
            matrices.append(name)
    # By their names' hashes: of every layer and part some, whatever the order of names.
    matrices.sort(key=lambda name: xxhash.xxh3_64_hexdigest(name.encode()))
    for name in matrices[:SAMPLED_MATRICES]:
        first = tensors.rows(name, 0, 1) if isinstance(tensors, StoredTensors) else tensors[name]
        numbers = np.ascontiguousarray(first.reshape(-1)[:SAMPLED_NUMBERS])
        digest.update(numbers.view(np.uint8).data)
    return digest.hexdigest()


def _type_and_shape(tensors: Mapping[str, Array], name: str) -> tuple[str, tuple[int, ...]]:
    if isinstance(tensors, StoredTensors):
        return tensors.type_of(name), tensors.shape_of(name)
    return str(tensors[name].dtype), tuple(tensors[name].shape)
