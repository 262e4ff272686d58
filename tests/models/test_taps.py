"""Hidden states that a forward hands out: which ones they are, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module
from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.models.decoder import Decoder
from paceline.request.span import DraftTree, Span
from tests.arrays import arrays, assert_close, same
from tests.levels import SOME
from tests.models.reference import VOCAB, Driver, saved_model
from tests.toy import TOY, toy_tensors

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
BACKENDS = ["reference", *SOME]
# Multipliers, norms after branches, windows, inputs and scales of layers.
FAMILIES = ["llama", "granite", "gemma2", "gemma3", "gemma4-inputs", "gemma4-moe"]
LONG = [(7 * i * i + 3) % TOY.vocab_size for i in range(200)]  # more rows than go through at once


@pytest.fixture(params=BACKENDS)
def float_ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every backend that computes in float32, the native one at every level of this CPU."""
    if request.param == "reference":
        yield ReferenceOps("float32")
        return
    before = native_module().isa()
    native_module().set_isa(request.param)
    yield CpuOps("float32")
    native_module().set_isa(before)


def toy(ops: Any) -> ModelRunner:
    decoder = Decoder(TOY, arrays(toy_tensors()), ops, TOY.max_position)
    model = ModelRunner(decoder, KVCache(ops.kv_memory(TOY, 40, "float32")))
    model.kv.open(0)
    return model


def span_of(model: ModelRunner, tokens: list[int], samples: range) -> Any:
    model.kv.reserve(0, len(tokens))
    return model.pack([Span(0, 0, tokens, range(-1, len(tokens) - 1), samples)])


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_of_transformers(
    tmp_path: Path, float_ops: Any, family: str
) -> None:
    model = saved_model(family, tmp_path)
    driver = Driver.of(tmp_path, max_len=64, ops=float_ops)
    layers = driver.checkpoint.config.num_layers
    driver.runner.taps = (*range(layers + 2), 0)  # in any order, and one of them twice
    left: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda *call: left.append(call[2]))
    with torch.inference_mode():
        said = model.model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    hook.remove()
    streams = [*said[:layers], left[0], said[layers], said[0]]
    want = torch.stack([x.view(40, -1) for x in streams], dim=1)
    batch = span_of(driver.runner, TOKENS, range(40))
    result = driver.runner.forward(batch)
    assert_close(result.features, want, atol=1e-4, rtol=1e-4)
    driver.runner.taps = ()
    assert same(driver.runner.forward(batch).logits, result.logits)


def test_nothing_else_changes(float_ops: Any) -> None:
    """The logits have the same bits whatever is tapped, and without taps there are no features."""
    model = toy(float_ops)
    truth = model.forward(span_of(model, LONG, range(150, 200)))
    assert truth.features is None
    for taps in ((2,), (3,), (0, 1), (0, 1, 2, 3)):
        model.taps = taps
        batch = span_of(model, LONG, range(150, 200))
        result = model.forward(batch)
        assert same(result.logits, truth.logits)
        greedy = model.forward(batch, greedy=True)
        assert result.features is not None
        assert greedy.features is not None
        assert result.features.shape == (200, len(taps), TOY.hidden_size)
        assert same(greedy.features, result.features)
    model.taps = ()
    assert model.forward(batch).features is None


def test_nodes_that_are_not_computed_have_no_features(float_ops: Any) -> None:
    model = toy(float_ops)
    model.taps = (1,)
    whole = model.forward(span_of(model, LONG[:9], range(9))).features
    assert whole is not None
    rest = Span(0, 0, LONG[:9], range(-1, 8), range(6, 9), num_cached=6)
    got = model.forward(model.pack([rest])).features
    assert got is not None
    assert same(got, whole[6:])


def test_rows_of_a_tree_have_the_features_of_their_paths(float_ops: Any) -> None:
    model = toy(float_ops)
    model.taps = (0, 1, 2)
    model.kv.reserve(0, 4)
    tree = Span.tree(0, 0, 5, DraftTree([9, 7, 4], [-1, -1, 1], [1.0] * 3, ["x"] * 3))
    got = model.forward(model.pack([tree])).features
    path = model.forward(span_of(model, [5, 7, 4], range(3))).features
    assert got is not None
    assert path is not None
    assert same(got[[0, 2, 3]], path)


@pytest.mark.parametrize("tap", [-1, 4])
def test_a_layer_that_is_not_there_is_refused(float_ops: Any, tap: int) -> None:
    model = toy(float_ops)
    model.taps = (tap,)
    with pytest.raises(ValueError, match=f"{tap}; allowed: 0 to 3"):
        model.forward(span_of(model, LONG[:3], range(3)))
