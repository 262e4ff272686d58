"""Heads that have not every token: the same logits for those that they have, and no trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer
from paceline.build.build import build_engine
from paceline.config import EngineConfig
from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.weights import HEAD_TOKENS, PrunedHead
from tests.arrays import assert_close, same
from tests.models.reference import VOCAB, Driver, edit, save_model
from tests.text.vocabularies import byte_level_json, save_tokenizer

IDS = torch.tensor([0, 1, 2, 5, 8, 13, 21, 34, 55, 89, 144, 233, 299])
TOKENS = torch.randint(3, VOCAB, (30,), generator=torch.Generator().manual_seed(3)).tolist()
needs_native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))


def prune(folder: Path, **changes: Any) -> Path:
    """A copy of a folder with a head of :data:`IDS`; ``changes`` to its configuration."""
    out = folder.with_name(folder.name + "-pruned")
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = head[IDS].clone()
    tensors[HEAD_TOKENS] = torch.from_numpy(PrunedHead(IDS.numpy(), VOCAB).offsets)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text((folder / "config.json").read_text())
    edit(out / "config.json", draft_vocab_size=len(IDS), tie_word_embeddings=False, **changes)
    save_tokenizer(out, byte_level_json(), eos_token="<|end|>")
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model("qwen3", tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # a head of its own; tied, soft-capped
def test_the_logits_are_those_of_the_whole_head(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path / "tiny")
    pruned = prune(tmp_path / "tiny")
    wanted = Driver.of(tmp_path / "tiny").chunk(TOKENS)[:, IDS]
    assert_close(Driver.of(pruned).chunk(TOKENS), wanted, rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_native_and_converted_heads(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(family, tmp_path / "tiny", "bfloat16")
    pruned, packed = prune(tmp_path / "tiny"), tmp_path / "packed"
    wanted = Driver.of(tmp_path / "tiny", ops=CpuOps(dtype)).chunk(TOKENS)[:, IDS]
    assert same(Driver.of(pruned, ops=CpuOps(dtype)).chunk(TOKENS), wanted)
    write_packed(load_checkpoint(pruned), packed, Packer(dtype))
    converted = Driver.of(packed, ops=CpuOps(dtype))
    assert same(converted.chunk(TOKENS), wanted)
    head = converted.runner.decoder.pruned_head
    assert head is not None
    assert same(head.token_ids, IDS)


def test_it_is_no_target(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="can only draft"):
        build_engine(str(prune(folder)), EngineConfig(kv_cache_memory=1 << 20))


def test_as_many_rows_as_tokens_are_a_whole_head(folder: Path) -> None:
    edit(folder / "config.json", draft_vocab_size=VOCAB)
    assert Driver.of(folder).runner.decoder.pruned_head is None


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (None, "no tensor d2t"),
        (torch.zeros(5, dtype=torch.int64), "has shape"),
        (torch.zeros(len(IDS)), "of type float32"),
        (torch.full((len(IDS),), VOCAB), "must ascend within 0 to 299"),
        (torch.full((len(IDS),), -1), "must ascend"),
        (-torch.arange(len(IDS)), "must ascend"),  # the same token in every row
    ],
)
def test_damaged_token_tables(folder: Path, offsets: torch.Tensor | None, message: str) -> None:
    pruned = prune(folder)
    tensors = load_file(pruned / "model.safetensors")
    del tensors[HEAD_TOKENS]
    if offsets is not None:
        tensors[HEAD_TOKENS] = offsets
    save_file(tensors, pruned / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        Driver.of(pruned)


@pytest.mark.parametrize(
    "changes",
    [{"draft_vocab_size": VOCAB + 1}, {"draft_vocab_size": 0}, {"draft_vocab_size": "8"}],
)
def test_sizes_out_of_bounds(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(ModelLoadError, match="draft_vocab_size"):
        load_checkpoint(folder, with_tokenizer=False)


def test_a_pruned_head_is_not_tied(folder: Path) -> None:
    pruned = prune(folder)
    edit(pruned / "config.json", tie_word_embeddings=True)
    with pytest.raises(ModelLoadError, match="matrix of its own"):
        load_checkpoint(pruned, with_tokenizer=False)
