"""Inflated models: the shares, and that a large model says what the small one says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers.heads.checkpoint import load_head
from paceline_lab.train.model_files import load_model, save_model
from paceline_lab.train.surgery import hybridise
from tests.arrays import assert_close, same
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.programs import module
from tests.proposers import heads as plain_heads
from tests.proposers.heads import PlainHead, head_config, head_tensors, write_head
from tests.saying import compare, paceline_says
from tests.text.vocabularies import byte_fallback_json

CHANGES = {"vocab_size": 600, "max_position_embeddings": 256}


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
    inflate = module("inflate")
    source = inflate.embedded_folder(draft=True)
    facts = inflate.write_inflated(tmp_path, source, inflate.Shape(*sizes))
    found = compare(source, tmp_path)
    assert set(found) == {"paceline", "transformers"}
    assert all(answer["same"] for answer in found.values()), found
    assert facts["nonzero_share"] > 0.999
    assert facts["layers"] == sizes[-1] > facts["live_layers"]


def test_a_large_hybrid_says_what_the_small_one_says(tmp_path: Path) -> None:
    inflate = module("inflate")
    source, large = tmp_path / "small", tmp_path / "large"
    dense = load_model(inflate.embedded_folder(draft=True))
    hybrid = hybridise(dense, "da", seed=0)
    source.mkdir()
    save_model(source, hybrid, inflate.embedded_folder(draft=True), "bfloat16", "")
    facts = inflate.write_inflated(large, source, inflate.Shape(2, 2, 2, 2, 5))
    found = compare(source, large)
    assert set(found) == {"paceline", "transformers"}
    assert all(answer["same"] for answer in found.values()), found
    kinds = load_checkpoint(large).config.recurrent.layers
    assert kinds == (True, True, False, False, False)
    assert facts["layers"] == 5


def test_no_tensor_is_there_twice_and_the_sums_are_exact(tmp_path: Path) -> None:
    inflate = module("inflate")
    source = inflate.embedded_folder(draft=True)
    inflate.write_inflated(tmp_path, source, inflate.Shape(2, 4, 2, 4, 5))
    small, large = (load_file(f / "model.safetensors") for f in (source, tmp_path))
    matrices = [tensor for tensor in large.values() if tensor.ndim == 2]
    assert not any(
        a.shape == b.shape and same(a, b) for a, b in itertools.combinations(matrices, 2)
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
    with pytest.raises(ValueError, match="as often as the others"):
        inflate.inflate({}, {**config, "num_key_value_heads": 2}, inflate.Shape(2, 2, 1, 2, 3))
    with pytest.raises(ValueError, match="tied"):
        inflate.inflate({}, {**config, "tie_word_embeddings": False}, shape)
    with pytest.raises(ValueError, match="divided"):
        inflate.inflate({}, config, inflate.Shape(2, 2, 3, 2, 3))


@pytest.mark.parametrize("embedding", [2, 4])
def test_a_widened_gguf_file_says_what_the_file_says(tmp_path: Path, embedding: int) -> None:
    """With several key/value heads, which the embedded models do not have."""
    wide = module("research.inflate_gguf")
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    tokenizer = tokenizer_metadata(json.loads(byte_fallback_json()), "llama")
    convert("llama-tied", small, metadata=tokenizer, changes=CHANGES)
    facts = wide.write_widened(small, large, embedding)
    prompt = [5, 17, 300, 44, 8, 8, 91]
    (a, a_text), (b, b_text) = (paceline_says(path, prompt) for path in (small, large))
    assert (a - b).abs().max() < 1e-4
    assert a_text == b_text
    before, after = (load_checkpoint(path) for path in (small, large))
    assert before.config.num_kv_heads > 1
    assert after.config.hidden_size == embedding * before.config.hidden_size == facts["hidden"]
    assert after.config.num_kv_heads == embedding * before.config.num_kv_heads
    assert after.config.intermediate_size == before.config.intermediate_size
    text = "the fox and the dog"
    assert before.tokenizer.encode(text) == after.tokenizer.encode(text)


def test_a_widened_gguf_file_may_keep_the_types_of_the_file(tmp_path: Path) -> None:
    wide = module("research.inflate_gguf")
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    tokenizer = tokenizer_metadata(json.loads(byte_fallback_json()), "llama")
    convert("llama-tied", small, metadata=tokenizer, changes=CHANGES)
    facts = wide.write_widened(small, large, 2, units=2, as_stored=True)
    before, after = (
        {t.name: t.tensor_type for t in wide.Source.read(path).reader.tensors}
        for path in (small, large)
    )
    assert after == before
    prompt = [5, 17, 300, 44, 8, 8, 91]
    (a, _), (b, _) = (paceline_says(path, prompt) for path in (small, large))
    assert (a - b).abs().max() < 1e-2
    assert load_checkpoint(large).config.intermediate_size == facts["intermediate"]


def test_a_widened_head_says_what_the_head_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, tokens = head_tensors(seed=3), [5, 17, 9, 9, 2]
    folder = write_head(tmp_path / "small", head_config(), small)
    wide = module("research.inflate_head").write_widened_head(folder, tmp_path / "wide", 2)
    config = json.loads((wide / "config.json").read_text())
    stored = load_file(wide / "model.safetensors")
    large = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    features = torch.randn(len(tokens), 3, plain_heads.HIDDEN)
    head = PlainHead(small, head_config())
    logits, output = head.forward(tokens, head.fuse(features))
    for name in ("HEADS", "KV_HEADS"):
        monkeypatch.setattr(plain_heads, name, 2 * getattr(plain_heads, name))
    head = PlainHead(large, config)
    again, twice = head.forward(tokens, head.fuse(features.repeat(1, 1, 2)))
    assert_close(again, logits, rtol=1e-3, atol=1e-3)
    assert_close(twice, output.repeat(2), rtol=1e-3, atol=1e-3)
    layer, before = config["transformer_layer_config"], head_config()["transformer_layer_config"]
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert [layer[name] for name in sizes] == [2 * before[name] for name in sizes]
    assert load_head(str(wide)).decoder.config.head_dim == plain_heads.HEAD_DIM


def test_a_random_model_has_inputs_far_larger_than_the_rest(tmp_path: Path) -> None:
    wide = module("research.inflate_gguf")
    small, random = tmp_path / "small.gguf", tmp_path / "random.gguf"
    tokenizer = tokenizer_metadata(json.loads(byte_fallback_json()), "llama")
    convert("llama-tied", small, metadata=tokenizer, changes=CHANGES)
    wide.write_outliers(small, random, seed=3)
    norm = np.abs(load_checkpoint(random).tensors["model.layers.0.input_layernorm.weight"])
    assert norm.max() > 20 * np.median(norm)
    again = tmp_path / "again.gguf"
    wide.write_outliers(small, again, seed=3)
    assert random.read_bytes() == again.read_bytes()


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
