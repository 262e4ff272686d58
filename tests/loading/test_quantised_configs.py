"""What a configuration may say of quantised weights: refused by name, or passed over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from tests.arrays import same
from tests.loading.test_quantised_checkpoints import change, logits
from tests.models.reference import edit, save_model


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, r"'hqq', .* supported: gptq, awq, compressed-tensors, fp8, "),
        ({"quant_method": ["gptq"]}, "is quantised by .*gptq.* not supported"),
        ({"bits": 4}, "is quantised by 'unknown'"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "the GPTQ format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv' with 4 bits .* 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "with 8 bits"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "the modelopt algorithm 'W4A8_AWQ' is not .* FP8, NVFP4",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "the compressed-tensors format 'marlin-24' is not .* pack-quantized",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"format": "mxfp6-pack-quantized"}},
            },
            "'mxfp6-pack-quantized'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "x"}},
            "checkpoints with compressed sparsity are not supported; use another form of the model",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": 1}}},
            "checkpoints with transformed activations are not",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"block_structure": [128, 128]}},
                    "b": {"weights": {"block_structure": "1x64"}},
                },
            },
            r"several sizes .*\(1, 64\), \(128, 128\)",
        ),
    ],
)
def test_what_is_not_supported(tmp_path: Path, config: Mapping[str, Any], words: str) -> None:
    save_model("llama", tmp_path)
    edit(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(UnsupportedModelError, match=words):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("gptq", "quantization_config must be an object"),
        ([1], "quantization_config must be an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"= \[128\]; it must be two whole"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "must be two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [1.5, 2]}, "must be two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": {"a": 1}}, "must be two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [10**30, 1]}, "must be two whole numbers"),
    ],
)
def test_damaged_configurations(tmp_path: Path, config: object, words: str) -> None:
    save_model("llama", tmp_path)
    edit(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(ModelLoadError, match=words):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "config_groups": [1], "sparsity_config": 3},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
)
def test_plain_weights_stay_plain(tmp_path: Path, config: object) -> None:
    save_model("llama", tmp_path)
    plain = logits(tmp_path)
    edit(tmp_path / "config.json", quantization_config=config)
    change(tmp_path, model__layers__0__self_attn__k_scale=torch.ones(1))
    assert same(logits(tmp_path), plain)
