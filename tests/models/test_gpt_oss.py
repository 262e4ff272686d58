"""gpt-oss as it is published: experts of 4-bit floats in stacks, sinks, and what is refused."""

from __future__ import annotations

import copy
import json
import math
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
from paceline.core.errors import ModelLoadError, TrainingError, UnsupportedModelError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.quantised.methods import split_quantisation
from paceline.models.families.config_json import config_from_hf
from paceline.models.layer_sizes import Experts
from paceline_lab.train.model_files import load_model
from tests.arrays import assert_close, same
from tests.loading.quantised_packing import mxfp4
from tests.models.reference import VOCAB, Driver, edit, save_model, saved_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
backends = pytest.mark.parametrize("backend", KINDS)
native_only = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


# What the 20B model's config.json says, in the style of its time.
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def logits(folder: Path, dtype: str, backend: str) -> torch.Tensor:
    return Driver.of(folder, max_len=64, ops=KINDS[backend](dtype)).chunk(TOKENS)


def save_quantised(folder: Path) -> Path:
    """A folder with stacks of 4-bit experts; beside it, in ``plain``, the same weights as floats,
    which is returned."""
    plain, rng = folder / "plain", np.random.default_rng(7)
    save_model("gpt-oss", plain)
    floats = load_file(plain / "model.safetensors")
    packed = dict(floats)
    for name in [each for each in floats if each.endswith(("gate_up_proj", "down_proj"))]:
        number, k, n = floats[name].shape
        parts, weights = zip(
            *(mxfp4(rng, n, k, codes="_blocks", scale="_scales") for _ in range(number)),
            strict=True,
        )
        del packed[name]
        for end in ("_blocks", "_scales"):
            packed[name + end] = torch.stack([part[end] for part in parts])
        stack = torch.from_numpy(np.stack(weights))
        floats[name] = stack.transpose(1, 2).contiguous()
    save_file(floats, plain / "model.safetensors")
    save_file(packed, folder / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return plain


def test_the_published_configuration(tmp_path: Path) -> None:
    raw, quantisation = split_quantisation(PUBLISHED, tmp_path)
    config = config_from_hf(raw)
    assert quantisation == PUBLISHED["quantization_config"]
    assert config.mlp.experts == Experts(number=32, per_token=4, width=2880, biases=True)
    assert (config.attention.qkv_bias, config.attention.o_bias, config.attention.sinks) == (
        True,
        True,
        True,
    )
    assert [config.attention.is_sliding(index) for index in range(4)] == [True, False, True, False]
    assert (config.attention.sliding_window, config.max_position) == (128, 131072)
    assert (
        config.positions.rope.theta,
        config.positions.rope.scaling,
        config.positions.rope.factor,
    ) == (150000, "yarn", 32)
    assert dict(config.positions.rope.params)["truncate"] == 0
    assert 20.5e9 < config.num_weights < 21e9
    without = {key: value for key, value in raw.items() if key != "layer_types"}
    assert config_from_hf(without) == config


@backends
def test_packed_experts_stand_for_their_floats(tmp_path: Path, backend: str) -> None:
    plain = save_quantised(tmp_path)
    found, truth = (logits(folder, "float32", backend) for folder in (tmp_path, plain))
    assert truth.std() > 0.05
    assert same(found, truth)


@native_only
def test_experts_are_computed_with_as_they_are_stored(tmp_path: Path) -> None:
    plain = save_quantised(tmp_path)
    stored = load_checkpoint(tmp_path, with_tokenizer=False).tensors.as_stored(UP)  # type: ignore[attr-defined]
    assert stored.format == "MXFP4"
    native, reference = (logits(tmp_path, "file", backend) for backend in ("native", "reference"))
    difference = (native - reference).abs() / reference.std()
    assert difference.median() < 0.02
    assert difference.max() < 0.3
    # Inputs are rounded to 8 bits, the weights are not.
    difference = (native - logits(plain, "float32", "reference")).abs() / reference.std()
    assert difference.median() < 0.1


@native_only
def test_a_converted_folder_keeps_the_bits(tmp_path: Path) -> None:
    save_quantised(tmp_path / "model")
    source = load_checkpoint(tmp_path / "model", with_tokenizer=False)
    write_packed(source, tmp_path / "packed", Packer("file"))
    found, truth = (logits(tmp_path / name, "file", "native") for name in ("packed", "model"))
    assert same(found, truth)


@backends
def test_a_sink_takes_its_share(tmp_path: Path, backend: str) -> None:
    """Sinks of minus infinity take nothing; very large ones leave nothing to attend to."""
    model = copy.deepcopy(saved_model("gpt-oss", tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    sinks = [name for name in tensors if name.endswith("sinks")]
    assert len(sinks) == 3
    outputs = {}
    for value in (-math.inf, 60.0):
        changed = {**tensors, **{name: torch.full((4,), value) for name in sinks}}
        save_file(changed, tmp_path / "model.safetensors")
        outputs[value] = logits(tmp_path, "float32", backend)
        model.load_state_dict(changed)
        with torch.no_grad():
            assert_close(
                outputs[value], model(torch.tensor([TOKENS])).logits[0], atol=2e-4, rtol=1e-4
            )
    assert not torch.allclose(outputs[-math.inf], outputs[60.0], atol=0.1)


@native_only
@pytest.mark.parametrize(("kv_dtype", "most"), [("float32", 1e-4), ("float16", 2e-3)])
def test_sinks_count_once_over_many_chunks_of_keys(
    tmp_path: Path, kv_dtype: str, most: float
) -> None:
    """The native kernels merge what 512 keys at a time give."""
    model = saved_model("gpt-oss", tmp_path, max_position_embeddings=2048, sliding_window=600)
    tokens = torch.randint(3, VOCAB, (1100,), generator=torch.Generator().manual_seed(5)).tolist()
    checkpoint = load_checkpoint(tmp_path, with_tokenizer=False)
    driver = Driver(checkpoint, max_len=2048, ops=CpuOps("float32"), kv_dtype=kv_dtype, blocks=80)
    found = driver.chunk(tokens)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    difference = (found - want).abs() / want.std()
    assert difference.median() < most


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"swiglu_limit": 5.0}, r"swiglu_limit = 5.0; it must be 7.0"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha = 1.0; it must be 1.702"),
        ({"num_local_experts": 5}, "a stack of 5 matrices"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "shape"),
    ],
)
def test_configurations_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    save_model("gpt-oss", tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=match):
        logits(tmp_path, "float32", "reference")


def test_scales_that_do_not_fit_their_codes(tmp_path: Path) -> None:
    save_quantised(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(
        {**tensors, name: tensors[name][:, :, :2].contiguous()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelLoadError, match="_blocks has shape"):
        load_checkpoint(tmp_path, with_tokenizer=False)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no tensor .*down_proj_scales"):
        load_checkpoint(tmp_path, with_tokenizer=False)


def test_training_refuses_it(tmp_path: Path) -> None:
    save_model("gpt-oss", tmp_path)
    with pytest.raises(TrainingError, match="gpt_oss, which cannot be trained"):
        load_model(tmp_path)
