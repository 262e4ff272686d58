"""Inflated models: the shares, and that a large model says what the small one says."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("count", range(1, 12))
def test_shares_are_powers_of_two_that_add_up_to_one(count: int) -> None:
    parts = module("inflate").shares(count)
    assert len(parts) == count
    assert sum(parts) == 1.0
    assert all(torch.frexp(torch.tensor(part))[0] == 0.5 for part in parts)
    if count & (count - 1) == 0:
        assert set(parts) == {1 / count}


@pytest.mark.parametrize("count", range(2, 12))
def test_cancelling_shares_add_up_to_zero_and_none_of_them_is(count: int) -> None:
    parts = module("inflate").cancelling(count)
    assert len(parts) == count
    assert sum(parts) == 0.0
    assert all(parts)


def test_nothing_cancels_without_a_repetition() -> None:
    with pytest.raises(ValueError, match="repeated"):
        module("inflate").cancelling(1)


def test_layers_keep_their_order_and_each_is_live_once() -> None:
    plan = module("inflate").layer_plan(3, 8)
    assert plan == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    with pytest.raises(ValueError, match="cannot hold"):
        module("inflate").layer_plan(3, 2)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 3), (3, 6, 4, 5, 5)])
def test_the_large_model_says_what_the_small_one_says(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Also where the shares differ, and by two engines that know nothing of each other."""
    inflate, check = module("inflate"), module("inflate_check")
    source = inflate.embedded_folder(draft=True)
    facts = inflate.write_inflated(tmp_path, source, inflate.Shape(*sizes))
    found = check.compare(source, tmp_path)
    assert set(found) == {"paceline", "transformers"}
    assert all(answer["same"] for answer in found.values()), found
    assert facts["nonzero_share"] > 0.999
    assert facts["layers"] == sizes[-1] > facts["live_layers"]


def test_no_tensor_is_there_twice_and_the_sums_are_exact(tmp_path: Path) -> None:
    inflate = module("inflate")
    source = inflate.embedded_folder(draft=True)
    inflate.write_inflated(tmp_path, source, inflate.Shape(2, 4, 2, 4, 5))
    small, large = (load_file(f / "model.safetensors") for f in (source, tmp_path))
    matrices = [tensor for tensor in large.values() if tensor.ndim == 2]
    assert not any(
        a.shape == b.shape and torch.equal(a, b) for a, b in itertools.combinations(matrices, 2)
    )
    down = "mlp.down_proj.weight"
    hidden, units = small[f"model.layers.0.{down}"].shape
    for at, expected in ((0, small[f"model.layers.0.{down}"].double()), (1, torch.zeros(()))):
        copies = large[f"model.layers.{at}.{down}"].double().view(2, hidden, 4, units)
        assert (copies.sum(2) == expected).all()


def test_models_that_the_method_does_not_cover_are_refused() -> None:
    inflate = module("inflate")
    source = inflate.embedded_folder(draft=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    shape = inflate.Shape(2, 2, 2, 2, 3)
    with pytest.raises(ValueError, match="key/value"):
        inflate.inflate({}, {**config, "num_key_value_heads": 2}, shape)
    with pytest.raises(ValueError, match="tied"):
        inflate.inflate({}, {**config, "tie_word_embeddings": False}, shape)
    with pytest.raises(ValueError, match="divided"):
        inflate.inflate({}, config, inflate.Shape(2, 2, 3, 2, 3))


def test_a_tenth_of_the_bytes_and_the_sizes_that_the_shapes_promise() -> None:
    inflate = module("inflate")
    for name, low, high in (("0.5b", 0.47e9, 0.55e9), ("1.5b", 1.4e9, 1.6e9)):
        pair = inflate.PAIRS[name]
        sizes = []
        for shape, draft in ((pair.target, False), (pair.draft, True)):
            folder = inflate.embedded_folder(draft)
            c = inflate.inflated_config(json.loads((folder / "config.json").read_text()), shape)
            q, kv = (c[f"num_{k}_heads"] * c["head_dim"] for k in ("attention", "key_value"))
            rows = 2 * q + 2 * kv + 3 * c["intermediate_size"]
            sizes.append(c["hidden_size"] * (rows * c["num_hidden_layers"] + c["vocab_size"]))
        assert low < sizes[0] < high
        assert 0.08 < sizes[1] / sizes[0] < 0.11
