"""Heads out of their folders: layouts, formats, and what is refused because it does not fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import torch

from paceline.backends.native.native import why_not_native
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers import build_proposers
from paceline.proposers.base import TargetInfo
from paceline.proposers.heads import build
from paceline.proposers.heads.checkpoint import LAYER_IDS, load_head
from paceline.proposers.heads.proposer import HeadProposer
from paceline.request.span import DraftTree
from tests.proposers.dflash import dflash_config, dflash_options, dflash_tensors, layer_config
from tests.proposers.drive import make_request, propose
from tests.proposers.heads import (
    HIDDEN,
    KEPT,
    Following,
    as_original,
    head_config,
    head_options,
    head_tensors,
    target_info,
    write_head,
)
from tests.proposers.vocabularies import toy_tokenizer
from tests.toy import VOCAB, toy_runner

PROMPT = [5, 9, 2, 7, 7, 30, 11]
USED = VOCAB - 2
"""Tokens of a tokenizer, where the target's embedding has more rows."""
LOOKUP = SpeculativeConfig(method="prompt_lookup")
native = pytest.mark.skipif(why_not_native() is not None, reason="the extension was not built")


def info(**other: Any) -> TargetInfo:
    return replace(target_info(toy_runner()), **other)


def draft(folder: Path, dtype: str = "float32", target: str = "float32", **other: Any) -> DraftTree:
    """What a head of this folder drafts after the prompt."""
    runner = toy_runner(target, prefix_caching=False)
    described = replace(target_info(runner), **other)
    proposer = build(head_options(model=str(folder), dtype=dtype), described)
    proposer.__class__ = Following
    assert isinstance(proposer, Following)
    proposer.whole, runner.taps = runner, proposer.taps
    (tree,) = propose(proposer, make_request(1, PROMPT))
    assert len(tree) == 4
    return tree


def test_both_layouts_are_one_head(tmp_path: Path) -> None:
    config, tensors = head_config(), head_tensors()
    new = write_head(tmp_path / "new", config, tensors)
    old = write_head(tmp_path / "old", *as_original(config, tensors))
    assert draft(new) == draft(old)
    for folder in (new, old):
        head = load_head(str(folder))
        assert head.layer_ids == (0, 1, 2)
        assert head.decoder.config.draft_vocab_size == len(KEPT)
        assert (head.name, sorted(head.fusion)) == (folder.name, ["fc.weight"])


def test_a_whole_vocabulary_may_have_a_map_of_its_own(tmp_path: Path) -> None:
    tensors = head_tensors(own_ends=False)
    plain = write_head(tmp_path / "a", head_config(False), tensors)
    identity = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB).bool()}
    assert draft(plain) == draft(write_head(tmp_path / "b", head_config(False), tensors | identity))


def test_fc_may_have_a_bias(tmp_path: Path) -> None:
    tensors = head_tensors() | {"fc.bias": 5 * torch.randn(HIDDEN)}
    biased = write_head(tmp_path / "a", head_config(), tensors)
    assert draft(biased) != draft(write_head(tmp_path / "b", head_config(), head_tensors()))


@native
@pytest.mark.parametrize("target", ["native-int8", "native-int4"])
@pytest.mark.parametrize("dtype", ["auto", "file", "float32", "bfloat16", "int8", "int4"])
def test_every_precision_beside_every_target(tmp_path: Path, dtype: str, target: str) -> None:
    for own_ends in (True, False):
        folder = tmp_path / str(own_ends)
        tensors = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in head_tensors(own_ends=own_ends).items()
        }
        write_head(folder, head_config(own_ends), tensors)
        draft(folder, dtype, target)


def test_ends_are_lent_and_not_copied(tmp_path: Path) -> None:
    target = info()
    assert target.runner is not None
    folder = write_head(tmp_path, head_config(False), head_tensors(own_ends=False))
    proposer = build(head_options(model=str(folder)), target)
    decoder = proposer._runner.decoder
    assert decoder.embedding is target.runner.decoder.embedding
    assert decoder.head is target.runner.decoder.head


def wider() -> dict[str, torch.Tensor]:
    return head_tensors() | {"fc.weight": torch.randn(HIDDEN, 3 * (HIDDEN + 8))}


def without(name: str, **options: Any) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in head_tensors(**options).items() if key != name}


def layer(**fields: Any) -> dict[str, Any]:
    config = head_config()
    return config | {"transformer_layer_config": config["transformer_layer_config"] | fields}


def padded(size: int, num_kept: int = 0) -> dict[str, Any]:
    """The configuration of a head with so many rows in its embedding, and some in its output."""
    return layer(vocab_size=size) | {"draft_vocab_size": num_kept or size}


def pruned_to(count: int) -> dict[str, torch.Tensor]:
    """A head of the first tokens alone, without an embedding of its own."""
    tensors = without("embed_tokens.weight")
    return tensors | {name: tensors[name][:count] for name in ("lm_head.weight", "d2t")}


@pytest.mark.parametrize("size", [USED, VOCAB + 16])
@pytest.mark.parametrize("num_kept", [0, 30])
def test_vocabularies_may_be_padded_differently(tmp_path: Path, size: int, num_kept: int) -> None:
    tensors = pruned_to(num_kept) if num_kept else head_tensors(own_ends=False)
    tokenizer = toy_tokenizer(ascii_letters[:USED])
    folders = [tmp_path / str(rows) for rows in (VOCAB, size)]
    for folder, rows in zip(folders, (VOCAB, size), strict=True):
        write_head(folder, padded(rows, num_kept), tensors)
    usual, other = (draft(folder, tokenizer=tokenizer) for folder in folders)
    assert other == usual


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "embedding": (padded(VOCAB + 1, len(KEPT)), head_tensors(), "model.embed_tokens of its own"),
    "output": (
        padded(VOCAB + 1),
        head_tensors(own_ends=False) | {"lm_head.weight": torch.ones(VOCAB + 1, HIDDEN)},
        "lm_head of its own",
    ),
    "far more tokens": (padded(2048), head_tensors(own_ends=False), "that is at most 1024 rows"),
    "fewer tokens": (padded(USED - 1), head_tensors(own_ends=False), "46 tokens of the target are"),
    "other tokens": (
        padded(VOCAB + 16, 30),
        pruned_to(30) | {"d2t": torch.full((30,), VOCAB - 29)},
        "the head drafts token 48",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_more_than_padding_is_refused(tmp_path: Path, case: str) -> None:
    config, tensors, message = DIFFERENT[case]
    write_head(tmp_path, config, tensors)
    target = info(tokenizer=toy_tokenizer(ascii_letters[:USED]))
    with pytest.raises(ConfigError, match=f"in padding at the end alone, but .*{message}"):
        build(head_options(model=str(tmp_path)), target)


def test_the_mask_of_a_block_is_a_token_of_the_target(tmp_path: Path) -> None:
    fields = {"transformer_layer_config": layer_config(vocab_size=64), "draft_vocab_size": 64}
    for mask, is_one in ((VOCAB - 1, True), (VOCAB, False)):
        config = dflash_config(False, mask_token_id=mask, **fields)
        write_head(tmp_path, config, dflash_tensors(own_ends=False))
        with nullcontext() if is_one else pytest.raises(ConfigError, match="reads token 48 for"):
            build(dflash_options(model=str(tmp_path)), info())


def test_without_a_tokenizer_all_of_the_targets_tokens_are_in_use(tmp_path: Path) -> None:
    write_head(tmp_path, padded(USED), head_tensors(own_ends=False))
    with pytest.raises(ConfigError, match="48 tokens of the target are in use"):
        build(head_options(model=str(tmp_path)), info())


# --- what does not fit ----------------------------------------------------------------------------


UNFIT: dict[str, tuple[dict[str, Any], Any, type[PacelineError], str]] = {
    "vocabulary": (layer(vocab_size=VOCAB + 1), None, ConfigError, "reads 49 tokens.* has 48"),
    "width": (head_config(), wider(), ConfigError, "fc reads 120 numbers.* width 32 give 96"),
    "layer": (head_config(**{LAYER_IDS: [0, 1, 3]}), None, ConfigError, r"0, 1, 3\].* 0 to 2,"),
    "layers twice": (head_config(**{LAYER_IDS: [0, 1, 1]}), None, ConfigError, "different numbers"),
    "fewer layers": (head_config(**{LAYER_IDS: [0, 1]}), None, ConfigError, "2 layers of this"),
    "no layers said": (head_config(**{LAYER_IDS: None}), None, ConfigError, "says nothing"),
    "odd layers": (head_config(**{LAYER_IDS: "2"}), None, ModelLoadError, "a list of 1 to 64"),
    "no fc": (head_config(), without("fc.weight"), ConfigError, "has no fc.weight"),
    "no norm": (head_config(), without("norm.weight"), ModelLoadError, "norm.weight"),
    "no own embedding": (
        layer(hidden_size=40, head_dim=8),
        without("embed_tokens.weight"),
        PacelineError,
        "embed_tokens|fc|shape",
    ),
    "more than is used": (
        head_config(),
        head_tensors() | {"layers.7.x": torch.ones(2)},
        UnsupportedModelError,
        "has no use",
    ),
    "damaged d2t": (
        head_config(),
        head_tensors() | {"d2t": torch.full((len(KEPT),), VOCAB)},
        ModelLoadError,
        "d2t is damaged",
    ),
    "a norm that is missing": (head_config(fc_norm=True), None, ModelLoadError, "fc_norm.0"),
    "another kind": (
        head_config(speculators_model_type="mlp"),
        None,
        UnsupportedModelError,
        "of type 'mlp'",
    ),
    "no head": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        None,
        UnsupportedModelError,
        "is no head",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused_or_left_out(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields, tensors, error, message = UNFIT[case]
    write_head(tmp_path, fields, head_tensors() if tensors is None else tensors)
    config = head_options(model=str(tmp_path))
    with pytest.raises(error, match=message):
        build_proposers([config, LOOKUP], info(), strict=True)
    built = build_proposers([config, LOOKUP], info(), strict=False)
    assert [proposer.name for proposer in built] == ["prompt_lookup"]
    assert "no drafts by eagle3" in caplog.text


def test_usual_layers_are_those_of_the_paper(tmp_path: Path) -> None:
    """Of the toy target there are none such, which the error says."""
    write_head(tmp_path, head_config(**{LAYER_IDS: None}), head_tensors())
    with pytest.raises(ConfigError, match=r"\[2, 1, -1\]"):
        build(head_options(model=str(tmp_path)), info())


def test_a_target_has_to_be_there_and_memory_too(tmp_path: Path) -> None:
    folder = write_head(tmp_path, head_config(), head_tensors())
    config = head_options(model=str(folder))
    with pytest.raises(ConfigError, match="none is loaded"):
        build(config, info(runner=None))
    kept = 200 * 16 * HIDDEN * 2  # hidden states for as many blocks as the target has
    with pytest.raises(ConfigError, match="raise --kv-cache-memory"):
        build(config, info(kv_bytes=kept))
    assert isinstance(build(config, info(kv_bytes=kept + (1 << 16))), HeadProposer)


@pytest.mark.parametrize("is_original", [False, True])
def test_a_head_is_no_model_by_itself(tmp_path: Path, is_original: bool) -> None:
    config, tensors = head_config(), head_tensors()
    write_head(tmp_path, *(as_original(config, tensors) if is_original else (config, tensors)))
    with pytest.raises(UnsupportedModelError, match="--method eagle3 --draft"):
        load_checkpoint(tmp_path)


def test_outputs_too_large_for_16_bits_are_cut(tmp_path: Path) -> None:
    tensors = head_tensors()
    tensors["fc.weight"] = 1e5 * tensors["fc.weight"]
    draft(write_head(tmp_path, head_config(), tensors))


def test_pickled_heads_are_not_read(tmp_path: Path) -> None:
    write_head(tmp_path, head_config(), head_tensors())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickled weights are never read"):
        load_head(str(tmp_path))
    with pytest.raises(ModelLoadError, match="there is no head at"):
        load_head(str(tmp_path / "nothing" / "there"))


def test_a_model_is_needed_and_trees_are_usual() -> None:
    with pytest.raises(ConfigError, match="trained for the target"):
        SpeculativeConfig("eagle3")
    (config,) = parse_speculative_config({"method": "eagle3", "model": "x"})
    assert (config.num_speculative_tokens, config.max_tree_nodes, config.max_branching) == (
        5,
        16,
        4,
    )
    assert config.needs_forwards
