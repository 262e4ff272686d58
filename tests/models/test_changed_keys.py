"""Every key of every family's configuration is changed: logits stay those of transformers, or the
key is refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.core.errors import ModelLoadError
from tests.models import reference
from tests.models.reference import FULL, LLAMA3, SLIDING, VOCAB, Driver
from tests.models.test_families import want

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FAMILIES = {**reference.FAMILIES, **reference.MIXTURES, **reference.HYBRIDS}
TOKENS = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(3)).tolist()
LONGEST = 32
"""Of a text; ``longrope`` chooses its factors by it, and transformers by the text at hand."""
OF_ALL_CLASSES = {*transformers.PretrainedConfig().to_dict()} - {"tie_word_embeddings"}
OTHERWISE_TRIED = {
    *("vocab_size", "rope_parameters", "layer_types", "layers_block_type", "per_layer_config"),
    *("hidden_act", "hidden_activation", "bos_token_id", "eos_token_id"),
}
OF_TRAINING = {
    *("pad_token_id", "initializer_range", "use_cache", "attention_dropout"),
    *("router_aux_loss_coef", "output_router_logits"),
}
NOT_AS_THERE = {"minicpm": ["hidden_size", "num_attention_heads", "attention_multiplier"]}
"""Granite's class stands in for MiniCPM's, whose scores have no scale but the usual one."""
WORDS = ("gelu_pytorch_tanh", "relu2", "sigmoid", "softmax", "greedy", "group_limited_greedy")


def others(value: object) -> Iterator[Any]:
    """Values of the same kind, of which the first that makes a model is tried."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, value + 1, max(1, value // 2)) if value else (1, 2)
    elif isinstance(value, float):
        is_usual = math.isfinite(value) and value != 0
        yield from (value * 0.5, value * 1.7 + 0.01) if is_usual else (0.3,)
    elif value is None:
        yield from (0.5, 3, True, [1])
    elif isinstance(value, str):
        yield from (word for word in (*WORDS, "silu", "rope", "nope") if word != value)
    elif isinstance(value, list | tuple):
        yield from _other_lists(list(value))


def _other_lists(value: list[Any]) -> Iterator[Any]:
    if not value:
        yield from ([0], [1])
    elif all(isinstance(item, float) for item in value):
        moved = [item * 0.5 + 0.05 if math.isfinite(item) else 0.2 for item in value]
        yield from (tuple(moved), moved)
    elif all(isinstance(item, int) for item in value):
        yield from (value[::-1], value[:-1])


def differing(family: str, folder: Path, **changes: Any) -> bool | None:
    """Whether logits are others than theirs; None where they make no model of the changes."""
    try:
        reference.save_model(family, folder, **copy.deepcopy(changes))
        wanted = want(reference.make_model(family, **copy.deepcopy(changes)), TOKENS)
    except Exception:  # whatever their own checks and shapes say
        return None
    if not torch.isfinite(wanted).all():
        return None
    try:
        got = Driver.of(folder, max_len=LONGEST).chunk(TOKENS)
    except ModelLoadError:
        return False
    most = 2e-3 * max(1.0, wanted.abs().max().item())
    return (got - wanted).abs().max().item() > most


def outcomes(family: str, folder: Path, key: str, value: object) -> list[bool]:
    """Whether logits differ, with each of the first changes of a key that they take."""
    found: list[bool] = []
    enough = 2 if value is None or isinstance(value, str) else 1
    for number, other in enumerate(others(value)):
        differs = differing(family, folder / f"{key}-{number}", **{key: other})
        found += [] if differs is None else [differs]
        if len(found) == enough:
            break
    return found


def whole(family: str) -> dict[str, Any]:
    """All that the configuration of a family's model says."""
    try:
        told = reference.make_model(family).config.to_dict()
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__} has no such family: {error}")
    assert isinstance(told, dict)
    return told


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_heeded_or_refused(family: str, tmp_path: Path) -> None:
    found = {
        key: outcomes(family, tmp_path, key, value)
        for key, value in whole(family).items()
        if key not in OF_ALL_CLASSES | OTHERWISE_TRIED | OF_TRAINING
    }
    assert sum(map(bool, found.values())) > 5
    wrong = [key for key, differ in found.items() if any(differ)]
    assert wrong == NOT_AS_THERE.get(family, [])


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
LONGROPE = {**YARN, "rope_type": "longrope", "long_factor": [2.0] * 8}
LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(8)]}
FOUR = {name: LONGROPE[name][:4] for name in ("short_factor", "long_factor")}
ROTARY: dict[str, dict[str, Any]] = {
    "default": PLAIN,
    "growing": {**PLAIN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8},
    "linear": {**PLAIN, "rope_type": "linear", "factor": 3.0},
    "dynamic": {**PLAIN, "rope_type": "dynamic", "factor": 3.0},
    "llama3": dict(LLAMA3),
    "yarn": YARN,
    "yarn untruncated": {**YARN, "truncate": False, "beta_fast": 4.0},
    "yarn betas": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn attention": {**YARN, "attention_factor": 1.7},
    "yarn mscale": {**YARN, "mscale": 0.7},
    "yarn both mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn growing": {**YARN, "llama_4_scaling_beta": 0.5},
    "proportional": {**PLAIN, "rope_type": "proportional", "partial_rotary_factor": 0.5},
    "partial": {**PLAIN, "partial_rotary_factor": 0.5},
    "sections": {**PLAIN, "mrope_section": [2, 3, 3]},
    "longrope": LONGROPE,
    "longrope beyond": {**LONGROPE, "original_max_position_embeddings": 16},
    "longrope attention": {**LONGROPE, "attention_factor": 1.7},
    "longrope partial": {**LONGROPE, "partial_rotary_factor": 0.5, **FOUR},
}


def entries(kind: dict[str, Any], by_type: bool) -> list[dict[str, Any]]:
    """Rotary entries as a family has them: one set, or one for each type of layers."""
    if not by_type:
        return [kind]
    return [{FULL: kind, SLIDING: PLAIN}, {FULL: PLAIN, SLIDING: kind}]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rotary_scaling_is_heeded_or_refused(family: str, tmp_path: Path) -> None:
    by_type = FULL in (whole(family).get("rope_parameters") or {})
    wrong = [
        name
        for name, kind in ROTARY.items()
        for number, told in enumerate(entries(kind, by_type))
        if differing(family, tmp_path / f"{name}-{number}", rope_parameters=told)
    ]
    assert wrong == []
