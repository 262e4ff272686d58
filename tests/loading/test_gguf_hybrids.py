"""Hybrid models in GGUF files: the same models as in folders, on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer
from paceline.backends.rows.reference import ReferenceOps
from paceline.core.errors import PacelineError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from tests.arrays import same
from tests.backends.block_rows import HALVES, random_rows
from tests.loading import gguf_hybrids
from tests.loading.gguf_writing import convert
from tests.models.reference import HYBRIDS, LINEAR, VOCAB, Driver, save_model
from tests.quick import in_step, once

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
# What no file says: dense layers among mixtures, and norms before the gate.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"mlp_only_layers": []},
    "nemotron-h-moe": {"layers_block_type": [LINEAR, "moe", "full_attention", LINEAR, "moe"]},
    "falcon-h1-normed": {"mamba_norm_before_gate": False},
}
WITHOUT_FILES = ("olmo-hybrid", "olmo-hybrid-rotary")
FAMILIES = [family for family in HYBRIDS if family not in WITHOUT_FILES]
WIDE = {"linear_value_head_dim": 32, "intermediate_size": 144, "moe_intermediate_size": 96}
# Whole blocks of 32.
WIDTHS = {
    "qwen3-next": {**WIDE, "shared_expert_intermediate_size": 32},
    "qwen3-5": {**WIDE, "intermediate_size": 96},
    "lfm2": {"intermediate_size": 144},
    "falcon-h1": {"intermediate_size": 96},
    "nemotron-h": {"intermediate_size": 96},
    "mamba2": {},
    "granite-hybrid": {"shared_intermediate_size": 96},
    "bamba": {"intermediate_size": 96},
}
# Whole blocks of 256.
WHOLE: dict[str, dict[str, Any]] = {
    "qwen3-5-moe": {
        "hidden_size": 256,
        "head_dim": 64,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "granite-hybrid": {
        "hidden_size": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "shared_intermediate_size": 256,
    },
    "lfm2": {"hidden_size": 256, "intermediate_size": 384},
}


def logits(path: Path, ops: Any) -> torch.Tensor:
    return Driver.of(path, max_len=64, ops=ops).chunk(TOKENS)


@pytest.mark.parametrize(("family", "backend"), once(FAMILIES, KINDS))
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, backend: str) -> None:
    model = convert(family, tmp_path / "m.gguf", changes=CHANGES.get(family, {}))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path / "m.gguf", KINDS[backend]("float32"))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_rotary_keys_of_a_model_without_rotary_do_not_count(tmp_path: Path) -> None:
    """Converters write the width over the heads as dimensions to rotate, whatever ``head_dim``."""
    told = {"ARCH.rope.dimension_count": 16, "ARCH.rope.freq_base": 500.0}
    changes = {"head_dim": 24}
    model = convert("nemotron-h", tmp_path / "m.gguf", metadata=told, changes=changes)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path / "m.gguf", ReferenceOps("float32"))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_says_what_a_folder_says(tmp_path: Path, family: str) -> None:
    changes = CHANGES.get(family, {})
    convert(family, tmp_path / "m.gguf", changes=changes)
    save_model(family, tmp_path / "folder", **changes)
    found, wanted = (
        load_checkpoint(tmp_path / name, with_tokenizer=False).config
        for name in ("m.gguf", "folder")
    )
    assert found.num_weights == wanted.num_weights
    assert found.mlp.experts == wanted.mlp.experts
    assert found.recurrent is not None
    assert wanted.recurrent is not None
    assert found.recurrent.layers == wanted.recurrent.layers
    assert found.only_part == wanted.only_part


def quantised(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of a matrix; where the gguf package only reads a type, random ones of its size."""
    if kind.name not in SUPER:
        return gguf_quantize(data, kind)
    *outer, k = data.shape
    blocks = random_rows(kind.name, int(np.prod(outer)), k).reshape(-1, SUPER[kind.name])
    factor = data.std() / gguf.quants.dequantize(blocks, kind).std()
    for at in HALVES[kind.name]:
        half = blocks[:, at : at + 2].copy().view(np.float16) * np.float16(factor)
        blocks[:, at : at + 2] = half.view(np.uint8)
    return blocks.reshape(*outer, -1)


SUPER = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
gguf_quantize = gguf.quants.quantize


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize(
    ("family", "qtype"),
    [
        *((family, "Q8_0") for family in WIDTHS),
        *in_step(WHOLE, ("Q4_0", "MXFP4", *SUPER)),
    ],
)
def test_weights_are_computed_with_as_they_are_stored(
    tmp_path: Path, family: str, qtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, widths = tmp_path / "m.gguf", WIDTHS if qtype == "Q8_0" else WHOLE
    monkeypatch.setattr(gguf.quants, "quantize", quantised)
    convert(family, path, qtype=qtype, changes=CHANGES.get(family, {}) | widths[family])
    checkpoint = load_checkpoint(path, with_tokenizer=False)
    assert checkpoint.is_quantised
    for part in ("out_proj", "in_proj_qkv" if family.startswith("qwen") else "in_proj"):
        name = f"model.layers.0.linear_attn.{part}.weight"
        assert checkpoint.tensors.as_stored(name).format == qtype  # type: ignore[attr-defined]
    plain = logits(path, ReferenceOps("float32"))
    native, reference = (logits(path, ops("file")) for ops in (CpuOps, ReferenceOps))
    # A rounded activation that lies between two codes may get the other one.
    assert (native - reference).abs().median() < 0.02 * plain.std()
    assert (native - plain).abs().median() < 0.15 * plain.std()  # activations have 8 bits


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize("family", WIDTHS)
def test_a_converted_file_gives_the_same_bits(tmp_path: Path, family: str) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "packed"
    convert(family, path, qtype="Q8_0", changes=CHANGES.get(family, {}) | WIDTHS[family])
    write_packed(load_checkpoint(path, with_tokenizer=False), out, Packer("file"))
    assert same(logits(out, CpuOps("file")), logits(path, CpuOps("file")))


def test_earlier_files_of_qwen3_next_have_one_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = CHANGES["qwen3-next"]
    convert("qwen3-next", tmp_path / "m.gguf", changes=changes)
    monkeypatch.setattr(gguf_hybrids, "_apart", lambda config, name, tensor: {name: tensor})
    convert("qwen3-next", tmp_path / "earlier.gguf", changes=changes)
    found, wanted = (
        logits(tmp_path / name, ReferenceOps("float32")) for name in ("earlier.gguf", "m.gguf")
    )
    assert same(found, wanted)


def refused(tmp_path: Path, family: str, match: str, **metadata: object) -> None:
    keys = {f"ARCH.{key.replace('__', '.')}": value for key, value in metadata.items()}
    convert(family, tmp_path / "m.gguf", metadata=keys)
    with pytest.raises(PacelineError, match=match):
        load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False)


def test_what_no_reader_computes_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "lfm2", "sliding_window", attention__sliding_window=64)
    refused(tmp_path, "nemotron-h", "moe_latent_size", moe_latent_size=8)


def test_sizes_of_a_recurrence_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "granite-hybrid", "multiple of ssm.time_step_rank", ssm__inner_size=130)
    refused(tmp_path, "qwen3-5", "multiple of ssm.time_step_rank", ssm__time_step_rank=7)


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    convert("qwen3-5", tmp_path / "m.gguf")
    convert(
        "qwen3-5",
        tmp_path / "more.gguf",
        metadata={"ARCH.block_count": 5, "ARCH.nextn_predict_layers": 1},
        extra_tensors={
            "blk.4.attn_norm.weight": np.ones(64),
            "blk.4.attn_q.weight": np.ones((128, 64)),
            "blk.4.nextn.eh_proj.weight": np.ones((64, 128)),
            "blk.4.nextn.enorm.weight": np.ones(64),
        },
    )
    found, wanted = (
        logits(tmp_path / name, ReferenceOps("float32")) for name in ("more.gguf", "m.gguf")
    )
    assert same(found, wanted)
