"""Latent attention: one key per token, how checkpoints store its matrices, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.memory_needs import bytes_per_block
from paceline.core.errors import PacelineError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.threads import set_num_threads
from paceline.request.span import DraftTree
from tests.arrays import same
from tests.levels import SOME
from tests.loading.gguf_writing import convert
from tests.models.reference import VOCAB, Driver, edit, save_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
FAMILIES = ("deepseek-v2-lite", "deepseek-v3")  # a latent of 20 numbers, and of 32
KV = ("float32", "float16", "bfloat16", "int8")
backends = pytest.mark.parametrize("backend", KINDS)
# Blocks of quantised files are of 32 inputs.
WIDE = {"hidden_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32}
WIDE |= {"v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}


def driver(path: Path, backend: str, dtype: str = "float32", kv: str = "float32") -> Driver:
    checkpoint = load_checkpoint(path, with_tokenizer=False)
    return Driver(checkpoint, max_len=64, ops=KINDS[backend](dtype), kv_dtype=kv)


@backends
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_trees_and_threads_do_not_change_a_bit(
    tmp_path: Path, family: str, kv: str, backend: str
) -> None:
    save_model(family, tmp_path)
    whole = driver(tmp_path, backend, kv=kv)
    truth = whole.chunk(TOKENS)
    draft = DraftTree([5, TOKENS[21], 7, TOKENS[22]], [-1, -1, 0, 1], [1.0] * 4, ["x"] * 4)
    for count, cuts in ((1, [0, 1, 17, 20]), (2, [0, 5, 6, 20])):
        set_num_threads(count)
        parts = whole.again()
        chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
        chunks.append(parts.run(draft, TOKENS[20], path=[0, 2, 4])[[0, 2, 4]])
        chunks.append(parts.chunk(TOKENS[23:]))
        assert same(torch.cat(chunks), truth)


@pytest.mark.parametrize("level", SOME)
@pytest.mark.parametrize("kv", KV)
def test_the_kernels_hold_keys_as_the_reference_does(tmp_path: Path, kv: str, level: str) -> None:
    save_model("deepseek-v3", tmp_path)
    want = driver(tmp_path, "reference", kv=kv).chunk(TOKENS)
    before = native_module().isa()
    native_module().set_isa(level)
    try:
        found = driver(tmp_path, "native", kv=kv).chunk(TOKENS)
    finally:
        native_module().set_isa(before)
    assert (found - want).abs().max() < (1e-4 if kv == "float32" else 0.05) * want.std()


def test_a_token_takes_its_latent_and_its_rotated_dimensions(tmp_path: Path) -> None:
    save_model("deepseek-v3", tmp_path)
    config = load_checkpoint(tmp_path, with_tokenizer=False).config
    assert bytes_per_block(config, "float32") == 2 * 16 * (32 + 16) * 4  # layers, tokens


@backends
def test_files_with_the_heads_in_one_matrix(tmp_path: Path, backend: str) -> None:
    """As converters wrote them at first."""
    convert("deepseek-v3", tmp_path / "stacked.gguf")
    convert("deepseek-v3", tmp_path / "whole.gguf", stacks_heads=False)
    found, want = (
        driver(tmp_path / f"{name}.gguf", backend).chunk(TOKENS) for name in ("whole", "stacked")
    )
    assert same(found, want)


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize("stacks", [False, True])
def test_heads_are_computed_with_as_they_are_stored(tmp_path: Path, stacks: bool) -> None:
    path = tmp_path / "m.gguf"
    convert("deepseek-v3", path, qtype="Q4_0", changes=WIDE, stacks_heads=stacks)
    tensors = load_checkpoint(path, with_tokenizer=False).tensors
    name = "model.layers.1.self_attn.{}_b_proj.2.weight"
    found = tensors.as_stored(name.format("v"))  # type: ignore[attr-defined]
    assert found.format == "Q4_0"
    assert (tensors.as_stored(name.format("k")) is not None) == stacks  # type: ignore[attr-defined]
    native, reference = (
        driver(path, backend, "file").chunk(TOKENS) for backend in ("native", "reference")
    )
    difference = (native - reference).abs() / reference.std()
    assert difference.median() < 0.02
    assert difference.max() < 0.3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ({"kv_lora_rank": 16}, "shape"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15"),
        ({"qk_nope_head_dim": 16}, "rows"),
        ({"v_head_dim": None}, "no v_head_dim"),
        ({"q_lora_rank": None}, "no tensor .*q_proj"),
        ({"attention_bias": True}, "biases"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "shape|rows"),
    ],
)
def test_configurations_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    save_model("deepseek-v3", tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(PacelineError, match=match):
        driver(tmp_path, "reference")


def test_a_matrix_of_heads_that_is_missing(tmp_path: Path) -> None:
    save_model("deepseek-v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.kv_b_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PacelineError, match=r"no tensor .*k_b_proj\.0"):
        driver(tmp_path, "reference")


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
def test_latents_that_the_kernels_do_not_take(tmp_path: Path) -> None:
    save_model("deepseek-v3", tmp_path, kv_lora_rank=1024)
    with pytest.raises(UnsupportedModelError, match=r"1040 dimensions .*--backend reference"):
        driver(tmp_path, "native")
    assert torch.isfinite(driver(tmp_path, "reference").chunk(TOKENS)).all()
