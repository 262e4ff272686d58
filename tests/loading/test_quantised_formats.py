"""Each quantised format, unpacked: the very floats that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import ModelLoadError
from paceline.loading.quantised import methods as quantised_tensors
from paceline.loading.quantised.methods import QuantisedTensors, schemes_of
from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.models.backend import WeightPart
from paceline.tensors.stored import StoredRows
from tests.arrays import same
from tests.loading.quantised_forms import FORMS, Form, Stored
from tests.loading.quantised_packing import gptq

NAME = "model.layers.0.mlp.up_proj"
WEIGHT = NAME + ".weight"
N, K = 96, 128


def opened(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> QuantisedTensors:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    return QuantisedTensors(SafetensorsFolder(folder), schemes_of(config))


def made(folder: Path, form: Form, n: int = N, k: int = K) -> tuple[QuantisedTensors, torch.Tensor]:
    stored = Stored()
    stored.add(NAME, form, np.random.default_rng(5), n, k)
    extra = {"model.norm.weight": torch.ones(3)}
    return opened(folder, {**stored.tensors, **extra}, form.config), stored.plain[WEIGHT]


@pytest.mark.parametrize("name", FORMS)
def test_a_weight_is_what_its_format_says(tmp_path: Path, name: str) -> None:
    tensors, plain = made(tmp_path, FORMS[name])
    assert set(tensors) == {WEIGHT, "model.norm.weight"}
    assert len(tensors) == 2
    assert tensors[WEIGHT].dtype == np.float32
    assert same(tensors[WEIGHT], plain)
    assert tensors.shape_of(WEIGHT) == (N, K)
    assert tensors.type_of(WEIGHT).startswith(FORMS[name].kind)
    assert same(tensors["model.norm.weight"], torch.ones(3))
    assert tensors.type_of("model.norm.weight") == "F32"
    tensors.release(WEIGHT)
    assert same(tensors[WEIGHT], plain)


@pytest.mark.parametrize("name", FORMS)
def test_some_rows(tmp_path: Path, name: str) -> None:
    tensors, plain = made(tmp_path, FORMS[name])
    for first, last in [(0, 1), (3, 21), (90, 96), (90, 100), (40, 40), (97, 99)]:
        assert same(tensors.rows(WEIGHT, first, last), plain[first:last])
    assert same(tensors.rows("model.norm.weight", 1, 2), torch.ones(1))


@pytest.mark.parametrize("name", FORMS)
def test_a_weight_is_unpacked_in_slices(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_tensors, "AT_ONCE", 7 * K)
    tensors, plain = made(tmp_path, FORMS[name])
    assert same(tensors[WEIGHT], plain)


FLOATS_ALONE = {"fp8-block", "fp8-group", "fp8-inverse", "nf4-nested", "fp4"}
FLOATS_ALONE |= {"nf4", "nf4-as-bfloat16", "nf4-as-float32", "nf4-by-columns", "nf4-nested-rounded"}


@pytest.mark.parametrize("name", FORMS)
def test_blocks_stand_for_the_weight(tmp_path: Path, name: str) -> None:
    """Wherever the integers fit a block format that the linears compute with."""
    tensors, plain = made(tmp_path, FORMS[name])
    blocks = tensors.as_stored(WEIGHT)
    assert (blocks is None) == (name in FLOATS_ALONE)
    assert tensors.as_stored("model.norm.weight") is not None
    if blocks is not None:
        got = unblocked(blocks, K)
        wide = name == "int8-zeros"  # its scales have bits that the floats have no room for
        assert torch.allclose(got, plain, rtol=0.0, atol=1e-6) if wide else same(got, plain)


def unblocked(blocks: StoredRows, k: int) -> torch.Tensor:
    form, rows, order = blocks
    part = WeightPart(len(rows), lambda first, last: rows[first:last], form, order)
    return ReferenceOps("file").pack_embedding(part, k)


@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 128, -1]),
    groups=st.integers(1, 3),
    words=st.integers(1, 5),
    ordered=st.booleans(),
    sym=st.booleans(),
    version=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_gptq(
    tmp_path_factory: pytest.TempPathFactory,
    bits: int,
    group: int,
    groups: int,
    words: int,
    ordered: bool,
    sym: bool,
    version: int,
    seed: int,
) -> None:
    n, k = words * 32 // bits, (32 if group < 0 else group) * groups
    options = {"bits": bits, "ordered": ordered, "sym": sym, "version": version}
    options["group"] = k if group < 0 else group
    config = {"quant_method": "gptq", "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    form = Form(config, lambda rng, n, k: gptq(rng, n, k, **options))
    stored = Stored()
    stored.add(NAME, form, np.random.default_rng(seed), n, k)
    tensors = opened(tmp_path_factory.mktemp("gptq"), stored.tensors, config)
    assert same(tensors[WEIGHT], stored.plain[WEIGHT])
    blocks = tensors.as_stored(WEIGHT)
    assert blocks is not None
    assert same(unblocked(blocks, k), stored.plain[WEIGHT])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_gptq_of_either_version(tmp_path: Path, bits: int, version: int) -> None:
    """There are checkpoints that say version 1 and whose zeros are of version 2."""
    config = {"quant_method": "gptq", "sym": True, "checkpoint_format": "gptq"}
    form = Form(config, lambda rng, n, k: gptq(rng, n, k, bits=bits, sym=True, version=version))
    tensors, plain = made(tmp_path, form)
    assert same(tensors[WEIGHT], plain)


def test_groups_of_different_sizes_are_floats_alone(tmp_path: Path) -> None:
    """A row that is no whole number of groups, as some programs quantise it."""
    rng = np.random.default_rng(1)
    parts, _ = gptq(rng, 8, 96)  # 3 groups of 32
    index = torch.tensor([0] * 40 + [1] * 40 + [2] * 16, dtype=torch.int32)
    tensors = opened(
        tmp_path, {NAME + e: p.contiguous() for e, p in parts.items()}, FORMS["gptq"].config
    )
    even = tensors[WEIGHT]
    parts[".g_idx"] = index
    other = opened(
        tmp_path / "x", {NAME + e: p.contiguous() for e, p in parts.items()}, FORMS["gptq"].config
    )
    assert other.as_stored(WEIGHT) is None
    assert same(other[WEIGHT][:, :32], even[:, :32])  # of the first group either way
    assert not same(other[WEIGHT], even)


def test_a_g_idx_that_is_not_in_use(tmp_path: Path) -> None:
    form = FORMS["packed-4"]
    parts, weights = form.pack(np.random.default_rng(0), N, K)
    parts[".weight_g_idx"] = torch.full((K,), -1, dtype=torch.int32)
    tensors = opened(tmp_path, {NAME + end: part for end, part in parts.items()}, form.config)
    assert same(tensors[WEIGHT], torch.from_numpy(weights))


def test_scales_that_are_exponents(tmp_path: Path) -> None:
    """Bytes of e8m0, as a type of its own."""
    form = FORMS["fp8-inverse"]
    parts, _ = form.pack(np.random.default_rng(0), N, K)
    exponent = torch.randint(100, 130, parts[".weight_scale_inv"].shape, dtype=torch.uint8)
    value = parts[".weight"].float()
    parts[".weight_scale_inv"] = exponent.view(torch.float8_e8m0fnu)
    tensors = opened(tmp_path, {NAME + end: part for end, part in parts.items()}, form.config)
    scale = torch.exp2(exponent.float() - 127).repeat_interleave(48, 0).repeat_interleave(40, 1)
    assert same(tensors[WEIGHT], value * scale[:N, :K])


def test_inputs_that_do_not_fill_a_word(tmp_path: Path) -> None:
    tensors, plain = made(tmp_path, FORMS["packed-row"], n=5, k=13)
    assert same(tensors[WEIGHT], plain)


def test_rows_of_an_odd_number_of_codes(tmp_path: Path) -> None:
    tensors, plain = made(tmp_path, FORMS["nf4"], n=6, k=37)
    assert same(tensors[WEIGHT], plain)
    assert same(tensors.rows(WEIGHT, 1, 4), plain[1:4])


def test_formats_side_by_side(tmp_path: Path) -> None:
    """Each linear is what its own tensors make of it, whatever a pattern may say of its name."""
    rng, stored = np.random.default_rng(2), Stored()
    config = FORMS["packed-4"].config
    for name, form in FORMS.items():
        is_alike = form.config.get("quant_method") == "compressed-tensors"
        if is_alike and name not in (
            "fp8-block",
            "fp8-group",
        ):  # which need the size of their blocks
            stored.add(f"m.{name}", form, rng, N, K)
    tensors = opened(tmp_path, stored.tensors, {**config, "format": "mixed-precision"})
    assert len(stored.plain) > 10
    assert set(tensors) == set(stored.plain)
    assert all(same(tensors[name], plain) for name, plain in stored.plain.items())


def test_scales_of_activations_are_passed_over(tmp_path: Path) -> None:
    form, stored = FORMS["fp8-one"], Stored()
    stored.add(NAME, form, np.random.default_rng(0), N, K)
    ends = ("input_scale", "input_zero_point", "output_scale", "input_global_scale", "k_scale")
    extra = {f"{NAME}.{end}": torch.ones(1) for end in ends}
    other = {f"{NAME}.pre_quant_scale": torch.ones(1)}
    tensors = opened(tmp_path, {**stored.tensors, **extra, **other}, form.config)
    assert set(tensors) == {WEIGHT, f"{NAME}.pre_quant_scale"}


def test_some_of_the_tensors(tmp_path: Path) -> None:
    tensors, plain = made(tmp_path, FORMS["gptq"])
    assert WEIGHT in tensors
    few = tensors.only([WEIGHT])
    assert list(few) == [WEIGHT]
    assert same(few[WEIGHT], plain)
    for absent in ("model.norm.weight", NAME + ".qweight"):
        assert absent not in few
        with pytest.raises(ModelLoadError, match=f"no tensor {absent}"):
            few[absent]
