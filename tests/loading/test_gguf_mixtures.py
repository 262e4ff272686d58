"""Mixtures of experts in GGUF files: the same models as in folders, on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import PacelineError
from paceline.loading.checkpoint import load_checkpoint
from paceline.loading.gguf.file import GgufTensors
from paceline.tensors.stored import StoredTensors
from tests.arrays import same
from tests.loading.gguf_writing import convert
from tests.models.reference import MIXTURES, VOCAB, Driver, save_model
from tests.quick import once

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
UNPUBLISHED = ("qwen2-moe-some", "deepseek-v3-halves", "phimoe-long")
UNPUBLISHED += ("llama4-some",)  # no file is like these
FAMILIES = [name for name in MIXTURES if name not in UNPUBLISHED]
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
WIDTHS = {"intermediate_size": 96, "moe_intermediate_size": 96}  # whole blocks of 32


def logits(path: Path, ops: Any) -> torch.Tensor:
    return Driver(load_checkpoint(path, with_tokenizer=False), max_len=64, ops=ops).chunk(TOKENS)


@pytest.mark.parametrize(("family", "backend"), once(FAMILIES, KINDS))
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, backend: str) -> None:
    model = convert(family, tmp_path / "m.gguf")
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path / "m.gguf", KINDS[backend]("float32"))
    assert (got - want).abs().max() < 1e-3 * want.std()


def test_llama4_with_dense_layers_and_short_chunks(tmp_path: Path) -> None:
    short = {"interleave_moe_layer_step": 2, "attention_chunk_size": 9}
    window = {"ARCH.attention.sliding_window": 9}
    model = convert("llama4", tmp_path / "m.gguf", changes=short, metadata=window)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path / "m.gguf", ReferenceOps("float32"))
    assert (got - want).abs().max() < 1e-3 * want.std()


def test_biases_of_phi_moe_show_in_its_tensors(tmp_path: Path) -> None:
    biased = {"attention_bias": True, "lm_head_bias": True}
    model = convert("phimoe", tmp_path / "m.gguf", changes=biased)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path / "m.gguf", ReferenceOps("float32"))
    assert (got - want).abs().max() < 1e-3 * want.std()


def test_rows_of_an_expert_are_had_without_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which as floats may be more than there is memory for."""
    convert("qwen3-moe", tmp_path / "m.gguf", qtype="Q8_0", changes=WIDTHS)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    expected = load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False).tensors[name][2:5]
    tensors = load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False).tensors
    assert isinstance(tensors, StoredTensors)

    def refuse(self: GgufTensors, stored: str) -> None:
        raise AssertionError(f"{stored} was unpacked")

    monkeypatch.setattr(GgufTensors, "__getitem__", refuse)
    assert same(tensors.rows(name, 2, 5), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_says_what_a_folder_says(tmp_path: Path, family: str) -> None:
    convert(family, tmp_path / "m.gguf")
    save_model(family, tmp_path / "folder")
    found, wanted = (
        load_checkpoint(tmp_path / name, with_tokenizer=False).config
        for name in ("m.gguf", "folder")
    )
    assert found.mlp.experts == wanted.mlp.experts
    assert found.num_weights == wanted.num_weights


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize(
    ("family", "qtype"),
    [
        *(("qwen3-moe", qtype) for qtype in ("Q8_0", "Q4_0", "Q5_1")),
        *(("mixtral", qtype) for qtype in ("Q8_0", "Q4_0", "Q5_1")),
        ("gpt-oss", "MXFP4"),
    ],
)
def test_experts_are_computed_with_as_they_are_stored(
    tmp_path: Path, family: str, qtype: str
) -> None:
    path = tmp_path / "m.gguf"
    changes = WIDTHS if family == "qwen3-moe" else {"intermediate_size": 96}
    convert(family, path, qtype=qtype, changes=changes)
    checkpoint = load_checkpoint(path, with_tokenizer=False)
    assert checkpoint.is_quantised
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert checkpoint.tensors.as_stored(name).format == qtype  # type: ignore[attr-defined]
    native, reference = (logits(path, ops("file")) for ops in (CpuOps, ReferenceOps))
    difference = (native - reference).abs() / reference.std()
    assert difference.median() < 0.02
    assert difference.max() < 0.3


def test_more_experts_a_token_than_there_are(tmp_path: Path) -> None:
    more = {"ARCH.expert_used_count": 99}
    convert("olmoe", tmp_path / "m.gguf", metadata=more)
    with pytest.raises(PacelineError, match=r"num_experts_per_tok = 99"):
        load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False)


def test_an_absurd_number_of_layers_is_refused_before_they_are_counted(tmp_path: Path) -> None:
    convert("olmoe", tmp_path / "m.gguf", metadata={"ARCH.block_count": (1 << 32) - 1})
    with pytest.raises(PacelineError, match="num_hidden_layers = 4294967295"):
        load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False)
