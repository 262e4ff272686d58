"""Whole models with quantised linears: the same logits as with the weights that those stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer
from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline_lab.train.model_files import load_model
from tests.arrays import same
from tests.loading.quantised_forms import FORMS, Stored
from tests.models.reference import Driver, edit, save_model

TOKENS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES = {"vocab_size": 320, "intermediate_size": 128}  # whole words of codes, whole groups
needs_native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
FEW = ["gptq-act", "awq", "packed-zeros", "fp8-inverse", "nvfp4-modelopt", "mxfp4", "nf4-nested"]


def save_quantised(
    folder: Path,
    form: str,
    is_quantised: Callable[[str], bool] = lambda name: True,
    family: str = "qwen2",
) -> Path:
    """A tiny model with quantised linears, the head among them, and beside it the same in floats.

    Returns:
        the folder of floats.
    """
    plain_folder = folder.with_name(folder.name + "-plain")
    save_model(family, plain_folder, **SIZES)
    tensors = load_file(plain_folder / "model.safetensors")
    stored, rng = Stored(), np.random.default_rng(7)
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if linear.endswith(("_proj", "lm_head")) and name != linear and is_quantised(linear):
            stored.add(linear, FORMS[form], rng, *tensor.shape)
    folder.mkdir()
    rest = {name: tensor for name, tensor in tensors.items() if name not in stored.plain}
    save_file({**rest, **stored.tensors}, folder / "model.safetensors")
    save_file({**tensors, **stored.plain}, plain_folder / "model.safetensors")
    (folder / "config.json").write_text((plain_folder / "config.json").read_text())
    edit(folder / "config.json", quantization_config=FORMS[form].config)
    return plain_folder


def logits(source: Path | Checkpoint, ops: Any = None) -> torch.Tensor:
    checkpoint = load_checkpoint(source) if isinstance(source, Path) else source
    return Driver(checkpoint, max_len=64, ops=ops).chunk(TOKENS)


@pytest.mark.parametrize("form", FORMS)
def test_the_logits_are_those_of_the_floats(tmp_path: Path, form: str) -> None:
    plain = save_quantised(tmp_path / "tiny", form)
    assert same(logits(tmp_path / "tiny"), logits(plain))
    quantised, floats = (load_checkpoint(folder) for folder in (tmp_path / "tiny", plain))
    assert set(quantised.tensors) == set(floats.tensors)
    assert quantised.config == floats.config
    assert quantised.hf_config == floats.hf_config


@needs_native
@pytest.mark.parametrize("form", FEW)
def test_in_8_bits(tmp_path: Path, form: str) -> None:
    plain = save_quantised(tmp_path / "tiny", form)
    assert same(logits(tmp_path / "tiny", CpuOps("int8")), logits(plain, CpuOps("int8")))


@needs_native
@pytest.mark.parametrize("form", FEW)
def test_a_quantised_model_can_be_converted(tmp_path: Path, form: str) -> None:
    save_quantised(tmp_path / "tiny", form)
    source = load_checkpoint(tmp_path / "tiny")
    write_packed(source, tmp_path / "packed", Packer("int8"))
    packed = logits(tmp_path / "packed", CpuOps("int8"))
    assert same(packed, logits(source, CpuOps("int8")))


@pytest.mark.parametrize("form", FEW)
def test_modules_that_were_not_converted(tmp_path: Path, form: str) -> None:
    def is_quantised(linear: str) -> bool:
        return "layers.0" in linear and "down_proj" not in linear

    plain = save_quantised(tmp_path / "tiny", form, is_quantised)
    assert same(logits(tmp_path / "tiny"), logits(plain))


def test_in_memory_and_by_layers(tmp_path: Path) -> None:
    plain = save_quantised(tmp_path / "tiny", "gptq-act")
    checkpoint = load_checkpoint(tmp_path / "tiny", load_format="memory")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    first = load_checkpoint(plain).first_layers(1)
    assert same(logits(checkpoint.first_layers(1)), logits(first))


def test_linears_that_are_stored_fused(tmp_path: Path) -> None:
    plain = save_quantised(tmp_path / "tiny", "gptq", family="phi3")
    assert same(logits(tmp_path / "tiny"), logits(plain))


def change(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{n.replace("__", "."): t for n, t in tensors.items()}}, path)


def test_biases_of_zeros_are_passed_over(tmp_path: Path) -> None:
    """Some tools write one for every linear, whether the model has it or not."""
    plain = save_quantised(tmp_path / "tiny", "gptq")
    bias = {"model__layers__0__mlp__up_proj__bias": torch.zeros(128)}
    change(tmp_path / "tiny", **bias)
    assert same(logits(tmp_path / "tiny"), logits(plain))
    change(tmp_path / "tiny", **{name: tensor + 1 for name, tensor in bias.items()})
    with pytest.raises(UnsupportedModelError, match=r"no use for 1 .*up_proj\.bias"):
        logits(tmp_path / "tiny")


def test_what_is_left_of_a_quantised_checkpoint_is_named(tmp_path: Path) -> None:
    save_quantised(tmp_path / "tiny", "nvfp4-modelopt")
    change(tmp_path / "tiny", model__layers__1__mlp__up_proj__pre_quant_scale=torch.ones(64))
    with pytest.raises(UnsupportedModelError, match=r"no use for 1 .*up_proj\.pre_quant_scale"):
        logits(tmp_path / "tiny")


def test_parts_that_are_not_run_may_be_quantised_in_any_way(tmp_path: Path) -> None:
    plain = save_quantised(tmp_path / "tiny", "packed-4")
    change(tmp_path / "tiny", vision_tower__x__weight_packed=torch.ones(2, 3, 4))
    assert same(logits(tmp_path / "tiny"), logits(plain))


def test_a_weight_that_is_plain_and_quantised(tmp_path: Path) -> None:
    save_quantised(tmp_path / "tiny", "gptq")
    change(tmp_path / "tiny", model__layers__1__mlp__up_proj__weight=torch.ones(128, 64))
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight appears twice"):
        load_checkpoint(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("form", "file", "said"),
    [
        ("gptq-act", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
        (
            "fp8-modelopt",
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        ),
    ],
)
def test_a_file_that_tells_what_the_configuration_does_not(
    tmp_path: Path, form: str, file: str, said: Mapping[str, Any]
) -> None:
    """The first checkpoints of a method say nothing in config.json."""
    plain = save_quantised(tmp_path / "tiny", form)
    edit(tmp_path / "tiny" / "config.json", quantization_config=None)
    with pytest.raises(ModelLoadError):
        logits(tmp_path / "tiny")
    (tmp_path / "tiny" / file).write_text(json.dumps(said))
    assert same(logits(tmp_path / "tiny"), logits(plain))


@pytest.mark.parametrize("key", ["compression_config", "quantization_config"])
@pytest.mark.parametrize("part", ["", "text_config"])
def test_where_a_configuration_may_say_it(tmp_path: Path, key: str, part: str) -> None:
    plain = save_quantised(tmp_path / "tiny", "packed-4", family="llama")
    path = tmp_path / "tiny" / "config.json"
    raw = json.loads(path.read_text())
    config = raw.pop("quantization_config")
    if part:
        raw = {"model_type": "other", "text_config": raw}
    (raw[part] if part else raw)[key] = config
    path.write_text(json.dumps(raw))
    assert same(logits(tmp_path / "tiny"), logits(plain))


def test_quantised_weights_are_not_trained(tmp_path: Path) -> None:
    save_quantised(tmp_path / "tiny", "gptq")
    with pytest.raises(UnsupportedModelError, match=r"quantised \(gptq\)"):
        load_model(tmp_path / "tiny")


def test_a_shape_that_the_configuration_does_not_say(tmp_path: Path) -> None:
    save_quantised(tmp_path / "tiny", "awq")
    edit(tmp_path / "tiny" / "config.json", intermediate_size=120)
    checkpoint = load_checkpoint(tmp_path / "tiny")
    with pytest.raises(ModelLoadError, match=r"weight has shape \(128, 64\); .* \(120, 64\)"):
        Decoder(checkpoint.config, checkpoint.tensors, ReferenceOps("float32"), 32)
