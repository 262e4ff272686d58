"""Gemma 3n and 4: layers that differ, share keys and values, and have inputs of their own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer, read_layers
from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.memory_needs import bytes_per_block
from paceline.core.errors import ModelLoadError, UnsupportedModelError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.backend import KV_BYTES
from paceline.models.families.config_json import config_from_hf
from paceline.models.layer_sizes import HeadSizes
from paceline.models.threads import set_num_threads
from paceline.request.span import DraftTree, Span
from tests.arrays import assert_close, same
from tests.loading.gguf_writing import convert
from tests.models.reference import VOCAB, Driver, edit, save_model, saved_model
from tests.quick import in_turns

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {"reference": ReferenceOps, **({} if why_not_native() else {"native": CpuOps})}
GEMMA4 = ("gemma4", "gemma4-inputs", "gemma4-moe")  # a unified one's text is like the first
FAMILIES = (*GEMMA4, "gemma3n")
backends = pytest.mark.parametrize("backend", KINDS)
families = pytest.mark.parametrize("family", FAMILIES)


def driver(folder: Path, backend: str, **options: Any) -> Driver:
    return Driver.of(folder, max_len=64, ops=KINDS[backend]("float32"), **options)


def want(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(("family", "backend", "kv_dtype"), in_turns(FAMILIES, KINDS, KV_BYTES))
def test_neither_chunks_nor_threads_change_a_bit(
    tmp_path: Path, family: str, kv_dtype: str, backend: str
) -> None:
    save_model(family, tmp_path)
    whole = driver(tmp_path, backend, kv_dtype=kv_dtype)
    truth = whole.chunk(TOKENS)
    for count, cuts in ((1, [0, 1, 17, 20, 33, 40]), (2, [0, 5, 6, 40])):
        set_num_threads(count)
        parts = whole.again()
        chunks = [parts.chunk(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
        assert same(torch.cat(chunks), truth)


@backends
@families
def test_a_tree_has_the_bits_of_its_paths(tmp_path: Path, family: str, backend: str) -> None:
    """The committed path is moved in every layer's keys and values, those of both sizes."""
    save_model(family, tmp_path)
    draft = DraftTree([5, 9, 7, 7], [-1, -1, 0, 1], [1.0] * 4, ["x"] * 4)
    tree = driver(tmp_path, backend)
    chain = tree.again()
    tree.chunk(TOKENS[:20])
    chain.chunk(TOKENS[:20])
    found = tree.run(draft, TOKENS[20], path=[0, 2, 4])
    truth = torch.cat([chain.chunk([token]) for token in (TOKENS[20], 9, 7)])
    assert same(found[[0, 2, 4]], truth)
    assert same(tree.chunk(TOKENS[20:]), chain.chunk(TOKENS[20:]))


@backends
@families
def test_logits_of_both_backends(tmp_path: Path, family: str, backend: str) -> None:
    model = saved_model(family, tmp_path)
    truth = want(model, TOKENS)
    assert_close(driver(tmp_path, backend).chunk(TOKENS), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@families
def test_both_backends_hand_out_the_same_streams(tmp_path: Path, family: str) -> None:
    """Of several residual streams the active one; HF's hidden states are all of them."""
    save_model(family, tmp_path)
    found = []
    for backend in KINDS:
        one = driver(tmp_path, backend)
        one.runner.taps = range(one.checkpoint.config.num_layers + 2)
        assert one.kv.reserve(0, len(TOKENS))
        span = Span.chunk(0, 0, TOKENS, sample=True)
        found.append(torch.from_numpy(one.runner.forward(one.runner.pack([span])).features))
    assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    assert found[0].std(dim=(0, 2)).min() > 0.05


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@families
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_converted_folder_is_the_same(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(family, tmp_path / "plain")
    source = load_checkpoint(tmp_path / "plain", with_tokenizer=False)
    write_packed(source, tmp_path / "packed", Packer(dtype))
    packed = load_checkpoint(tmp_path / "packed", with_tokenizer=False)
    found, truth = (
        Driver(each, max_len=64, ops=CpuOps(dtype)).chunk(TOKENS) for each in (packed, source)
    )
    assert same(found, truth)
    assert len(read_layers(packed, packed.config, CpuOps("int4"))) == packed.config.num_layers


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@families
@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0"])
def test_a_quantised_file(tmp_path: Path, family: str, qtype: str) -> None:
    """All matrices in blocks, the layers' inputs among them, and packed as they are."""
    changes = {"intermediate_size": 96, "moe_intermediate_size": 96}
    if family in ("gemma4-inputs", "gemma3n"):
        changes["hidden_size_per_layer_input"] = 32
    if family == "gemma3n":
        changes = {**changes, "laurel_rank": 32}
    convert(family, tmp_path / "m.gguf", qtype=qtype, changes=changes)
    source = load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False)
    assert source.is_quantised
    write_packed(source, tmp_path / "packed", Packer("file"))
    packed = load_checkpoint(tmp_path / "packed", with_tokenizer=False)
    native, reference, again = (
        Driver(each, max_len=64, ops=ops("file")).chunk(TOKENS)
        for each, ops in ((source, CpuOps), (source, ReferenceOps), (packed, CpuOps))
    )
    assert same(native, again)
    assert ((native - reference).abs() / reference.std()).median() < 0.02


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention.sliding_window_pattern": 6}, "which layers have a sliding window"),
        ({"feed_forward_length": [112, 224]}, "feed_forward_length of 2 layers; there are 6"),
        ({"attention.shared_kv_layers": 5}, "none of the first 1 layers is full"),
    ],
)
def test_a_file_that_contradicts_itself(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    metadata = {f"ARCH.{key}": value for key, value in changes.items()}
    convert("gemma4-inputs", tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError, match=said):
        load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False)


def test_rotary_factors_of_another_form(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1.0] * 8 + [2.0] * 8)}
    convert("gemma4", tmp_path / "m.gguf", extra_tensors=factors)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight is of another form"):
        load_checkpoint(tmp_path / "m.gguf", with_tokenizer=False)


def hub_form(folder: Path, **changes: Any) -> None:
    """Say of the full layers what the published configurations say, in their keys."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("per_layer_config")
    sizes = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps({**raw, **sizes, **changes}))


@pytest.mark.parametrize("family", GEMMA4)
def test_the_published_form_says_the_same(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path)
    told = load_checkpoint(tmp_path, with_tokenizer=False).config
    hub_form(tmp_path, use_bidirectional_attention="vision")  # of images alone
    assert load_checkpoint(tmp_path, with_tokenizer=False).config == told


def test_the_sizes_of_each_layer(tmp_path: Path) -> None:
    save_model("gemma4-inputs", tmp_path)
    config = load_checkpoint(tmp_path, with_tokenizer=False).config
    assert [config.heads_of(layer) for layer in (0, 1)] == [HeadSizes(16, 2), HeadSizes(32, 2)]
    assert [config.attention.kv_layer(layer) for layer in range(6)] == [0, 1, 2, 1, 2, 1]
    assert [config.mlp_width(layer) for layer in range(6)] == [112] * 3 + [224] * 3
    kept = 2 * 16 + 32  # dimensions of the heads of layers that own keys and values
    assert bytes_per_block(config, "float32") == kept * 2 * 2 * 16 * 4  # heads, both, tokens


def test_what_gemma_3n_leaves_out(tmp_path: Path) -> None:
    """The first ten layers of many keep few gates, and each fifth layer is a full one."""
    save_model(
        "gemma3n",
        tmp_path,
        num_hidden_layers=15,
        num_kv_shared_layers=5,
        layer_types=None,
        activation_sparsity_pattern=None,
        intermediate_size=64,
    )
    told = load_checkpoint(tmp_path, with_tokenizer=False).config
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "activation_sparsity_pattern"):
        raw.pop(key)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 64}))
    assert load_checkpoint(tmp_path, with_tokenizer=False).config == told
    assert [layer for layer in range(15) if told.mlp.sparsity[layer]] == list(range(10))
    assert [layer for layer in range(15) if not told.attention.is_sliding(layer)] == [4, 9, 14]


@backends
def test_another_stream_than_the_first_may_be_active(tmp_path: Path, backend: str) -> None:
    changes = {"altup_active_idx": 2, "altup_num_inputs": 3, "altup_correct_scale": False}
    model = saved_model("gemma3n", tmp_path, **changes)
    found = driver(tmp_path, backend).chunk(TOKENS)
    assert_close(found, want(model, TOKENS), atol=1e-4, rtol=1e-4)


def test_the_last_layer_is_a_full_one(tmp_path: Path) -> None:
    save_model("gemma4", tmp_path)
    truth = load_checkpoint(tmp_path, with_tokenizer=False).config
    raw = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path / "config.json", layer_types=[*raw["layer_types"][:-1], "sliding_attention"])
    assert load_checkpoint(tmp_path, with_tokenizer=False).config == truth


def test_shared_layers_may_keep_weights_that_nothing_reads(tmp_path: Path) -> None:
    """Some checkpoints have keys and values of layers that read those of others."""
    model = saved_model("gemma4-inputs", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    attention = "model.layers.4.self_attn."
    unread = {f"{attention}{name}_proj.weight": torch.ones(32, 64) for name in "kv"}
    unread[attention + "k_norm.weight"] = torch.ones(16)
    save_file(tensors | unread, tmp_path / "model.safetensors")
    found = driver(tmp_path, "reference").chunk(TOKENS)
    assert_close(found, want(model, TOKENS), atol=1e-4, rtol=1e-4)
    owned = {"model.layers.2.self_attn.v_norm.weight": torch.ones(16)}
    save_file(tensors | owned, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="no use for 1"):
        driver(tmp_path, "reference")


@families
def test_inside_a_multimodal_checkpoint(tmp_path: Path, family: str) -> None:
    model = saved_model(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("architectures")
    kind = raw["model_type"].removesuffix("_text")
    outer = {"model_type": kind, "text_config": raw, "vision_config": {}, "audio_config": {}}
    outer["architectures"] = [kind.capitalize() + "ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(outer))
    inner = {"model.language_model." + k.removeprefix("model."): v for k, v in tensors.items()}
    names = ("vision_tower.x", "audio_tower.x", "embed_vision.x", "embed_audio.x")
    others = {"model." + name: torch.ones(1) for name in names}
    save_file(inner | others, tmp_path / "model.safetensors")
    found = driver(tmp_path, "reference").chunk(TOKENS)
    assert_close(found, want(model, TOKENS), atol=1e-4, rtol=1e-4)


def test_the_first_layers_by_themselves(tmp_path: Path) -> None:
    save_model("gemma4-inputs", tmp_path)
    first = load_checkpoint(tmp_path, with_tokenizer=False).first_layers(4)
    assert [first.config.attention.kv_layer(layer) for layer in range(4)] == [0, 1, 2, 1]
    for ops in KINDS.values():
        found = Driver(first, max_len=64, ops=ops("float32")).chunk(TOKENS)
        assert torch.isfinite(found).all()


@backends
def test_a_token_that_the_inputs_do_not_know_is_read_as_the_first(
    tmp_path: Path, backend: str
) -> None:
    model = saved_model("gemma4-inputs", tmp_path, vocab_size_per_layer_input=200)
    model.model.embed_tokens_per_layer.weight = torch.nn.Parameter(
        torch.cat([model.model.embed_tokens_per_layer.weight[:200]] + [padding(model)] * 100)
    )
    assert max(TOKENS) >= 200
    found = driver(tmp_path, backend).chunk(TOKENS)
    assert_close(found, want(model, TOKENS), atol=1e-4, rtol=1e-4)


def padding(model: Any) -> torch.Tensor:
    return model.model.embed_tokens_per_layer.weight[:1]


REFUSED = {
    "no-source": ({"num_kv_shared_layers": 5}, "none of the first 1 layers is full"),
    "all-shared": ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
    "odd-heads": ({"per_layer_config": {"1": {"head_dim": 31}}}, "layer 1"),
    "kv-heads": ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "layer 1"),
    "no-object": ({"per_layer_config": {"1": 3}}, "per_layer_config.1"),
    "all-see-all": ({"use_bidirectional_attention": "all"}, "bidirectional"),
    "no-streams": ({"altup_num_inputs": 1}, "altup_num_inputs"),
    "inputs": ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    save_model("gemma4-inputs", tmp_path)
    changes, said = REFUSED[case]
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=said):
        config_from_hf({**raw, **changes})
