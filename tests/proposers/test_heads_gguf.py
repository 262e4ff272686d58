"""Heads out of GGUF files as llama.cpp has them: the same heads as out of folders, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.native.native import why_not_native
from paceline.build.default_drafts import bundled_drafts, draft_at
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.cli.options import RunOptions
from paceline.cli.settings import speculative_config
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.models.decoder import Decoder
from paceline.proposers.heads import build
from paceline.proposers.heads.checkpoint import HeadCheckpoint, load_head
from paceline.request.span import DraftTree, Span
from tests.arrays import assert_close, same
from tests.loading.gguf_writing import convert
from tests.proposers.dflash import (
    SLIDING,
    FollowingBlocks,
    dflash_config,
    dflash_options,
    dflash_tensors,
    sliding_layers,
)
from tests.proposers.drive import make_request, propose
from tests.proposers.gguf_heads import write_gguf_head
from tests.proposers.heads import (
    HIDDEN,
    KEPT,
    TREE,
    Following,
    Tensors,
    head_config,
    head_options,
    head_tensors,
    made_to_follow,
    target_info,
    write_head,
)
from tests.proposers.parallel_heads import (
    FollowingMarkov,
    dflash2_config,
    dflash2_tensors,
    dspark_config,
    dspark_tensors,
)
from tests.toy import VOCAB, toy_runner

DFLASH = {"block_size": 6, "tokenizer.ggml.mask_token_id": 47}
WINDOW = {
    "attention.sliding_window": 7,
    "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in SLIDING],
}
native = pytest.mark.skipif(why_not_native() is not None, reason="the extension was not built")


def logits_of(head: HeadCheckpoint) -> torch.Tensor:
    """A head's logits after random hidden states."""
    lender, shape = toy_runner().decoder, head.decoder.config
    decoder = Decoder(shape, head.decoder.tensors, lender.ops, 64, lent=lender.ends)
    kv = KVCache(lender.ops.kv_memory(shape, 4, lender.ops.default_kv_dtype))
    runner = ModelRunner(decoder, kv)
    kv.open(1)
    assert kv.reserve(1, 5)
    span = Span(1, 0, [3, 1, 4, 1, 5], range(-1, 4), range(5))
    inputs = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5))
    return runner.forward(runner.pack([span]), inputs=inputs).logits


def draft(place: Path, method: str = "eagle3", **options: Any) -> DraftTree:
    """What a head drafts after a prompt."""
    target = toy_runner(prefix_caching=False)
    proposer = build(head_options(method, model=str(place), **options), target_info(target))
    kinds: dict[str, Any] = {"eagle3": Following, "dflash": FollowingBlocks}
    kind = kinds.get(method, FollowingMarkov)
    followed: Any = made_to_follow(proposer, kind, target)
    (tree,) = propose(followed, make_request(1, [5, 9, 2, 7, 7, 30, 11]))
    assert len(tree)
    return tree


def assert_same(file: Path, folder: Path) -> None:
    found, wanted = load_head(str(file)), load_head(str(folder))
    assert replace(found, decoder=wanted.decoder, fusion=wanted.fusion) == wanted
    told = ("dtype", "norms", "bos_token_id", "eos_token_ids")  # the file has eps as a float32
    shape = wanted.decoder.config
    assert found.decoder.config.norms.eps == pytest.approx(shape.norms.eps, rel=1e-6)
    known = {name: getattr(shape, name) for name in told}
    assert replace(found.decoder.config, **known) == shape
    assert found.fusion is not None
    assert wanted.fusion is not None
    for ours, theirs in (
        (found.decoder.tensors, wanted.decoder.tensors),
        (found.fusion, wanted.fusion),
    ):
        assert sorted(ours) == sorted(theirs)
        for name, tensor in theirs.items():
            assert same(ours[name].astype(tensor.dtype), tensor), name


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize("own_ends", [True, False])
def test_a_file_is_the_head_of_a_folder(tmp_path: Path, own_ends: bool, qtype: str) -> None:
    file = tmp_path / "head.gguf"
    stored = write_gguf_head(file, head_tensors(own_ends=own_ends), qtype=qtype)
    folder = write_head(tmp_path / "head", head_config(own_ends), stored)
    assert_same(file, folder)
    ours, theirs = logits_of(load_head(str(file))), logits_of(load_head(str(folder)))
    assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert draft(file).token_ids == draft(folder).token_ids


FIELDS: dict[str, dict[str, Any]] = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "layers of the first version": {"target_layers": None, "extract_layers": [0, 1, 2]},
}


@pytest.mark.parametrize("case", FIELDS)
def test_what_files_say_of_heads(tmp_path: Path, case: str) -> None:
    tensors = head_tensors()
    if "norm_before_fc" in FIELDS[case]:
        tensors["input_norm.weight"] = torch.rand(3 * HIDDEN)
    stored = write_gguf_head(tmp_path / "head.gguf", tensors, **FIELDS[case])
    flags = {key: value for key, value in FIELDS[case].items() if value is True}
    assert_same(tmp_path / "head.gguf", write_head(tmp_path / "a", head_config(**flags), stored))


@pytest.mark.parametrize("slides", [False, True])
def test_dflash(tmp_path: Path, slides: bool) -> None:
    file, tensors = tmp_path / "head.gguf", dflash_tensors()
    stored = write_gguf_head(file, tensors, "dflash", "F16", **DFLASH | (WINDOW if slides else {}))
    fields = sliding_layers() if slides else {}
    folder = write_head(tmp_path / "head", dflash_config(**fields), stored)
    assert_same(file, folder)
    assert draft(file, "dflash").token_ids == draft(folder, "dflash").token_ids


DSPARK: dict[str, tuple[dict[str, Any], dict[str, Any], Tensors]] = {
    "as llama.cpp's converter writes it": ({}, {}, dspark_tensors()),
    "behind the anchor": ({"sample_from_anchor": False}, {}, dspark_tensors(1)),
    "without a confidence head": (
        {},
        {},
        {n: t for n, t in dspark_tensors().items() if "confidence" not in n},
    ),
    "in layers that slide": (WINDOW, sliding_layers(), dspark_tensors(2)),
    "with the target's ends": ({}, {}, dspark_tensors(own_ends=False)),
}


@pytest.mark.parametrize("qtype", ["F32", "Q8_0"])
@pytest.mark.parametrize("case", DSPARK)
def test_dspark(tmp_path: Path, case: str, qtype: str) -> None:
    keys, fields, tensors = DSPARK[case]
    file, own_ends = tmp_path / "head.gguf", "lm_head.weight" in tensors
    stored = write_gguf_head(file, tensors, "dflash", qtype, **DFLASH | keys)
    anchor = {key: value for key, value in keys.items() if key == "sample_from_anchor"}
    config = dspark_config(own_ends, **fields, **anchor)
    folder = write_head(tmp_path / "head", config, stored)
    found, wanted = load_head(str(file)), load_head(str(folder))
    assert (found.kind, found.block) == (wanted.kind, wanted.block)
    drafts = [draft(place, "dspark", **TREE) for place in (file, folder)]
    assert drafts[0].token_ids == drafts[1].token_ids
    assert drafts[0].accept_probs == pytest.approx(drafts[1].accept_probs, abs=1e-5)
    with pytest.raises(UnsupportedModelError, match="--method dspark --draft"):
        load_checkpoint(file)
    assert draft_at(file).method == draft_at(folder).method == "dspark"


DFLASH2: dict[str, tuple[dict[str, Any], dict[str, Any], Tensors]] = {
    "with the target's ends": ({}, {}, dflash2_tensors()),
    "with ends of its own": (
        {"conv_kernel_size": 3},
        {"conv_kernel_size": 3},
        dflash2_tensors(1, own_ends=True, kernel=3),
    ),
    "in layers that slide": (WINDOW, sliding_layers(), dflash2_tensors(2)),
}


@pytest.mark.parametrize("qtype", ["F32", "Q8_0"])
@pytest.mark.parametrize("case", DFLASH2)
def test_dflash2(tmp_path: Path, case: str, qtype: str) -> None:
    keys, fields, tensors = DFLASH2[case]
    file, config = tmp_path / "head.gguf", dflash2_config(**fields)
    said = {key: config[key] for key in config if key.startswith(("conv_", "selector_"))}
    stored = write_gguf_head(file, tensors, "dflash", qtype, **DFLASH | said | keys)
    folder = write_head(tmp_path / "head", config, stored)
    found, wanted = load_head(str(file)), load_head(str(folder))
    assert (found.kind, found.block) == (wanted.kind, wanted.block)
    assert found.decoder.config.local_conv == wanted.decoder.config.local_conv
    drafts = [draft(place, "dflash2", **TREE) for place in (file, folder)]
    assert drafts[0].token_ids == drafts[1].token_ids
    assert drafts[0].accept_probs == pytest.approx(drafts[1].accept_probs, abs=1e-5)
    assert draft_at(file).method == draft_at(folder).method == "dflash2"


@native
@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0"])
def test_weights_are_used_as_the_file_has_them(tmp_path: Path, qtype: str) -> None:
    file = tmp_path / "head.gguf"
    write_gguf_head(file, head_tensors(), qtype=qtype)
    runner = toy_runner("native-int8", prefix_caching=False)
    proposer = build(head_options(model=str(file), dtype="file"), target_info(runner))
    (tree,) = propose(made_to_follow(proposer, Following, runner), make_request(1, [5, 9, 2]))
    assert len(tree) == 4


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in head_tensors().items() if key != name}


Unfit = tuple[Tensors, dict[str, Any], type[PacelineError], str]
UNFIT: dict[str, Unfit] = {
    "no fc": (without("fc.weight"), {}, ConfigError, "has no fc.weight"),
    "layers": (head_tensors(), {"target_layers": [0, 1, 9]}, ConfigError, "for another target"),
    "layers that are none": (head_tensors(), {"target_layers": 3}, ModelLoadError, "a list of"),
    "vocabulary": (
        without("embed_tokens.weight"),
        {"vocab_size": VOCAB - 1},
        ConfigError,
        "reads 47 tokens",
    ),
    "no vocabulary": (
        without("embed_tokens.weight"),
        {"vocab_size": None},
        ModelLoadError,
        "eagle3.vocab_size = None",
    ),
    "tokens that do not ascend": (
        head_tensors() | {"d2t": torch.full((len(KEPT),), -1).cumsum(0)},
        {},
        ModelLoadError,
        "d2t is damaged",
    ),
    "norms that such a layer has not": (
        head_tensors() | {"layers.0.self_attn.q_norm.weight": torch.ones(8)},
        {},
        UnsupportedModelError,
        "has no use",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    tensors, keys, error, message = UNFIT[case]
    write_gguf_head(tmp_path / "head.gguf", tensors, **keys)
    with pytest.raises(error, match=message):
        build(head_options(model=str(tmp_path / "head.gguf")), target_info(toy_runner()))


def test_relatives_of_dflash_are_refused(tmp_path: Path) -> None:
    write_gguf_head(tmp_path / "a.gguf", dflash_tensors(), "dflash", logit_scale=2, **DFLASH)
    with pytest.raises(UnsupportedModelError, match="output_multiplier = 2"):
        load_head(str(tmp_path / "a.gguf"))
    tensors = dflash_tensors() | {"hc_head_fn.weight": torch.ones(4, 32)}
    write_gguf_head(tmp_path / "head.gguf", tensors, "dflash", **DFLASH)
    with pytest.raises(UnsupportedModelError, match=r"hc_head_fn\.weight: it is a relative"):
        load_head(str(tmp_path / "head.gguf"))


def test_a_method_needs_a_head_of_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "head.gguf"
    write_gguf_head(file, head_tensors())
    with pytest.raises(ConfigError, match='method "eagle3" is for it'):
        build(dflash_options(model=str(file)), target_info(toy_runner()))
    with pytest.raises(UnsupportedModelError, match=f"--method eagle3 --draft {file}"):
        load_checkpoint(file)
    convert("llama", tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf is no head"):
        load_head(str(tmp_path / "model.gguf"))


def test_a_draft_that_is_named_by_itself_or_lies_with_a_model(tmp_path: Path) -> None:
    place = tmp_path / "model.speculators" / "head.gguf"
    place.parent.mkdir()
    write_gguf_head(place, head_tensors())
    model = tmp_path / "model.gguf"
    convert("llama", model)
    *_, named = speculative_config(RunOptions(prompt=None, draft=[str(place)]), "embedded")
    (beside,) = bundled_drafts(str(model))
    for config in (named, beside):
        assert (config.method, config.model) == ("eagle3", str(place))
