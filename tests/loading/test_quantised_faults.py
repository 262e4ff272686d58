"""Quantised checkpoints that are damaged: an error that names the tensor, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ModelLoadError
from tests.loading.quantised_forms import FORMS, Stored
from tests.loading.quantised_packing import Parts
from tests.loading.test_quantised_formats import NAME, WEIGHT, K, N, opened

Change = Callable[[torch.Tensor], torch.Tensor | None]


def read_changed(folder: Path, form: str, changed: Callable[[Parts], None]) -> None:
    """Write a linear, damage its tensors, and read it in every way."""
    parts, _ = FORMS[form].pack(np.random.default_rng(0), N, K)
    changed(parts)
    stored = Stored({NAME + end: part.contiguous() for end, part in parts.items()})
    tensors = opened(folder, stored.tensors, FORMS[form].config)
    if WEIGHT in tensors:
        tensors[WEIGHT]
        tensors.rows(WEIGHT, 1, 3)
        tensors.as_stored(WEIGHT)


def first(value: float) -> Change:
    """Replace the first number."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.float().flatten()
        flat[0] = value
        return flat.view(tensor.shape).to(tensor.dtype)

    return change


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def narrower(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-1]


def gone(tensor: torch.Tensor) -> None:
    return None


def of_type(kind: torch.dtype) -> Change:
    return lambda tensor: tensor.to(kind)


def set_to(*values: int) -> Change:
    return lambda tensor: torch.tensor(values)


def state(**changes: Any) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        text = json.dumps({**json.loads(bytes(tensor.numpy())), **changes})
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    return change


def text(words: str) -> Change:
    return lambda tensor: torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)


NAN, INF = float("nan"), float("inf")
STATE = ".weight.quant_state.bitsandbytes__nf4"
FAULTS: list[tuple[str, str, Change, str]] = [
    ("gptq", ".qzeros", gone, r"no tensor .*up_proj\.qzeros"),
    ("gptq", ".scales", gone, r"no tensor .*up_proj\.scales"),
    ("gptq", ".qzeros", shorter, r"qzeros has shape \(3, 12\); .* must be \(4, any\)"),
    ("gptq", ".qzeros", narrower, r"qzeros has 352 bits for 96 outputs"),
    ("gptq", ".qweight", narrower, r"qweight has shape \(16, 95\); .* must be \(any, 96\)"),
    ("gptq", ".qweight", shorter, r"g_idx has shape \(128,\); .* must be \(120,\)"),
    ("gptq", ".qweight", of_type(torch.int64), r"qweight is of type I64; .* must be int32"),
    ("gptq", ".scales", of_type(torch.int32), r"scales is of type I32; .* must be float32 or"),
    ("gptq", ".scales", first(NAN), r"scales holds a scale that is infinite or not a number"),
    ("gptq", ".scales", first(INF), r"scales holds a scale that is infinite or not a number"),
    ("gptq", ".g_idx", first(4), r"g_idx names a group .* must be from 0 to 3"),
    ("gptq", ".g_idx", first(-1), r"g_idx names a group .* must be from 0 to 3"),
    ("gptq", ".g_idx", shorter, r"g_idx has shape \(127,\); .* must be \(128,\)"),
    ("awq", ".qweight", narrower, r"scales has shape \(4, 96\); .* must be \(any, 88\)"),
    ("awq", ".qweight", shorter, r"scales has 4 groups; .* must be a divisor of 127 inputs"),
    ("awq", ".qzeros", shorter, r"qzeros has shape \(3, 12\); .* must be \(4, 12\)"),
    ("awq", ".scales", first(NAN), r"scales holds a scale"),
    ("packed-4", ".weight_shape", set_to(N, 10**12), r"weight_packed has 16 words for 1000000"),
    ("packed-4", ".weight_shape", set_to(N, 0), r"weight_shape says \(96, 0\)"),
    ("packed-4", ".weight_shape", set_to(N, -K), r"weight_shape says \(96, -128\)"),
    ("packed-4", ".weight_shape", set_to(K, N), r"says \(128, 96\); .* must be \(96, any\)"),
    ("packed-4", ".weight_shape", set_to(N), r"weight_shape has shape \(1,\)"),
    ("packed-4", ".weight_packed", narrower, r"weight_packed has 15 words for 128 inputs"),
    ("packed-4", ".weight_scale", narrower, r"weight_scale has 3 groups; .* a divisor of 128"),
    ("packed-4", ".weight_scale", shorter, r"weight_scale has shape \(95, 4\)"),
    ("packed-4", ".weight_scale", first(NAN), r"weight_scale holds a scale"),
    ("packed-zeros", ".weight_zero_point", shorter, r"weight_zero_point has shape \(11, 4\)"),
    ("packed-plain-zeros", ".weight_zero_point", shorter, r"weight_zero_point has shape"),
    ("packed-plain-zeros", ".weight_zero_point", first(8), r"holds a zero .* from -8 to 7"),
    ("packed-order", ".weight_g_idx", first(4), r"weight_g_idx names a group"),
    ("packed-order", ".weight_g_idx", first(-1), r"weight_g_idx names a group"),
    ("int8", ".weight_scale", shorter, r"weight_scale has shape \(95, 1\)"),
    ("int8", ".weight_scale", first(INF), r"weight_scale holds a scale"),
    ("int8-zeros", ".weight_zero_point", shorter, r"weight_zero_point has shape \(95, 1\)"),
    ("fp8-one", ".weight", of_type(torch.float8_e5m2), r"weight is of type F8_E5M2; .*e4m3fn"),
    ("fp8-one", ".weight", gone, r"no tensor .*up_proj\.weight"),
    ("fp8-one", ".weight_scale", first(NAN), r"weight_scale holds a scale"),
    ("fp8-row", ".weight_scale", shorter, r"weight_scale has shape \(95, 1\)"),
    ("fp8-inverse", ".weight_scale_inv", narrower, r"_inv has shape \(2, 3\); .* or \(2, 4\)"),
    ("nvfp4", ".weight_scale", narrower, r"weight_packed has shape \(96, 64\); .* \(96, 56\)"),
    ("nvfp4", ".weight_scale", first(NAN), r"weight_scale holds a scale"),
    ("nvfp4", ".weight_global_scale", first(0), r"weight_global_scale is 0; .* another number"),
    ("nvfp4", ".weight_global_scale", first(NAN), r"weight_global_scale holds a scale"),
    ("nvfp4-modelopt", ".weight_scale_2", gone, r"no tensor .*up_proj\.weight_scale_2"),
    ("mxfp4", ".weight_scales", first(255), r"weight_scales holds a scale that is not a number"),
    ("mxfp4", ".weight_scales", narrower, r"_blocks has shape \(96, 4, 16\); .* or \(96, 3, 16\)"),
    ("mxfp4", ".weight_blocks", of_type(torch.int8), r"_blocks is of type I8; .* must be uint8"),
    ("nf4", STATE, text("{"), "bitsandbytes__nf4 is not valid JSON"),
    ("nf4", STATE, text("[" * 9999), "bitsandbytes__nf4 is not valid JSON"),
    ("nf4", STATE, text("[]"), "bitsandbytes__nf4 must hold a JSON object"),
    ("nf4", STATE, state(shape=None), "has no .*shape"),
    (
        "nf4",
        STATE,
        state(shape=[N, 1 << 40]),
        "shape = 1099511627776; it must be a number from 1 to",
    ),
    ("nf4", STATE, state(shape=[N, K + 2]), r"weight has shape \(6144, 1\); .* \(6240, 1\)"),
    ("nf4", STATE, state(blocksize=0), "blocksize = 0"),
    ("nf4", STATE, state(blocksize=True), "blocksize = True"),
    ("nf4", STATE, state(blocksize=32), r"absmax has shape \(192,\); .* must be \(384,\)"),
    ("nf4", ".weight.absmax", first(NAN), r"weight\.absmax holds a scale"),
    ("nf4", ".weight.quant_map", shorter, r"quant_map has shape \(15,\); .* must be \(16,\)"),
    ("nf4-nested", STATE, state(nested_offset="x"), "nested_offset = x; .* a number"),
    (
        "nf4-nested",
        STATE,
        state(nested_dtype="int8"),
        "nested_dtype = 'int8' is not supported; supported:",
    ),
    ("nf4-nested", ".weight.nested_absmax", first(NAN), r"weight\.absmax holds a scale"),
    ("nf4-nested", ".weight.nested_quant_map", shorter, r"nested_quant_map has shape \(255,\)"),
    ("bnb-int8", ".SCB", shorter, r"SCB has shape \(95,\)"),
    ("bnb-int8", ".weight_format", first(2), r"weight_format is 2: .* only rows"),
]


@pytest.mark.parametrize(("form", "part", "change", "words"), FAULTS)
def test_a_damaged_tensor_is_named(
    tmp_path: Path, form: str, part: str, change: Change, words: str
) -> None:
    def changed(parts: Parts) -> None:
        found = change(parts.pop(part))
        if found is not None:
            parts[part] = found

    with pytest.raises(ModelLoadError, match=words) as caught:
        read_changed(tmp_path, form, changed)
    assert NAME in str(caught.value)


def test_groups_that_do_not_divide_a_row(tmp_path: Path) -> None:
    def changed(parts: Parts) -> None:
        parts[".scales"], parts[".qzeros"] = parts[".scales"][:3], parts[".qzeros"][:3]

    with pytest.raises(ModelLoadError, match=r"scales has 3 groups; .* a divisor of 128 inputs"):
        read_changed(tmp_path, "gptq-plain-order", changed)


TYPES = [torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8]
TYPES += [torch.float8_e4m3fn, torch.bool]


@given(
    form=st.sampled_from(list(FORMS)),
    which=st.integers(0, 9),
    kind=st.sampled_from([None, *TYPES]),
    shape=st.none() | st.lists(st.sampled_from([0, 1, 2, 3, 4, 16, 96, 128]), max_size=3),
    seed=st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_whatever_lies_there_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    which: int,
    kind: torch.dtype | None,
    shape: list[int] | None,
    seed: int,
) -> None:
    def changed(parts: Parts) -> None:
        part = list(parts)[which % len(parts)]
        size = parts[part].shape if shape is None else shape
        noise = torch.randint(-300, 300, tuple(size), generator=torch.Generator().manual_seed(seed))
        parts[part] = noise.to(parts[part].dtype if kind is None else kind)

    with suppress(ModelLoadError):
        read_changed(tmp_path_factory.mktemp("x"), form, changed)
