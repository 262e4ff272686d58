"""GGUF files that are truncated, damaged or made to harm: always a typed error, never more."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.gguf.config import hf_config_from_gguf
from paceline.loading.gguf.container import GgufBytes, GgufContainer, TensorInfo
from paceline.models.decoder import Decoder
from tests.loading.gguf_writing import convert, tokenizer_metadata, write_gguf
from tests.models.reference import make_model
from tests.text.vocabularies import byte_level_json


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    meta = tokenizer_metadata(json.loads(byte_level_json()), "gpt2", pre="gpt-2")
    convert("qwen3", path, metadata=meta, changes={"vocab_size": 400})
    return path.read_bytes()


def load_bytes(folder: Path, data: bytes) -> Any:
    path = folder / "broken.gguf"
    path.write_bytes(data)
    checkpoint = load_checkpoint(path)
    return [checkpoint.tensors[name] for name in checkpoint.tensors]


@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.02, 0.3, 0.9, 0.9999])
def test_truncated(tmp_path: Path, good: bytes, share: float) -> None:
    with pytest.raises(ModelLoadError):
        load_bytes(tmp_path, good[: int(len(good) * share)])


@pytest.mark.parametrize(
    ("at", "value"),
    [(4, 1), (4, 99), (4, 3 << 24), (8, 1 << 62), (16, 1 << 62), (16, 60_000), (24, 1 << 40)],
    ids=["v1", "v99", "big-endian", "tensors", "keys", "more-keys", "key-length"],
)
def test_absurd_header(tmp_path: Path, good: bytes, at: int, value: int) -> None:
    form = "<I" if at == 4 else "<Q"
    data = bytearray(good)
    struct.pack_into(form, data, at, value)
    with pytest.raises(ModelLoadError):
        load_bytes(tmp_path, bytes(data))


def header(*entries: bytes, num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries)) + b"".join(entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ENTRIES = {
    "array-of-2**60": text("k") + struct.pack("<IIQ", 9, 4, 1 << 60),
    "strings-of-2**60": text("k") + struct.pack("<IIQ", 9, 8, 1 << 60),
    "nested-array": text("k") + struct.pack("<IIQ", 9, 9, 1),
    "unknown-type": text("k") + struct.pack("<I", 77),
    "string-of-2**60": text("k") + struct.pack("<IQ", 8, 1 << 60),
    "alignment": text("general.alignment") + struct.pack("<II", 4, 3),
    "no-architecture": text("k") + struct.pack("<II", 4, 3),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_absurd_metadata(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError):
        load_bytes(tmp_path, header(ENTRIES[name]) + bytes(64))


def told(family: str, **said: Any) -> None:
    """Read a configuration of these keys."""
    metadata = {"general.architecture": family}
    metadata |= {f"{family}.{key}": value for key, value in {**SIZES, **said}.items()}
    file = GgufBytes(Path("m.gguf"), np.zeros(0, np.uint8))
    tensors = {EMBEDDING: TensorInfo(EMBEDDING, (9, 64), 0, 0, file)}
    hf_config_from_gguf(GgufContainer(file.path, metadata, tensors), lambda name: np.zeros(1))


EMBEDDING = "token_embd.weight"
SIZES: dict[str, Any] = {
    "attention.head_count": 4,
    "embedding_length": 64,
    "block_count": 2,
    "vocab_size": 9,
}
SIZES |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
NO_NUMBERS = [math.inf, -math.inf, math.nan, "x", True, []]
LATENT = ("attention.key_length_mla", "expert_group_count", "rope.scaling.yarn_log_multiplier")


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("eagle3", "block_count"),
        ("eagle3", "attention.key_length"),
        ("eagle3", "rope.dimension_count"),
        *(("deepseek2", key) for key in LATENT),
    ],
)
def test_what_must_be_a_number(family: str, key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{family}.{key} "):
        told(family, **{key: value})


def test_repeated_key(tmp_path: Path) -> None:
    entry = text("k") + struct.pack("<II", 4, 3)
    with pytest.raises(ModelLoadError, match="twice"):
        load_bytes(tmp_path, header(entry, entry) + bytes(64))


@pytest.mark.parametrize(
    ("dims", "code", "offset"),
    [
        ((1 << 40, 1 << 40), 0, 0),
        ((0,), 0, 0),
        ((1 << 30,), 0, 0),
        ((8,), 0, 1 << 60),
        ((8,), 0, 7),
    ],
)
def test_absurd_tensors(tmp_path: Path, dims: tuple[int, ...], code: int, offset: int) -> None:
    info = text("token_embd.weight") + struct.pack("<I", len(dims))
    info += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", code, offset)
    entry = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    with pytest.raises(ModelLoadError):
        load_bytes(tmp_path, header(entry, num_tensors=1) + info + bytes(128))


def test_unsupported_architecture(tmp_path: Path) -> None:
    entry = text("general.architecture") + struct.pack("<I", 8) + text("mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported: llama"):
        load_bytes(tmp_path, header(entry) + bytes(64))


def test_missing_tensor(tmp_path: Path, good: bytes) -> None:
    name = b"blk.1.ffn_up.weight"
    path = tmp_path / "m.gguf"
    path.write_bytes(good.replace(name, b"blk.1.ffn_XX.weight"))
    tensors = load_checkpoint(path).tensors
    assert "model.layers.1.mlp.up_proj.weight" not in tensors
    assert tensors.get("model.layers.1.mlp.up_proj.weight") is None
    with pytest.raises(ModelLoadError, match=r"no tensor model\.layers\.1\.mlp\.up_proj"):
        tensors["model.layers.1.mlp.up_proj.weight"]


@given(at=st.integers(0, 9000), noise=st.binary(min_size=1, max_size=9))
def test_any_damage_is_our_error_or_none(
    tmp_path_factory: pytest.TempPathFactory, good: bytes, at: int, noise: bytes
) -> None:
    data = bytearray(good)
    data[at : at + len(noise)] = noise
    with contextlib.suppress(ModelLoadError):
        load_bytes(tmp_path_factory.getbasetemp(), bytes(data))


def with_extra(tmp_path: Path, *names: str) -> Decoder:
    model = make_model("llama")
    extra = {name: np.ones(8) for name in names}
    path = write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), extra_tensors=extra)
    checkpoint = load_checkpoint(path, with_tokenizer=False)
    return Decoder(checkpoint.config, checkpoint.tensors, ReferenceOps(), 32)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_qkv.scale", "blk.1.attn_q.bias", "blk.0.ffn_gate_inp.weight", "cls.weight"]
)
def test_tensors_without_a_use_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no use for 1 of .* tensors: \S+;"):
        with_extra(tmp_path, name)


def test_one_of_two_tables_of_rotary_factors(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"rope_factors_short\.weight .* alone"):
        with_extra(tmp_path, "rope_factors_long.weight")


def test_rotary_tables_are_computed_anew(tmp_path: Path) -> None:
    assert with_extra(tmp_path, "blk.0.attn_rot_embd.weight").layers
