"""Adapters on every backend: the numbers of merged weights, and rows that stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.native.native import why_not_native
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.loading.adapter import load_adapter
from paceline.models.decoder import Decoder
from paceline.models.threads import set_num_threads
from paceline.request.span import Span
from tests.adapters import adapter_folder, adapter_tensors, merged
from tests.arrays import arrays, same, tensor
from tests.contracts.test_ops import backend, on_backends, threads
from tests.toy import TOY, VOCAB, toy_ops, toy_tensors

__all__ = ["backend", "threads"]
TREE = [-1, 0, 0, 1, 1, 2, 3, 6, 2]
TOKENS = [(7 * i * i + 3) % VOCAB for i in range(47)]
ADAPTERS: Sequence[dict[str, Any]] = (
    {"rank": 4},
    {"rank": 37, "dtype": torch.bfloat16},
    {"rank": 3, "targets": ("v_proj", "down_proj"), "dtype": torch.float16},
)


def runner(ops: Any, tensors: dict[str, Any] | None = None) -> ModelRunner:
    decoder = Decoder(TOY, arrays(tensors or toy_tensors()), ops, TOY.max_position)
    memory = ops.kv_memory(TOY, 60, ops.default_kv_dtype)
    return ModelRunner(decoder, KVCache(memory, prefix_caching=False))


def loaded(model: ModelRunner, folder: Path) -> list[Any]:
    """The adapters, and none."""
    found: list[Any] = [None]
    for seed, options in enumerate(ADAPTERS):
        added = adapter_tensors(toy_tensors(), seed, **options)
        path = adapter_folder(folder / str(seed), added, r=options["rank"])
        found.append(model.adapter(load_adapter(path, TOY, {})))
    return found


def logits(model: ModelRunner, spans: Sequence[Span], adapters: Sequence[Any]) -> torch.Tensor:
    return tensor(model.forward(model.pack(spans, adapters)).logits)


def alone(model: ModelRunner, tokens: Sequence[int], adapter: Any, chunk: int = 1) -> torch.Tensor:
    """Logits of every row of a text, which is read in chunks."""
    model.kv.poison_free()
    model.kv.open(9)
    rows = []
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        model.kv.reserve(9, len(part))
        span = Span(9, at, part, range(-1, len(part) - 1), range(len(part)))
        rows.append(logits(model, [span], [adapter]))
        model.kv.commit(9, range(len(part)))
    model.kv.free(9)
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["float32", "native-float32"])
@pytest.mark.parametrize("index", range(len(ADAPTERS)))
def test_an_adapter_is_what_it_adds_to_the_weights(dtype: str, index: int, tmp_path: Path) -> None:
    options = ADAPTERS[index]
    model = runner(toy_ops(dtype))
    added = adapter_tensors(toy_tensors(), index, **options)
    whole = runner(toy_ops(dtype), merged(toy_tensors(), added, 8 / options["rank"]))
    got = alone(model, TOKENS, loaded(model, tmp_path)[1 + index], 30)
    want, plain = (alone(each, TOKENS, None, 30) for each in (whole, model))
    assert (got - want).abs().max() < 1e-3 * want.abs().max()
    assert (plain - want).abs().max() > 0.05 * want.abs().max()


@pytest.mark.skipif(why_not_native() is not None, reason="needs the native kernels")
@pytest.mark.parametrize("index", range(len(ADAPTERS)))
def test_8_bits_are_no_farther_from_the_truth_than_merged_weights_in_8_bits(
    index: int, tmp_path: Path
) -> None:
    options = ADAPTERS[index]
    added = adapter_tensors(toy_tensors(), index, **options)
    weights = merged(toy_tensors(), added, 8 / options["rank"])
    model = runner(toy_ops("native-int8"))
    got = alone(model, TOKENS, loaded(model, tmp_path)[1 + index], 30)
    dtypes = "native-float32", "native-int8"
    truth, whole = (alone(runner(toy_ops(each), weights), TOKENS, None, 30) for each in dtypes)
    assert (got - truth).square().mean() < 1.5 * (whole - truth).square().mean()
    assert (got - truth).square().mean() < 3e-3 * truth.square().mean()


@on_backends("count", [1, 2])
def test_rows_of_mixed_adapters_stand_alone(backend: Any, count: int, tmp_path: Path) -> None:
    """Prompts, trees and single tokens of all adapters, and of none, in one forward."""
    model = runner(backend)
    adapters = loaded(model, tmp_path)
    truth = [alone(model, TOKENS, adapter) for adapter in adapters]
    set_num_threads(count)
    chosen = (1, 0, 2, 2, 3, 1, 0)
    given = [adapters[i] for i in chosen]
    for request in range(len(given)):  # prompts of different lengths, in one batch
        model.kv.open(request)
        model.kv.reserve(request, 5 + 7 * request)
    spans = [
        Span(i, 0, TOKENS[: 5 + 7 * i], range(-1, 4 + 7 * i), range(5 + 7 * i))
        for i in range(len(given))
    ]
    got = logits(model, spans, given)
    want = [truth[each][: 5 + 7 * i] for i, each in enumerate(chosen)]
    assert same(got, torch.cat(want))
    for request, span in enumerate(spans):
        model.kv.commit(request, range(len(span.token_ids)))
    check_trees(model, given)


def check_trees(model: ModelRunner, adapters: Sequence[Any]) -> None:
    """The next nodes of requests that have read their prompts."""
    spans, paths = [], []
    for request, _ in enumerate(adapters):
        start = 5 + 7 * request
        nodes = [-1, 0] if request % 2 else TREE
        tokens = [(request + 3 * node) % VOCAB for node in range(len(nodes))]
        assert model.kv.reserve(request, len(nodes))
        spans.append(Span(request, start, tokens, nodes, range(len(nodes))))
        for node in range(len(nodes)):
            path, at = [], node
            while at >= 0:
                path.insert(0, tokens[at])
                at = nodes[at]
            paths.append((request, TOKENS[:start] + path))
    got = logits(model, spans, adapters)
    for row, (request, path) in zip(got, paths, strict=True):
        assert same(row, alone(model, path, adapters[request], len(path))[-1])


@pytest.mark.skipif(why_not_native() is not None, reason="needs the native kernels")
def test_native_adapters_are_checked(tmp_path: Path) -> None:
    model, other = (runner(toy_ops("native-float32")) for _ in range(2))
    layers = load_adapter(adapter_folder(tmp_path, adapter_tensors(toy_tensors())), TOY, {})
    adapter, foreign = model.adapter(layers), other.adapter(layers)
    model.kv.open(0)
    model.kv.reserve(0, 1)
    spans = [Span.chunk(0, 0, [3], True)]
    for given, message in (([foreign], "another decoder"), ([adapter] * 2, "as many adapters")):
        with pytest.raises(ValueError, match=message):
            model.pack(spans, given)
    with pytest.raises(ValueError, match="another number of layers"):
        model.adapter(layers[:1])
    (part,) = layers[0]["o"]
    for wrong in (part._replace(down=part.down[:, :-1]), part._replace(first=1)):
        with pytest.raises(ValueError, match=r"has other (inputs|outputs)"):
            model.adapter([{"o": [wrong]}, {}])


@on_backends("name", ["plain"])
def test_rows_without_an_adapter_have_the_bits_of_a_batch_without(
    backend: Any, name: str, tmp_path: Path
) -> None:
    model = runner(backend)
    adapter = loaded(model, tmp_path)[1]
    for request in (0, 1):
        model.kv.open(request)
        model.kv.reserve(request, 20)
    spans = [Span(i, 0, TOKENS[:20], range(-1, 19), range(20)) for i in (0, 1)]
    plain, mixed = logits(model, spans, ()), logits(model, spans, [adapter, None])
    assert same(plain[20:], mixed[20:])
    assert not same(plain[:20], mixed[:20])
