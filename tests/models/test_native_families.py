"""Every family in the native kernels against the reference's int8 arithmetic, at every level.

Both quantise weights and activations by the same rule, so they differ by float rounding alone,
which here and there moves an activation to the next of its 255 steps. A flag that is not heeded
(a norm, a bias, a cap, a window, a multiplier) moves the logits by their own size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.ops.cpu import CpuOps
from paceline.models.ops.native import native_module, why_not_native
from paceline.models.ops.reference import ReferenceOps
from paceline.span import DraftTree
from tests.arrays import same
from tests.levels import SOME
from tests.models.reference import FAMILIES, HYBRIDS, MIXTURES, VOCAB, Driver, save_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())),
]
TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
# Of the logits' standard deviation. Where an activation is rounded to its other neighbour, which
# a difference in the last bit of a sum can bring about, all that follows differs by about 1 %.
USUAL, AT_MOST = 0.02, 0.25


@pytest.fixture(params=SOME)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native_module().isa()
    native_module().set_isa(request.param)
    yield request.param
    native_module().set_isa(before)


@pytest.fixture(scope="module", params=[*FAMILIES, *MIXTURES, *HYBRIDS])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    save_model(request.param, folder)
    return load_checkpoint(folder, with_tokenizer=False)


def drivers(checkpoint: Checkpoint) -> tuple[Driver, Driver]:
    return (
        Driver(checkpoint, max_len=64, ops=CpuOps("int8")),
        Driver(checkpoint, max_len=64, ops=ReferenceOps("int8")),
    )


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    spread = expected.std()
    assert spread > 0.05  # a model that says nothing would hide a mistake
    difference = (got - expected).abs() / spread
    assert difference.median() < USUAL
    assert difference.max() < AT_MOST


def test_prefill_and_decode(checkpoint: Checkpoint, level: str) -> None:
    native, reference = drivers(checkpoint)
    for first, last in ((0, 17), (17, 23), *((i, i + 1) for i in range(23, 40))):
        close(native.chunk(TOKENS[first:last]), reference.chunk(TOKENS[first:last]))


def test_tree(checkpoint: Checkpoint, level: str) -> None:
    draft = DraftTree([5, 9, 7, 7, 11, 12], [-1, -1, 0, 1, 3, 3], [1.0] * 6, ["x"] * 6)
    native, reference = drivers(checkpoint)
    for driver in (native, reference):
        driver.chunk(TOKENS[:20])
    path = [0, 2, 4, 6]
    close(native.run(draft, TOKENS[20], path), reference.run(draft, TOKENS[20], path))
    close(native.chunk([33]), reference.chunk([33]))


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_activations(tmp_path: Path, level: str, activation: str) -> None:
    save_model("llama", tmp_path, hidden_act=activation)
    native, reference = drivers(load_checkpoint(tmp_path, with_tokenizer=False))
    close(native.chunk(TOKENS), reference.chunk(TOKENS))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_chunks_do_not_change_a_bit(checkpoint: Checkpoint, level: str, dtype: str) -> None:
    whole, parts = (Driver(checkpoint, max_len=64, ops=CpuOps(dtype)) for _ in range(2))
    truth = whole.chunk(TOKENS)
    assert torch.isfinite(truth).all()
    cuts = [0, 1, 17, 20, 33, 40]
    chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
    assert same(torch.cat(chunks), truth)
