"""Mixtures of experts in a Hugging Face configuration. Pure: reads no file.

The families name the same few numbers differently; :class:`ExpertKeys` says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.models.families.fields import Fields
from paceline.models.shapes import Experts

MOST_EXPERTS = 4096
_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SCORES = ("softmax", "sigmoid")
_METHODS = {"greedy": False, "group_limited_greedy": True}
"""DeepSeek-V2's ways to choose -> whether groups limit them."""


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How a family says what its mixtures are.

    Attributes:
        width: key of an expert's width.
        renormalise: what ``norm_topk_prob`` is where the key is absent, or None where the family
            has no such key and its weights add up to 1.
        shared: key of the shared expert's width; empty where the family has none.
        shared_count: whether that key counts experts of the others' width, which are one wide one.
        shared_gate: whether a sigmoid weighs the shared expert.
        biases: whether the router and the experts have biases.
        some_dense: whether the keys are heeded that make some layers dense.
        per_token: key of the number of experts that a row chooses.
        sigmoid: whether scores are sigmoids where no ``scoring_func`` says so.
        choice_bias: whether a bias is added to the scores for the choice.
        group_best: experts that a group is judged by where ``n_group`` limits the choice; 0: such
            keys are not heeded.
        switch: a key, a flag or the number of experts, without which all layers are dense.
        own_norms, own_scales: as :class:`~paceline.models.config.Experts` has them.
        jitter: key of what SparseMixer weighs with; empty where the family does not.
        weighs_inputs: whether weights are those of what experts read.
        scaled_or_one: whether weights may either be scaled or add up to 1, but not both.
    """

    width: str = "intermediate_size"
    renormalise: bool | None = None
    shared: str = ""
    shared_count: bool = False
    shared_gate: bool = False
    biases: bool = False
    some_dense: bool = False
    per_token: str = "num_experts_per_tok"
    sigmoid: bool = False
    choice_bias: bool = False
    group_best: int = 0
    switch: str = ""
    own_norms: bool = False
    own_scales: bool = False
    jitter: str = ""
    weighs_inputs: bool = False
    scaled_or_one: bool = False


def experts_from_hf(fields: Fields, keys: ExpertKeys, num_layers: int) -> Experts | None:
    """The mixtures of a family that has some; None where all layers are dense by choice.

    Raises:
        ModelLoadError: a number is missing or out of bounds: no experts, more chosen than there
            are, or groups that are not of one size.
        UnsupportedModelError: the scores are of an unknown kind, or it is not known what weighs
            experts.
    """
    if not _has_experts(fields, keys):
        return None
    sparse = _sparse_layers(fields, num_layers) if keys.some_dense else (True,) * num_layers
    if not any(sparse):
        return None
    said = list(filter(fields.says, _NUMBERS)) or list(filter(fields.get, _NUMBERS))[:1]
    said = said or [_NUMBERS[0]]
    number, *others = (_same(fields, key).integer(key, 1, MOST_EXPERTS) for key in said)
    if any(other != number for other in others):
        raise ModelLoadError(
            f"the model configuration says {said[0]} = {number} and {said[1]} = {others[0]}; they "
            "must be the same"
        )
    width = _same(fields, keys.width).integer(keys.width, 1, 1 << 20)
    shared = _same(fields, keys.shared).integer(keys.shared, 0, 1 << 20, 0) if keys.shared else 0
    shared *= width if keys.shared_count else 1
    groups = _groups(fields, keys, number)
    most = number // groups["groups"] * groups["groups_per_token"]
    if keys.jitter and fields.integer(keys.per_token, 1, most) != 2:
        raise UnsupportedModelError(
            f"the model configuration says {keys.per_token} = {fields.get(keys.per_token)}; with "
            "this family's way to weigh experts a row has 2"
        )
    return Experts(
        number=number,
        per_token=_same(fields, keys.per_token).integer(keys.per_token, 1, most),
        width=width,
        **_weights(fields, keys),
        shared_width=shared,
        shared_gate=keys.shared_gate and shared > 0,
        biases=keys.biases,
        sparse_layers=() if all(sparse) else tuple(sparse),
        sigmoid=_is_sigmoid(fields, keys),
        choice_bias=keys.choice_bias,
        least_sum=fields.number("moe_norm_min", 0.0, 1.0, 1e-20),
        own_norms=keys.own_norms,
        own_scales=keys.own_scales,
        jitter=fields.number(keys.jitter, 1e-9, 1.0) if keys.jitter else 0.0,
        weighs_inputs=keys.weighs_inputs,
        **groups,
    )


def dense_width(fields: Fields, keys: ExpertKeys, width: int) -> int:
    """Of the feed-forward of a layer that is no mixture; where there are no experts at all, it is
    what would be shared."""
    if not keys.shared or keys.some_dense or _has_experts(fields, keys):
        return width
    return fields.integer(keys.shared, 1, 1 << 20)


def _has_experts(fields: Fields, keys: ExpertKeys) -> bool:
    if keys.switch in _NUMBERS:
        return fields.get(keys.switch) not in (None, 0)
    return not keys.switch or fields.flag(keys.switch)


def _same(fields: Fields, key: str) -> Fields:
    """The fields, with one value instead of a list of the same for each layer."""
    value = fields.get(key)
    if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
        return Fields({key: value[0]})
    return fields


def _is_sigmoid(fields: Fields, keys: ExpertKeys) -> bool:
    kind = fields.text("scoring_func") or _SCORES[keys.sigmoid]
    if kind not in _SCORES:
        raise UnsupportedModelError(
            f"scores of experts by {kind[:40]!r} are not supported; supported: "
            f"{' and '.join(_SCORES)}"
        )
    return kind == _SCORES[True]


def _groups(fields: Fields, keys: ExpertKeys, number: int) -> dict[str, Any]:
    method = fields.text("topk_method")
    if not keys.group_best or _METHODS.get(method) is False:
        return {"groups": 1, "groups_per_token": 1}
    groups = fields.integer("n_group", 1, number, 1)
    if number % groups:
        raise ModelLoadError(
            f"the model configuration says n_group = {groups}; it must divide the number of "
            f"experts, {number}"
        )
    chosen = fields.integer("topk_group", 1, groups, 1)
    if chosen == groups:  # which limits nothing
        return {"groups": 1, "groups_per_token": 1}
    best = min(keys.group_best, number // groups)
    return {"groups": groups, "groups_per_token": chosen, "group_best": best}


def _weights(fields: Fields, keys: ExpertKeys) -> dict[str, Any]:
    """Whether the weights of the chosen experts add up to 1, and what they are multiplied with."""
    told = None if keys.renormalise is None else fields.get("norm_topk_prob")
    renormalise = keys.renormalise is not False if told is None else fields.flag("norm_topk_prob")
    scale = fields.number("routed_scaling_factor", 1e-9, 1e9, 1.0)
    # Of DeepSeek-V2, whose own code then leaves out the factor; llama.cpp's does both, and that of
    # transformers 5.24 leaves the sum as it is. No published model says both.
    if keys.scaled_or_one and renormalise and scale != 1.0:
        raise UnsupportedModelError(
            f"the model configuration says norm_topk_prob = true and routed_scaling_factor = "
            f"{scale:g}; with this family one of them alone is supported"
        )
    return {"renormalise": renormalise, "scale": scale}


def _sparse_layers(fields: Fields, num_layers: int) -> Sequence[bool]:
    if fields.get("moe_layers") is not None:
        sparse = _layer_list(fields, "moe_layers")
        return [index in sparse for index in range(num_layers)]
    step = fields.integer("decoder_sparse_step", 1, 4096, 1)
    step *= fields.integer("moe_layer_interval", 1, 4096, 1)
    each = fields.integer("moe_layer_freq", 1, 4096, 1)
    first = fields.integer("first_k_dense_replace", 0, 4096, 0)
    first = max(first, fields.integer("moe_layer_start_index", 0, 4096, 0))
    last = fields.integer("moe_layer_end_index", -1, 4096, -1)
    kinds, types = fields.get("mlp_layer_types"), fields.get("layer_types")
    if isinstance(types, list | tuple) and ("moe" in types or "mlp" in types):
        kinds = ["sparse" if each == "moe" else "dense" for each in types]
    if kinds is not None:
        return _listed_layers(kinds, num_layers)
    dense = _layer_list(fields, "mlp_only_layers")
    return [
        index >= first
        and (last < 0 or index <= last)
        and index not in dense
        and (index + 1) % step == 0
        and index % each == 0
        for index in range(num_layers)
    ]


def _layer_list(fields: Fields, key: str) -> Sequence[int]:
    layers = fields.get(key) or []
    if not isinstance(layers, list | tuple) or any(type(index) is not int for index in layers):
        raise ModelLoadError(
            f"the model configuration says {key} = {str(layers)[:80]}; it must be a list of layers"
        )
    return layers


def _listed_layers(kinds: object, num_layers: int) -> Sequence[bool]:
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise ModelLoadError(
            f"the model configuration says mlp_layer_types = {str(kinds)[:80]}; it must say dense "
            f"or sparse of each of {num_layers} layers"
        )
    return [kind == "sparse" for kind in kinds]
