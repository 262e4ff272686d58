"""Drafts of blocks: those of DFlash in plain torch, whatever an engine does to its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.native.native import why_not_native
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers.base import DraftBudget
from paceline.proposers.heads import build
from paceline.proposers.heads.blocks import DFlashProposer
from paceline.proposers.heads.checkpoint import load_head
from paceline.request.request import Request
from paceline.request.span import DraftTree
from tests.contracts.test_identity import MIXES, answers
from tests.proposers import test_heads as heads
from tests.proposers.dflash import (
    MASK,
    SIZE,
    FollowingBlocks,
    PlainDFlash,
    as_original,
    dflash_config,
    dflash_options,
    dflash_tensors,
    following_dflash,
    layer_config,
    sliding_layers,
    toy_dflash,
)
from tests.proposers.drive import make_request, propose
from tests.proposers.heads import KEPT, TREE, fresh_features, target_info, write_head
from tests.proposers.test_heads import jobs
from tests.toy import TOY, VOCAB, Job, assert_no_leak, run_jobs, toy_engine, toy_runner, toy_tensors

PROMPT = [5, 9, 2, 7, 7, 30, 11]
native = pytest.mark.skipif(why_not_native() is not None, reason="the extension was not built")
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "the target's ends": {"own_ends": False},
    "sampled from the anchor": {"sample_from_anchor": True},
    "sliding": sliding_layers(),
    "sliding and seeing ahead": sliding_layers() | {"sliding_window_non_causal": True},
    "layers in another order": {"aux_hidden_state_layer_ids": [2, 0, 1]},
}


def plain_of(tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> PlainDFlash:
    return PlainDFlash(tensors, dflash_config(**fields), toy_tensors())


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_that_of_plain_torch(form: str) -> None:
    fields = dict(FORMS[form])
    tensors = dflash_tensors(own_ends=fields.pop("own_ends", True))
    plain, seen = plain_of(tensors, fields), set()
    proposer = following_dflash(tensors=tensors, fields=fields, num_speculative_tokens=8)
    depth = SIZE - plain.first  # however many are asked for
    request, taps = make_request(1, PROMPT), plain.config["aux_hidden_state_layer_ids"]
    for step in range(8):
        (tree,) = propose(proposer, request)
        levels = plain.levels(request.token_ids, fresh_features(request.token_ids[:-1], taps), 1)
        assert tree.token_ids == levels[:, 0].tolist()
        assert (len(tree), tree.is_chain) == (depth, True)
        seen.update(tree.token_ids)
        # Some drafts are accepted in part, others not at all.
        request.token_ids += [*tree.token_ids[: step % 4], 3 + step]
    assert len(seen) > 1
    assert seen.issubset(KEPT if "d2t" in tensors else range(VOCAB))


def test_the_depth_of_a_draft_changes_none_of_its_tokens() -> None:
    proposer, request = following_dflash(num_speculative_tokens=8), make_request(1, PROMPT)
    trees = [propose(proposer, request, depth=depth)[0].token_ids for depth in (5, 2, 1)]
    assert trees == [trees[0], trees[0][:2], trees[0][:1]]


def test_a_tree_branches_as_plain_torch_ranks() -> None:
    tensors = dflash_tensors(6)
    plain, proposer = plain_of(tensors, {}), following_dflash(tensors=tensors, **TREE)
    request, branched = make_request(1, PROMPT), 0
    for step in range(6):
        (tree,) = propose(proposer, request)
        assert len(tree) == TREE["max_tree_nodes"]
        features = fresh_features(request.token_ids[:-1])
        levels = plain.levels(request.token_ids, features, TREE["max_branching"]).tolist()
        depths = [0, *tree.depths()]
        for parent in range(-1, len(tree)):
            below = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == parent]
            assert below == levels[depths[parent + 1]][: len(below)]
            branched += len(below) > 1
        request.token_ids += [tree.token_ids[step % 3], step]
    assert branched


def test_blocks_end_where_the_context_does() -> None:
    proposer = following_dflash(num_speculative_tokens=8)
    for left in (0, 1, 2, 3, SIZE, SIZE + 1):
        prompt = [1 + i % 30 for i in range(TOY.max_position - left)]
        request = make_request(left, prompt, 999, max_tokens=500)
        (tree,) = propose(proposer, request)
        # A block of one row has no mask, which would predict.
        assert len(tree) == min(left, SIZE - 1)


def test_no_room_for_a_block_is_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, request = following_dflash(), make_request(1, PROMPT)
    reserve = KVCache.reserve

    def full(self: KVCache, request_id: int, num_nodes: int, certain: int = 0) -> bool:
        is_block = self is not proposer.whole.kv and num_nodes == SIZE - 1
        return not is_block and reserve(self, request_id, num_nodes, certain)

    assert isinstance(proposer, FollowingBlocks)
    monkeypatch.setattr(KVCache, "reserve", full)
    assert propose(proposer, request) == [DraftTree()]
    monkeypatch.undo()
    assert propose(proposer, request) == propose(following_dflash(), make_request(1, PROMPT))


# --- in an engine ---------------------------------------------------------------------------------


class Watched(DFlashProposer):
    """Keeps what it drafted."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = super().propose(requests, budget)
        for request, depth, tree in zip(requests, budget.max_depth, trees, strict=True):
            if len(tree):
                seen.append((list(request.token_ids), depth, replace(tree)))
        return trees


seen: list[tuple[list[int], int, DraftTree]] = []


@pytest.mark.parametrize("mix", ["staggered", "preempted_cached"])
def test_no_state_is_stale_whatever_happens_to_requests(mix: str) -> None:
    seen.clear()
    tensors = dflash_tensors(1)

    def make(runner: ModelRunner) -> DFlashProposer:
        return toy_dflash(runner, tensors=tensors, kind=Watched, num_speculative_tokens=3)

    plain, answered = plain_of(tensors, {}), answers(run_jobs(toy_engine(), jobs()))
    engine = toy_engine([make], **MIXES[mix])
    for _ in range(2):  # the second time out of the prefix cache
        assert answers(run_jobs(engine, jobs())) == answered
        assert_no_leak(engine)
    assert len(seen) > 50
    known = {}
    for tokens, _, tree in seen:
        if tuple(tokens) not in known:
            known[tuple(tokens)] = plain.levels(tokens, fresh_features(tokens[:-1]), 1)[:, 0]
        assert tree.token_ids == known[tuple(tokens)][: len(tree)].tolist()
    stats = engine.stats()
    assert stats.num_proposer_failures == 0
    assert stats.speculation.num_draft_tokens > stats.speculation.num_accepted_tokens > 0
    assert stats.num_cached_tokens > 0


@native
@pytest.mark.parametrize("dtype", ["native-int8", "native-int4"])
def test_company_changes_no_native_draft(dtype: str) -> None:
    """Each draft is, bit for bit, that of a head that reads the same tokens alone and at once."""
    seen.clear()
    options: dict[str, Any] = {"dtype": "int8", **TREE}
    engine = toy_engine(
        [lambda runner: toy_dflash(runner, kind=Watched, **options)],
        dtype=dtype,
        **MIXES["preempted_cached"],
    )
    run_jobs(engine, jobs())
    fresh = following_dflash(target_dtype=dtype, **options)
    assert len(seen) > 25
    for tokens, depth, tree in seen:
        request = make_request(1, tokens)
        assert propose(fresh, request, depth=depth) == [tree]
        fresh.finish(request)


BROKEN = {kind: heads.BROKEN[kind] for kind in ("raises", "NaN logits", "too few logits")}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_head_costs_drafts_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_broken(lambda runner: toy_dflash(runner, **TREE), kind, monkeypatch)


def check_broken(
    make: Callable[[ModelRunner], Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head whose forwards are broken costs drafts alone."""
    some = [Job(job.prompt, job.params, job.at) for job in jobs()[:3]]
    plain = answers(run_jobs(toy_engine(), some))
    engine = toy_engine([make])
    forward = ModelRunner.forward

    def changed(self: ModelRunner, *arguments: Any, **more: Any) -> Any:
        result = forward(self, *arguments, **more)
        return result if self is engine.runner else BROKEN[kind](result)

    monkeypatch.setattr(ModelRunner, "forward", changed)
    assert answers(run_jobs(engine, some)) == plain
    assert_no_leak(engine)
    if "NaN" not in kind:
        assert engine.stats().num_proposer_failures == 3
        assert not engine.drafting.is_on


# --- folders --------------------------------------------------------------------------------------


def test_both_layouts_are_one_head(tmp_path: Path) -> None:
    config = dflash_config(aux_hidden_state_layer_ids=[2, 1])
    tensors, drafts = dflash_tensors(taps=2), []
    verifiers = {"verifier_norm.weight": torch.ones(3)}  # what training left
    write_head(tmp_path / "speculators", config, tensors | verifiers)
    write_head(tmp_path / "original", as_original(config), tensors)
    for layout in ("speculators", "original"):
        with pytest.raises(UnsupportedModelError, match="--method dflash --draft"):
            load_checkpoint(tmp_path / layout)
        head = load_head(str(tmp_path / layout))
        assert head.layer_ids == (2, 1)
        assert head.block is not None
        assert (head.block.size, head.block.mask_token, head.block.first_row) == (SIZE, MASK, 1)
        runner = toy_runner(prefix_caching=False)
        options = dflash_options(model=str(tmp_path / layout))
        proposer = build(options, target_info(runner))
        proposer.__class__ = FollowingBlocks
        assert isinstance(proposer, FollowingBlocks)
        proposer.whole, runner.taps = runner, proposer.taps
        drafts += propose(proposer, make_request(1, PROMPT))
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 4


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in dflash_tensors().items() if key != name}


UNFIT: dict[str, tuple[dict[str, Any], Any, type[PacelineError], str]] = {
    "vocabulary": (
        {"transformer_layer_config": layer_config(vocab_size=VOCAB + 1)},
        None,
        ConfigError,
        "reads 49 tokens.* has 48",
    ),
    "layer": ({"aux_hidden_state_layer_ids": [0, 1, 3]}, None, ConfigError, "0, 1, 3.* 0 to 2,"),
    "fewer layers": ({"aux_hidden_state_layer_ids": [0]}, None, ConfigError, "1 layers of this"),
    "mask": ({"mask_token_id": VOCAB}, None, ModelLoadError, "mask_token_id = 48.* from 0 to 47"),
    "no mask": ({"mask_token_id": None}, None, ModelLoadError, "no mask_token_id"),
    "no size": ({"block_size": None}, None, ModelLoadError, "no block_size"),
    "no norm": ({}, without("hidden_norm.weight"), ModelLoadError, "hidden_norm.weight"),
    "causal": ({"is_causal": True}, None, UnsupportedModelError, "is_causal = true"),
    "another attention": ({"use_swa": True}, None, UnsupportedModelError, "use_swa = True"),
    "a relative": (
        {"speculators_model_type": "dflash3"},
        None,
        UnsupportedModelError,
        "of type 'dflash3'",
    ),
    "a key of a relative": (
        {"conv_kernel_size": 2},
        None,
        UnsupportedModelError,
        "conv_kernel_size = 2, which is not known of heads of kind dflash",
    ),
    "a relative of the original": (
        {"speculators_model_type": None, "architectures": ["DFlash3DraftModel"]},
        None,
        UnsupportedModelError,
        "is no head",
    ),
    "another method": (
        {"speculators_model_type": "eagle3"},
        None,
        UnsupportedModelError,
        "block_size = 6, which is not known of heads of kind eagle3",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    fields, tensors, error, message = UNFIT[case]
    write_head(tmp_path, dflash_config(**fields), tensors or dflash_tensors())
    with pytest.raises(error, match=message):
        build(dflash_options(model=str(tmp_path)), target_info(toy_runner()))
