"""GGUF files: every architecture against transformers, and every type that can be unpacked."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.core.errors import UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.gguf.container import read_container
from paceline.models.rope import rope_tables
from tests.arrays import assert_close, same
from tests.loading.gguf_writing import CASES, IDS, convert, write_gguf
from tests.models.reference import LLAMA3, Driver, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def want(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", CASES)
def test_architectures(tmp_path: Path, family: str) -> None:
    model = convert(family, tmp_path / "model.gguf")
    driver = Driver.of(tmp_path / "model.gguf", max_len=64)
    assert_close(driver.chunk(TOKENS), want(model, TOKENS), atol=1e-4, rtol=1e-4)
    config = driver.checkpoint.config
    assert driver.checkpoint.name == "model.gguf"
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.dtype == "float32"


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
def test_tensors_come_back_exactly(tmp_path: Path, load_format: str) -> None:
    model = convert("llama-biased", tmp_path / "model.gguf")
    tensors = load_checkpoint(
        tmp_path / "model.gguf", load_format=load_format, with_tokenizer=False
    ).tensors
    state = model.state_dict()
    assert set(tensors) == set(state)
    for name, expected in state.items():
        assert same(tensors[name], expected), name


def test_llama3_factors_are_a_tensor(tmp_path: Path) -> None:
    """Converters store the divisors of the Llama 3 rule, not its parameters."""
    model = make_model("llama3")
    base = LLAMA3["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
    turns = LLAMA3["original_max_position_embeddings"] * base / (2 * math.pi)
    keep = np.clip((turns - 1.0) / 3.0, 0, 1)
    divisors = 1 / (keep + (1 - keep) / LLAMA3["factor"])
    path = write_gguf(
        tmp_path / "model.gguf",
        model.config,
        model.state_dict(),
        metadata=IDS,
        extra_tensors={"rope_freqs.weight": divisors},
    )
    got = Driver.of(path, max_len=64).chunk(TOKENS)
    assert_close(got, want(model, TOKENS), atol=1e-4, rtol=1e-4)


def test_parts_that_see_and_hear_are_passed_over(tmp_path: Path) -> None:
    names = ("v.blk.0.attn_k.weight", "v.patch_embd.bias", "mm.0.weight", "a.conv1d.1.weight")
    others = {name: np.ones((2, 2)) for name in names}
    model = convert("gemma3", tmp_path / "model.gguf", extra_tensors=others)
    got = Driver.of(tmp_path / "model.gguf", max_len=64).chunk(TOKENS)
    assert_close(got, want(model, TOKENS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_len", [64, 128])
def test_phi_long_factors_are_tensors(tmp_path: Path, max_len: int) -> None:
    model = make_model("phi3-long")
    rope = model.config.rope_parameters
    path = write_gguf(
        tmp_path / "model.gguf",
        model.config,
        model.state_dict(),
        metadata={
            "ARCH.rope.scaling.original_context_length": 64,
            "ARCH.rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(64)),
        },
        extra_tensors={
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"])
            for kind in ("short", "long")
        },
    )
    driver = Driver.of(path, max_len=max_len)
    text = (TOKENS * 2)[: max_len // 2 + 10]
    assert_close(driver.chunk(text), want(model, text), atol=1e-4, rtol=1e-4)
    assert rope_tables(driver.checkpoint.config.positions.rope, 16, 8)[0].shape == (8, 4)


QUANTISED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("qtype", QUANTISED)
def test_quantised_types(tmp_path: Path, qtype: str) -> None:
    """What is read is what the package's own arithmetic makes of the weights."""
    model = convert(
        "qwen3",
        tmp_path / "m.gguf",
        qtype=qtype,
        changes={"hidden_size": 256, "intermediate_size": 256},
    )
    checkpoint = load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False)
    name = "model.layers.1.mlp.down_proj.weight"
    original = model.state_dict()[name].numpy()
    kind = gguf.GGMLQuantizationType[qtype]
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
    got = checkpoint.tensors[name]
    assert np.array_equal(got.astype(np.float32), expected)
    floats = {"F16": "float16", "BF16": "bfloat16"}
    assert checkpoint.config.dtype == floats.get(qtype, "float32")
    assert str(got.dtype) == checkpoint.config.dtype


@pytest.mark.parametrize(
    "qtype",
    ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "TQ2_0"],
)
def test_types_that_are_only_unpacked(tmp_path: Path, qtype: str) -> None:
    """Block after block of arbitrary bits, in the shape that the file announces."""
    kind = gguf.GGMLQuantizationType[qtype]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    bits = np.random.default_rng(0).integers(0, 96, (300, 256 // block * size), dtype=np.uint8)
    model = make_model("qwen3", hidden_size=256, intermediate_size=128)
    path = tmp_path / "m.gguf"
    writer_tensors = dict(model.state_dict())
    del writer_tensors["lm_head.weight"]
    model.config.tie_word_embeddings = True
    write_gguf(path, model.config, writer_tensors)
    rewrite_tensor(path, "token_embd.weight", kind.value, bits)
    got = load_checkpoint(path, with_tokenizer=False).tensors["model.embed_tokens.weight"]
    assert got.shape == (300, 256)
    assert np.array_equal(got, gguf.quants.dequantize(bits, kind), equal_nan=True)


def rewrite_tensor(path: Path, name: str, code: int, bits: np.ndarray) -> None:
    """Give a stored tensor another type and another content, which must not be longer."""
    data = bytearray(path.read_bytes())
    key = struct.pack("<Q", len(name)) + name.encode()
    after_dims = data.index(key) + len(key) + 4 + 2 * 8
    struct.pack_into("<I", data, after_dims, code)
    start = read_container(path).tensors[name].offset
    data[start : start + bits.nbytes] = bits.tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("family", "told", "wanted"),
    [
        ("qwen2-yarn", 0.5, (1.0, 0.5)),  # what the key is called after
        ("ministral3", 0.5, (1.0, 0.5)),
        ("ministral3", 0.0, (None, None)),
        ("deepseek-v3", 0.05, (0.5, 0.5)),  # a tenth, and of both
    ],
)
def test_the_log_multiplier_of_yarn(
    tmp_path: Path, family: str, told: float, wanted: tuple[float | None, float | None]
) -> None:
    """As llama.cpp reads it, whose DeepSeek files alone tell a tenth."""
    key = "ARCH.rope.scaling.yarn_log_multiplier"
    convert(family, tmp_path / "m.gguf", metadata={key: told})
    params = dict(
        load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False).config.positions.rope.params
    )
    assert (params.get("mscale"), params.get("mscale_all_dim")) == wanted


@pytest.mark.parametrize(
    ("family", "told", "wanted"),
    [
        ("qwen2-yarn", {"attn_factor": 0.5}, 0.5 * (0.1 * math.log(4) + 1)),
        ("ministral3", {"attn_factor": 0.5}, 0.5),  # its log multiplier of 1 leaves a factor of 1
        ("qwen2-yarn", {"yarn_attn_factor": 0.5}, None),
        ("ministral3", {"yarn_attn_factor": 0.5, "yarn_ext_factor": 0.5}, None),
    ],
)
def test_the_attention_factor_of_yarn(
    tmp_path: Path, family: str, told: dict[str, float], wanted: float | None
) -> None:
    """As llama.cpp (b11549), which reads these keys with ``yarn_`` of Grok's files alone."""
    keys = {f"ARCH.rope.scaling.{key}": value for key, value in told.items()}
    convert(family, tmp_path / "m.gguf", metadata=keys)
    params = dict(
        load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False).config.positions.rope.params
    )
    assert params.get("attention_factor") == (wanted and pytest.approx(wanted))


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    """llama.cpp (b11549) reads the key of every architecture: models for embeddings may have it."""
    path = tmp_path / "m.gguf"
    convert("qwen3", path, metadata={"ARCH.attention.causal": False})
    with pytest.raises(UnsupportedModelError, match="bidirectional attention"):
        load_checkpoint(path)
    convert("qwen3", path, metadata={"ARCH.attention.causal": True})
    assert load_checkpoint(path).config.num_layers


def test_sampling_that_the_file_states_is_above_llama_cpps_defaults(tmp_path: Path) -> None:
    """As llama.cpp b11549 does with ``general.sampling.*``; its penalty counts 64 tokens."""
    told = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    told["general.sampling.penalty_repeat"] = 1.5
    convert("llama", tmp_path / "m.gguf", metadata=told)
    said = load_checkpoint(tmp_path / "m.gguf").generation
    assert said == {"temperature": 0.5, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    convert("llama", tmp_path / "silent.gguf")
    assert load_checkpoint(tmp_path / "silent.gguf").generation == {}
