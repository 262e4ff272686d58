"""Hybrid models on the native kernels: close to the reference, and the same bits in any chunking."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from paceline.models.ops.cpu import CpuOps
from paceline.models.ops.reference import ReferenceOps
from paceline.span import DraftTree
from tests.arrays import same
from tests.models.reference import HYBRIDS, VOCAB, Driver, save_model

pytest.importorskip("paceline._native")
TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", [*HYBRIDS])
def test_chunks_and_trees(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(family, tmp_path)
    truth = Driver.of(tmp_path, max_len=64, ops=CpuOps(dtype)).chunk(TOKENS)
    if dtype == "float32":
        reference = Driver.of(tmp_path, max_len=64, ops=ReferenceOps(dtype)).chunk(TOKENS)
        torch.testing.assert_close(truth, reference, rtol=1e-3, atol=1e-3)
    parts = Driver.of(tmp_path, max_len=64, ops=CpuOps(dtype))
    chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise([0, 1, 17, 20])]
    draft = DraftTree([5, TOKENS[21], 7, TOKENS[22]], [-1, -1, 0, 1], [1.0] * 4, ["x"] * 4)
    chunks.append(parts.run(draft, TOKENS[20], path=[0, 2, 4])[[0, 2, 4]])
    chunks.append(parts.chunk(TOKENS[23:]))
    assert same(torch.cat(chunks), truth)
