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

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.request.span import DraftTree
from tests.arrays import same
from tests.levels import SOME, once_with_levels
from tests.models.reference import FAMILIES, HYBRIDS, MIXTURES, VOCAB, Driver, save_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())),
]
TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
# Of the logits' standard deviation. Where an activation is rounded to its other neighbour, which
# a difference in the last bit of a sum can bring about, all that follows differs by 1 to 2 %. Which
# bits these are depends on the processor for which torch was built to sum.
USUAL, AT_MOST = 0.03, 0.25


@pytest.fixture(params=SOME)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native_module().isa()
    native_module().set_isa(request.param)
    yield request.param
    native_module().set_isa(before)


EVERY = [*FAMILIES, *MIXTURES, *HYBRIDS]


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    save_model(request.param, folder)
    return load_checkpoint(folder, with_tokenizer=False)


def driver(checkpoint: Checkpoint, backend: Any = CpuOps, dtype: str = "int8") -> Driver:
    return Driver(checkpoint, max_len=64, ops=backend(dtype))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    spread = expected.std()
    assert spread > 0.05  # a model that says nothing would hide a mistake
    difference = (got - expected).abs() / spread
    assert difference.median() < USUAL
    assert difference.max() < AT_MOST


def prefill_and_decode(driver: Driver) -> list[torch.Tensor]:
    cuts = [0, 17, 23, 31, 32, 33, 40]
    return [driver.chunk(TOKENS[first:last]) for first, last in itertools.pairwise(cuts)]


def tree(driver: Driver) -> list[torch.Tensor]:
    draft = DraftTree([5, 9, 7, 7, 11, 12], [-1, -1, 0, 1, 3, 3], [1.0] * 6, ["x"] * 6)
    driver.chunk(TOKENS[:20])
    return [driver.run(draft, TOKENS[20], [0, 2, 4, 6]), driver.chunk([33])]


WAYS = {"prefill and decode": prefill_and_decode, "tree": tree}


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> dict[str, list[torch.Tensor]]:
    """What the reference says, for every level."""
    return {name: way(driver(checkpoint, ReferenceOps)) for name, way in WAYS.items()}


@pytest.mark.parametrize(
    ("checkpoint", "level", "way"),
    once_with_levels(EVERY, WAYS),
    indirect=["checkpoint", "level"],
)
def test_what_is_said(checkpoint: Checkpoint, level: str, way: str, expected: Any) -> None:
    found = WAYS[way](driver(checkpoint))
    for got, wanted in zip(found, expected[way], strict=True):
        close(got, wanted)


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_activations(tmp_path: Path, level: str, activation: str) -> None:
    save_model("llama", tmp_path, hidden_act=activation)
    checkpoint = load_checkpoint(tmp_path, with_tokenizer=False)
    close(driver(checkpoint).chunk(TOKENS), driver(checkpoint, ReferenceOps).chunk(TOKENS))


@pytest.mark.parametrize(
    ("checkpoint", "level", "dtype"),
    once_with_levels(EVERY, ["int8", "int4"]),
    indirect=["checkpoint", "level"],
)
def test_chunks_do_not_change_a_bit(checkpoint: Checkpoint, level: str, dtype: str) -> None:
    whole = driver(checkpoint, dtype=dtype)
    parts = whole.again()
    truth = whole.chunk(TOKENS)
    assert torch.isfinite(truth).all()
    cuts = [0, 1, 17, 20, 33, 40]
    chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
    assert same(torch.cat(chunks), truth)
