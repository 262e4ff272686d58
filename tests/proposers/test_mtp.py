"""MTP layers that models bring: found in every layout, drafting as plain torch, or refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.api.llm import LLM
from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.native.packing import Packer
from paceline.backends.rows.reference import ReferenceOps
from paceline.build.default_drafts import bundled_drafts
from paceline.cache.model_runner import ModelRunner
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError, UnsupportedModelError
from paceline.disk.packed_folder import write_packed
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.families.config_json import config_from_hf
from paceline.models.tensor_reader import PackedFormat
from paceline.proposers import build_proposers
from paceline.proposers.heads import build
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import Span
from tests.arrays import assert_close, same
from tests.proposers.drive import make_request, propose
from tests.proposers.heads import Tensors, fresh_features
from tests.proposers.mtp import (
    LAYOUTS,
    PlainMtp,
    following_mtp,
    gguf_file,
    info,
    mtp_options,
    mtp_tensors,
    qwen,
    speculators_folder,
    toy_mtp,
    with_mtp,
)
from tests.toy import TOY, VOCAB, toy_folder, toy_runner, toy_tensors

PROMPT = [5, 9, 2, 7, 7, 30, 11]
TAP = TOY.num_layers + 1
native = pytest.mark.skipif(why_not_native() is not None, reason="the extension was not built")


def opened(path: Path) -> Checkpoint:
    return load_checkpoint(path, with_tokenizer=False)


def logits_of(
    checkpoint: Checkpoint | None,
    tokens: list[int],
    target: ModelRunner | None = None,
    **options: Any,
) -> torch.Tensor:
    """What an MTP layer says after each of a text's tokens but the first."""
    proposer = toy_mtp(target or toy_runner(), checkpoint, **options)
    runner, read = proposer._runner, tokens[1:]
    runner.kv.open(0)
    runner.kv.reserve(0, len(read))
    rows = range(len(read))
    batch = runner.pack([Span(0, 0, read, range(-1, len(read) - 1), rows)])
    hidden = fresh_features(tokens, (TAP,))[:-1, 0]
    return torch.as_tensor(runner.forward(batch, inputs=hidden.half().float().numpy()).logits)


def check_logits(found: torch.Tensor, tensors: Tensors, tokens: list[int]) -> None:
    plain = PlainMtp(tensors)
    hidden = plain.fuse(fresh_features(tokens, (TAP,))[:-1])
    wanted, _ = plain.outputs(tokens[1:], hidden)
    assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "own_ends"), [*((layout, False) for layout in LAYOUTS), ("deepseek", True)]
)
def test_every_layout_of_a_folder(tmp_path: Path, layout: str, own_ends: bool) -> None:
    tensors = mtp_tensors(own_ends=own_ends)
    folder = with_mtp(tmp_path, LAYOUTS[layout](tensors), num_nextn_predict_layers=1)
    check_logits(logits_of(opened(folder), PROMPT), tensors, PROMPT)
    assert bundled_drafts(str(folder)) == parse_speculative_config({"method": "mtp"})


def test_a_gguf_file(tmp_path: Path) -> None:
    tensors = mtp_tensors(own_ends=True)
    path = gguf_file(tmp_path / "toy.gguf", tensors)
    assert opened(path).config.num_layers == TOY.num_layers
    check_logits(logits_of(opened(path), PROMPT), tensors, PROMPT)
    assert bundled_drafts(str(path)) == parse_speculative_config({"method": "mtp"})


def test_a_head_of_the_speculators_library(tmp_path: Path) -> None:
    tensors = mtp_tensors()
    folder = speculators_folder(tmp_path / "toy.speculators" / "head", tensors)
    check_logits(logits_of(None, PROMPT, model=str(folder)), tensors, PROMPT)
    toy_folder(with_mtp(tmp_path / "toy", {}))
    wanted = parse_speculative_config({"method": "mtp", "model": str(folder)})
    assert bundled_drafts(str(tmp_path / "toy")) == wanted
    with pytest.raises(UnsupportedModelError, match="--method mtp --draft"):
        opened(folder)


def test_another_form_of_the_model_may_have_it(tmp_path: Path) -> None:
    tensors = mtp_tensors()
    folder = with_mtp(tmp_path, qwen(tensors))
    check_logits(logits_of(None, PROMPT, model=str(folder)), tensors, PROMPT)


def test_a_last_norm_that_is_not_stored_is_the_models(tmp_path: Path) -> None:
    tensors = mtp_tensors()
    folder = with_mtp(
        tmp_path, qwen({n: t for n, t in tensors.items() if n != "model.norm.weight"})
    )
    shared = tensors | {"model.norm.weight": toy_tensors()["model.norm.weight"]}
    check_logits(logits_of(opened(folder), PROMPT), shared, PROMPT)


def test_of_several_layers_the_first_is_used(tmp_path: Path) -> None:
    tensors, second = mtp_tensors(), mtp_tensors(4)
    behind = LAYOUTS["deepseek"](tensors)
    further = {
        name.replace(f"layers.{TOY.num_layers}.", f"layers.{TOY.num_layers + 1}."): tensor
        for name, tensor in LAYOUTS["deepseek"](second).items()
    }
    checkpoint = opened(with_mtp(tmp_path, further | behind))
    Decoder(checkpoint.config, checkpoint.tensors, ReferenceOps("float32"), 64)
    check_logits(logits_of(checkpoint, PROMPT), tensors, PROMPT)


def test_quantised_layers(tmp_path: Path) -> None:
    tensors = mtp_tensors()
    stored = qwen(tensors)
    for name in ("mtp.layers.0.mlp.down_proj", "mtp.fc"):
        weight = stored[f"{name}.weight"]
        scale = weight.abs().max() / 448
        stored[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        stored[f"{name}.weight_scale"] = scale
        rounded = stored[f"{name}.weight"].float() * scale
        tensors[next(n for n, t in tensors.items() if t is weight)] = rounded
    fields = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    checkpoint = opened(with_mtp(tmp_path, stored, **fields))
    check_logits(logits_of(checkpoint, PROMPT), tensors, PROMPT)


@pytest.mark.parametrize("form", [*LAYOUTS, "gguf"])
def test_the_model_runs_without_it(tmp_path: Path, form: str) -> None:
    if form == "gguf":
        checkpoint = opened(gguf_file(tmp_path / "toy.gguf", mtp_tensors()))
    else:
        checkpoint = opened(with_mtp(tmp_path, LAYOUTS[form](mtp_tensors())))
    for part in (checkpoint, checkpoint.first_layers(1)):
        decoder = Decoder(part.config, part.tensors, ReferenceOps("float32"), 64)
        assert len(decoder.layers) == part.config.num_layers
    assert checkpoint.config.num_layers == TOY.num_layers


def test_a_chain_is_that_of_plain_torch() -> None:
    plain, proposer = PlainMtp(mtp_tensors()), following_mtp(num_speculative_tokens=5)
    request, seen = make_request(1, PROMPT), set()
    assert proposer.taps == (TAP,)
    for step in range(8):
        (tree,) = propose(proposer, request)
        features = fresh_features(request.token_ids[:-1], (TAP,))
        assert tree.token_ids == plain.chain(request.token_ids, features, 5)
        seen.update(tree.token_ids)
        request.token_ids += [*tree.token_ids[: step % 4], 3 + step]
    assert len(seen) > 3


@native
@pytest.mark.parametrize("target", ["native-int8", "native-int4"])
@pytest.mark.parametrize("dtype", ["auto", "file", "int8", "int4"])
def test_every_precision_beside_every_target(tmp_path: Path, dtype: str, target: str) -> None:
    path = gguf_file(tmp_path / "toy.gguf", mtp_tensors(own_ends=dtype == "file"), qtype="Q8_0")
    (tree,) = propose(following_mtp(opened(path), target, dtype=dtype), make_request(1, PROMPT))
    assert len(tree) == 4


def test_it_is_found_and_changes_no_answer(tmp_path: Path) -> None:
    folder = str(with_mtp(tmp_path, LAYOUTS["mimo"](mtp_tensors())))
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(folder, dtype="float32") as llm:
        assert llm.proposers == ("suffix", "mtp")
        (drafted,) = llm.generate([PROMPT], params)
    with LLM(folder, dtype="float32", speculative_config=[]) as llm:
        (plain,) = llm.generate([PROMPT], params)
    assert drafted.token_ids == plain.token_ids


@native
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize(
    ("layout", "own_ends"), [*((layout, False) for layout in LAYOUTS), ("deepseek", True)]
)
def test_a_converted_folder_keeps_it(
    tmp_path: Path, layout: str, own_ends: bool, dtype: str
) -> None:
    tensors = LAYOUTS[layout](mtp_tensors(own_ends=own_ends))
    source = opened(with_mtp(tmp_path / "toy", tensors))
    write_packed(source, tmp_path / "packed", Packer(dtype))
    packed = opened(tmp_path / "packed")
    assert bundled_drafts(str(tmp_path / "packed")) == bundled_drafts(str(tmp_path / "toy"))
    target = toy_runner(f"native-{dtype}")
    found, wanted = (logits_of(each, PROMPT, target, dtype=dtype) for each in (packed, source))
    assert same(found, wanted)
    assert packed.num_bytes > 0
    with pytest.raises(ConfigError, match=f"packed as {dtype} and cannot run as bfloat16"):
        toy_mtp(target, packed, dtype="bfloat16")


@native
@pytest.mark.parametrize("case", ["experts", "incomplete", "more than is used"])
def test_a_layer_that_cannot_draft_is_not_converted(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra, _, message = UNFIT[case]
    source = opened(with_mtp(tmp_path / "toy", extra))
    write_packed(source, tmp_path / "packed", Packer("int8"))
    assert re.search(f"the MTP layer is left out: .*{message}", caplog.text)
    packed = opened(tmp_path / "packed")
    assert not any(name.startswith("mtp") for name in packed.tensors)
    assert bundled_drafts(str(tmp_path / "packed")) == ()
    Decoder(packed.config, packed.tensors, CpuOps("int8"), 64)


@native
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mtp.model.eh_proj.0.Q8_0", "eh_proj"),
        ("mtp.model.layers.0.self_attn.qkv_proj.0.Q8_0", "qkv_proj"),
        ("mtp.model.enorm.weight", "has shape"),
    ],
)
def test_a_converted_layer_that_is_damaged_is_refused(
    name: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = opened(with_mtp(tmp_path / "toy", qwen(mtp_tensors())))
    write_packed(source, tmp_path / "packed", Packer("int8"))
    file = tmp_path / "packed" / "packed-00001.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file, PackedFormat("int8").metadata)
    target = info(toy_runner("native-int8"), opened(tmp_path / "packed"))
    options = mtp_options(dtype="auto")
    with pytest.raises(ModelLoadError, match=words):
        build_proposers([options], target, strict=True)
    assert build_proposers([options], target, strict=False) == []
    assert "no drafts by mtp" in caplog.text


# --- what does not fit ----------------------------------------------------------------------------


def changed(**tensors: torch.Tensor | None) -> Tensors:
    """An MTP layer with other tensors, by their names with ``__`` for dots; None takes one away."""
    found = qwen(mtp_tensors())
    for name, tensor in tensors.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    return found


EXPERT = torch.ones(2, 2)
UNFIT: dict[str, tuple[Tensors, type[PacelineError], str]] = {
    "none": ({}, ConfigError, "has no MTP layer"),
    "experts": (
        changed(mtp__layers__0__mlp__experts__0__up_proj__weight=EXPERT),
        UnsupportedModelError,
        "mixture of experts .* mtp.layers.0.mlp.experts.0.up_proj.weight",
    ),
    "gated attention": (
        changed(mtp__layers__0__self_attn__q_proj__weight=torch.ones(64, 32)),
        ModelLoadError,
        "q_proj.weight has shape",
    ),
    "more than is used": (
        changed(mtp__layers__0__scale__weight=EXPERT),
        UnsupportedModelError,
        "has no use",
    ),
    "incomplete": (
        changed(mtp__layers__0__mlp__down_proj__weight=None),
        ModelLoadError,
        "down_proj.weight",
    ),
    "another width": (changed(mtp__fc__weight=EXPERT), ModelLoadError, "eh_proj.weight has shape"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused_or_left_out(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra, error, message = UNFIT[case]
    target = info(toy_runner(), opened(with_mtp(tmp_path, extra)))
    with pytest.raises(error, match=message):
        build_proposers([mtp_options()], target, strict=True)
    assert build_proposers([mtp_options()], target, strict=False) == []
    assert "no drafts by mtp" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": VOCAB + 2000}, "reads 2048 tokens, and the target has 48"),
        ({"hidden_size": 40}, "hidden states of 40 numbers, and the target's have 32"),
    ],
)
def test_another_models_layer_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = with_mtp(tmp_path, qwen(mtp_tensors()), **fields)
    with pytest.raises(ConfigError, match=message):
        build(mtp_options(model=str(folder)), info(toy_runner(), None))


def test_a_target_has_to_be_there() -> None:
    for target in (info(toy_runner(), None), replace(info(toy_runner(), None), runner=None)):
        with pytest.raises(ConfigError, match="none is loaded"):
            build(mtp_options(), target)


@pytest.mark.parametrize("count", [3, 99])
def test_counts_in_gguf_metadata_are_checked(tmp_path: Path, count: int) -> None:
    path = gguf_file(tmp_path / "toy.gguf", mtp_tensors(), count)
    with pytest.raises(ModelLoadError, match=r"nextn_predict_layers = .* from 0 to 2"):
        opened(path)


def test_a_layer_that_is_used_as_an_ordinary_one_is_no_mtp_layer(tmp_path: Path) -> None:
    layers = TOY.num_layers + 1
    checkpoint = opened(
        with_mtp(tmp_path, LAYOUTS["deepseek"](mtp_tensors()), num_hidden_layers=layers)
    )
    with pytest.raises(UnsupportedModelError, match=r"no use for .*eh_proj"):
        Decoder(checkpoint.config, checkpoint.tensors, ReferenceOps("float32"), 64)


def test_models_that_cannot_be_read_bring_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 30)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert bundled_drafts(str(tmp_path)) == bundled_drafts(str(tmp_path / "model.gguf")) == ()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert bundled_drafts(str(tmp_path)) == ()


def test_an_index_of_shards_names_it(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        '{"weight_map": {"model.language_model.mtp_layers.0.input_proj.weight": "a.safetensors"}}'
    )
    assert [config.method for config in bundled_drafts(str(tmp_path))] == ["mtp"]


def test_mimo_is_a_family() -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_nextn_predict_layers": 1}
    mimo, qwen2 = (
        config_from_hf({"model_type": kind, **sizes, **layers}) for kind in ("mimo", "qwen2")
    )
    assert replace(mimo, architecture="qwen2") == qwen2


def test_trees_are_usual_and_no_model_is_needed() -> None:
    (config,) = parse_speculative_config({"method": "mtp"})
    assert (config.model, config.num_speculative_tokens, config.max_tree_nodes) == (None, 5, 16)
    assert config.has_own_kv
    assert not SpeculativeConfig("self", dtype="int8").has_own_kv
