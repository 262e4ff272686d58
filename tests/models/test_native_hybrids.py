"""Hybrid models on the native kernels: close to the reference, the same bits in any chunking, and
packed once.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.packing import Packer
from paceline.backends.rows.reference import ReferenceOps
from paceline.build.build import resolve_config
from paceline.config import EngineConfig
from paceline.core.errors import ConfigError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from paceline.request.span import DraftTree
from tests.arrays import same
from tests.models.reference import HYBRIDS, VOCAB, Driver, save_model
from tests.quick import once

pytest.importorskip("paceline._native")
TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(("family", "dtype"), once(HYBRIDS, ["float32", "int8"]))
def test_chunks_and_trees(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(family, tmp_path)
    whole = Driver.of(tmp_path, max_len=64, ops=CpuOps(dtype))
    truth = whole.chunk(TOKENS)
    if dtype == "float32":
        reference = Driver.of(tmp_path, max_len=64, ops=ReferenceOps(dtype)).chunk(TOKENS)
        torch.testing.assert_close(truth, reference, rtol=1e-3, atol=1e-3)
    parts = whole.again()
    chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise([0, 1, 17, 20])]
    draft = DraftTree([5, TOKENS[21], 7, TOKENS[22]], [-1, -1, 0, 1], [1.0] * 4, ["x"] * 4)
    chunks.append(parts.run(draft, TOKENS[20], path=[0, 2, 4])[[0, 2, 4]])
    chunks.append(parts.chunk(TOKENS[23:]))
    assert same(torch.cat(chunks), truth)


@pytest.mark.parametrize(("family", "dtype"), once(HYBRIDS, ["bfloat16", "int8", "int4"]))
def test_a_packed_folder_has_the_logits_of_its_source(
    tmp_path: Path, family: str, dtype: str
) -> None:
    source, folder = tmp_path / "source", tmp_path / "packed"
    save_model(family, source, "bfloat16")
    write_packed(load_checkpoint(source, with_tokenizer=False), folder, Packer(dtype))
    truth, packed = (
        Driver.of(path, max_len=64, ops=CpuOps(dtype)).chunk(TOKENS) for path in (source, folder)
    )
    assert same(packed, truth)


def test_the_native_kernels_run_hybrids_of_short_convolutions(tmp_path: Path) -> None:
    """And the reference ops those whose convolutions see more rows."""
    save_model("lfm2", tmp_path)
    checkpoint = load_checkpoint(tmp_path, with_tokenizer=False)
    assert isinstance(resolve_config(EngineConfig(), checkpoint)[1], CpuOps)
    save_model("lfm2", tmp_path, conv_L_cache=9)
    checkpoint = load_checkpoint(tmp_path, with_tokenizer=False)
    assert isinstance(resolve_config(EngineConfig(), checkpoint)[1], ReferenceOps)
    with pytest.raises(ConfigError, match="convolutions see 9 rows"):
        resolve_config(EngineConfig(backend="native"), checkpoint)
    with pytest.raises(ConfigError, match="convolutions see 9 rows"):
        write_packed(checkpoint, tmp_path / "packed", Packer("int8"))
