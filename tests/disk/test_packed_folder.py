"""Folders that were packed once: the same logits as the model they came from, and no trust."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.backends.native.packing import Packer, read_layers
from paceline.build.build import build_engine
from paceline.config import PACKED_DTYPES, EngineConfig
from paceline.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from paceline.disk import packed_folder
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.pooling import write_pooling
from tests.arrays import same
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.models.reference import Driver, edit, save_folder, save_model
from tests.quick import once
from tests.text.vocabularies import byte_level_json, save_tokenizer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())),
]
TOKENS = torch.randint(3, 300, (30,), generator=torch.Generator().manual_seed(3)).tolist()
FILE = "packed-00001.safetensors"
QKV = "model.layers.0.self_attn.qkv_proj.0.Q8_0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "tiny")


def pack(source: Path, dtype: str) -> Path:
    out = source.with_name(f"{source.name}-{dtype}")
    write_packed(load_checkpoint(source), out, Packer(dtype))
    return out


def logits(checkpoint: Checkpoint, dtype: str) -> torch.Tensor:
    return Driver(checkpoint, max_len=64, ops=CpuOps(dtype)).chunk(TOKENS)


@pytest.mark.parametrize(
    ("family", "dtype"),
    once(
        ["qwen3", "llama-biased", "gemma3", "phi3", "granite", "glm4", "gpt2", "phi"],
        PACKED_DTYPES,
        times=2,
    ),
)
def test_the_logits_are_those_of_the_source(tmp_path: Path, family: str, dtype: str) -> None:
    """Stacked and fused linears, biases, tied and separate heads, norms plus one; all levels."""
    source = tmp_path / "tiny"
    save_model(family, source, "bfloat16")
    save_tokenizer(source, byte_level_json(), eos_token="<|end|>")
    packed = load_checkpoint(pack(source, dtype))
    before = native_module().isa()
    for level in native_module().isas():
        native_module().set_isa(level)
        assert same(logits(packed, dtype), logits(load_checkpoint(source), dtype))
    native_module().set_isa(before)


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
def test_what_is_found_again(folder: Path, load_format: str) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5], temperature=0.7)
    write_pooling(folder, "last")
    source = load_checkpoint(folder)
    found = load_checkpoint(pack(folder, "int4"), load_format=load_format)
    assert found.config == source.config
    assert found.generation == source.generation
    assert found.pooling == source.pooling == "last"
    assert found.packed == packed_folder.PackedFormat("int4")
    assert source.packed is None
    assert found.tokenizer is not None
    assert source.tokenizer is not None
    assert found.tokenizer.fingerprint == source.tokenizer.fingerprint
    text = "the quick <|end|> fox"
    assert found.tokenizer.encode(text) == source.tokenizer.encode(text)
    built = build_engine(found, EngineConfig(kv_cache_memory=1 << 20))
    assert built.config.dtype == "int4"


def test_mapped_weights_are_not_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint(pack(folder, "int8"))
    stored = checkpoint.tensors[QKV].ctypes.data
    seen: list[int] = []

    class Watching(CpuOps):
        def adopt(self, packed: Any) -> Any:
            seen.append(packed.parts[0].data.ctypes.data)
            return super().adopt(packed)

    Decoder(checkpoint.config, checkpoint.tensors, Watching("int8"), 32)
    assert stored in seen


@pytest.mark.parametrize("load_format", ["mmap", "memory"])
def test_tiles_begin_at_cache_lines(tmp_path: Path, load_format: str) -> None:
    """Whatever the sizes of the norms and biases that lie in the same file."""
    source = tmp_path / "tiny"
    save_model("qwen3", source, head_dim=12, attention_bias=True)
    packed = load_checkpoint(pack(source, "int8"), load_format=load_format)
    tiles = {name: packed.tensors[name] for name in packed.tensors if name.endswith("Q8_0")}
    assert len(tiles) == 10
    assert not any(tile.ctypes.data % 64 for tile in tiles.values())
    assert any(packed.tensors[name].nbytes % 64 for name in packed.tensors)
    assert same(logits(packed, "int8"), logits(load_checkpoint(source), "int8"))


def test_a_model_without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert load_checkpoint(pack(folder, "int8")).tokenizer is None


def test_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_folder, "SHARD_BYTES", 1)
    out = pack(folder, "int8")
    assert len(list(out.glob("*.safetensors"))) == 3  # two layers, and the last norm
    assert same(logits(load_checkpoint(out), "int8"), logits(load_checkpoint(folder), "int8"))
    other = out / "packed-00002.safetensors"
    save_file(load_file(other), other, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="not converted together"):
        load_checkpoint(out)


def test_gguf_sources(tmp_path: Path) -> None:
    """Configuration and tokenizer come out of the metadata as a folder's files."""
    tokens = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="gpt-2")
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    path = tmp_path / "model.gguf"
    convert(
        "llama",
        path,
        qtype="Q4_0",
        metadata={**tokens, **template},
        changes={"vocab_size": len(tokens["tokenizer.ggml.tokens"]), "intermediate_size": 128},
    )
    source = load_checkpoint(path)
    found = load_checkpoint(pack(path, "file"))
    assert found.config == source.config
    assert same(logits(found, "file"), logits(source, "file"))
    assert source.tokenizer is not None
    assert found.tokenizer is not None
    chat = [{"role": "user", "content": "the dog"}]
    assert found.tokenizer.encode("the fox, 12") == source.tokenizer.encode("the fox, 12")
    assert found.tokenizer.apply_chat_template(chat) == "the dog"
    assert found.tokenizer.bos_token_id == source.tokenizer.bos_token_id


def test_biases_without_words_are_refused(tmp_path: Path) -> None:
    tokens = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="gpt-2")
    size = len(tokens["tokenizer.ggml.tokens"])
    path = tmp_path / "model.gguf"
    extra = {
        f"blk.{i}.ffn_{part}.bias": np.zeros(112 if part != "down" else 64, np.float32)
        for i in range(2)
        for part in ("gate", "up", "down")
    }
    convert("qwen3", path, metadata=tokens, changes={"vocab_size": size}, extra_tensors=extra)
    with pytest.raises(UnsupportedModelError, match="biases"):
        pack(path, "int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "file"])
def test_another_dtype_is_refused(folder: Path, dtype: str) -> None:
    checkpoint = load_checkpoint(pack(folder, "int8"))
    with pytest.raises(ConfigError, match="packed as int8 and cannot run as"):
        build_engine(checkpoint, EngineConfig(dtype=dtype))


def test_the_reference_cannot_run_it(folder: Path) -> None:
    checkpoint = load_checkpoint(pack(folder, "int8"))
    with pytest.raises(ConfigError, match="packed for the native kernels"):
        build_engine(checkpoint, EngineConfig(backend="reference"))


def test_outputs_and_sources_that_are_refused(folder: Path) -> None:
    out = pack(folder, "int8")
    with pytest.raises(ConfigError, match="not an empty folder"):
        pack(folder, "int8")
    with pytest.raises(ConfigError, match="packed already"):
        write_packed(load_checkpoint(out), folder.with_name("again"), Packer("int8"))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_that_are_no_numbers_are_refused(folder: Path, dtype: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.gate_up_proj.*NaN"):
        pack(folder, dtype)


# --- files that are not what they say ------------------------------------------------------------

Damage = Callable[[dict[str, np.ndarray]], Any]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop(QKV), "no tensor"),
        (lambda t: t.pop("model.layers.1.mlp.down_proj.0.Q8_0"), "no tensor"),
        (lambda t: t.update({QKV: t[QKV][:-1].copy()}), "elements"),
        (lambda t: t.update({QKV: t[QKV].view(np.int8)}), "qkv_proj"),
        (lambda t: t.update({QKV: t[QKV].reshape(2, -1)}), "qkv_proj"),
        (lambda t: t.update({QKV.replace(".0.", ".1."): t[QKV]}), "not packed as"),
        (lambda t: t.update({QKV.replace("0.Q8_0", "bias"): np.zeros(7, "f")}), "not packed as"),
        (lambda t: t.pop("lm_head.0.Q8_0"), "no tensor"),
        (lambda t: t.update({"model.norm.weight": np.ones(63, "f")}), "has shape"),
        (lambda t: t.pop("model.norm.weight"), "no tensor"),
    ],
)
def test_damaged_tensors(folder: Path, damage: Damage, words: str) -> None:
    out = pack(folder, "int8")
    metadata = load_checkpoint(out).packed.metadata  # type: ignore[union-attr]
    tensors = load_file(out / FILE)
    damage(tensors)
    save_file(tensors, out / FILE, metadata)
    checkpoint = load_checkpoint(out)
    with pytest.raises(ModelLoadError, match=words):
        Decoder(checkpoint.config, checkpoint.tensors, CpuOps("int8"), 32)


def test_sizes_that_the_configuration_does_not_have(folder: Path) -> None:
    out = pack(folder, "int8")
    edit(out / "config.json", intermediate_size=1 << 19)
    checkpoint = load_checkpoint(out)
    with pytest.raises(ModelLoadError, match="gate_up_proj"):
        Decoder(checkpoint.config, checkpoint.tensors, CpuOps("int8"), 32)


@pytest.mark.parametrize("change", [{"version": "1"}, {"dtype": "int7"}, {"dtype": "x" * 999}])
def test_other_versions(folder: Path, change: dict[str, str]) -> None:
    out = pack(folder, "int8")
    metadata = load_checkpoint(out).packed.metadata  # type: ignore[union-attr]
    save_file(load_file(out / FILE), out / FILE, metadata | change)
    with pytest.raises(ModelLoadError, match="convert the model again"):
        load_checkpoint(out)


def leaves(weights: Any) -> Iterator[Any]:
    """What records of weights are made of, in their order."""
    if is_dataclass(weights):
        weights = [getattr(weights, field.name) for field in fields(weights)]
    if isinstance(weights, list | tuple):
        for part in weights:
            yield from leaves(part)
    else:
        yield weights


@pytest.mark.parametrize("family", ["llama", "qwen2-moe", "deepseek-v2", "gemma3n"])
def test_layers_in_fewer_bits_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path / "plain")
    source = load_checkpoint(tmp_path / "plain", with_tokenizer=False)
    write_packed(source, tmp_path / "packed", Packer("float32"))
    packed = load_checkpoint(tmp_path / "packed", with_tokenizer=False)
    found, expected = (
        [*leaves(read_layers(model, model.config, Packer("int4")))] for model in (packed, source)
    )
    assert "Q4_0" in [leaf for leaf in expected if isinstance(leaf, str)]
    for one, two in zip(found, expected, strict=True):
        assert np.array_equal(one, two) if isinstance(two, np.ndarray) else one == two
