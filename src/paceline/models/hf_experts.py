"""Mixtures of experts in a Hugging Face configuration. Pure: reads no file.

The families name the same few numbers differently; :class:`ExpertKeys` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ModelLoadError
from paceline.models.config import Experts
from paceline.models.hf_fields import Fields

MOST_EXPERTS = 4096
_NUMBERS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How a family says what its mixtures are.

    Attributes:
        width: key of an expert's width.
        renormalise: what ``norm_topk_prob`` is where the key is absent, or None where the family
            has no such key and its weights add up to 1.
        shared: key of the shared expert's width; empty where the family has none.
        shared_gate: whether a sigmoid weighs the shared expert.
        biases: whether the router and the experts have biases.
        some_dense: whether ``mlp_only_layers`` and ``decoder_sparse_step`` are heeded.
    """

    width: str = "intermediate_size"
    renormalise: bool | None = None
    shared: str = ""
    shared_gate: bool = False
    biases: bool = False
    some_dense: bool = False


def experts_from_hf(fields: Fields, keys: ExpertKeys, num_layers: int) -> Experts | None:
    """The mixtures of a family that has some; None where all layers are dense by choice.

    Raises:
        ModelLoadError: a number is missing or out of bounds: no experts, or more chosen than there
            are.
    """
    said = [key for key in _NUMBERS if fields.get(key) is not None] or [_NUMBERS[0]]
    number, *others = (fields.integer(key, 1, MOST_EXPERTS) for key in said)
    if any(other != number for other in others):
        raise ModelLoadError(
            f"the model configuration says {_NUMBERS[0]} = {number} and {_NUMBERS[1]} = "
            f"{others[0]}; they must be the same"
        )
    sparse = _sparse_layers(fields, num_layers) if keys.some_dense else (True,) * num_layers
    if not any(sparse):
        return None
    shared = fields.integer(keys.shared, 0, 1 << 20, 0) if keys.shared else 0
    return Experts(
        number=number,
        per_token=fields.integer("num_experts_per_tok", 1, number),
        width=fields.integer(keys.width, 1, 1 << 20),
        renormalise=_renormalise(fields, keys.renormalise),
        scale=fields.number("routed_scaling_factor", 1e-9, 1e9, 1.0),
        shared_width=shared,
        shared_gate=keys.shared_gate and shared > 0,
        biases=keys.biases,
        sparse_layers=() if all(sparse) else tuple(sparse),
    )


def _renormalise(fields: Fields, default: bool | None) -> bool:
    if default is None:
        return True
    return default if fields.get("norm_topk_prob") is None else fields.flag("norm_topk_prob")


def _sparse_layers(fields: Fields, num_layers: int) -> Sequence[bool]:
    step = fields.integer("decoder_sparse_step", 1, 4096, 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or any(type(index) is not int for index in dense):
        raise ModelLoadError(
            f"the model configuration says mlp_only_layers = {str(dense)[:80]}; it must be a list "
            "of layers"
        )
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]
