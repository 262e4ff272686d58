"""Hybrid models in GGUF files: the same models as in folders, on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.checkpoint import load_checkpoint
from paceline.models.ops.cpu import CpuOps
from paceline.models.ops.native import why_not_native
from paceline.models.ops.reference import ReferenceOps
from tests.models.gguf_writing import convert
from tests.models.reference import HYBRIDS, LINEAR, VOCAB, Driver, save_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
# What no file says: dense layers among mixtures, and norms before the gate.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"mlp_only_layers": []},
    "nemotron-h-moe": {"layers_block_type": [LINEAR, "moe", "full_attention", LINEAR, "moe"]},
    "falcon-h1-normed": {"mamba_norm_before_gate": False},
}
FAMILIES = [*HYBRIDS]


def logits(path: Path, ops: Any) -> torch.Tensor:
    return Driver.of(path, max_len=64, ops=ops).chunk(TOKENS)


@pytest.mark.parametrize("backend", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, backend: str) -> None:
    model = convert(family, tmp_path / "m.gguf", changes=CHANGES.get(family, {}))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    got = logits(tmp_path / "m.gguf", KINDS[backend]("float32"))
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
    assert found.experts == wanted.experts
    assert found.recurrent is not None
    assert wanted.recurrent is not None
    assert found.recurrent.layers == wanted.recurrent.layers
    assert found.only_part == wanted.only_part
