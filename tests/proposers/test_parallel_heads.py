"""P-EAGLE and DSpark: drafts as in plain torch, whatever an engine does to requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.native.native import why_not_native
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config import parse_speculative_config
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError, UnsupportedModelError
from paceline.loading.checkpoint import load_checkpoint
from paceline.proposers.base import DraftBudget
from paceline.proposers.heads import build
from paceline.proposers.heads.blocks import DFlashProposer, DSparkProposer, PEagleProposer
from paceline.proposers.heads.checkpoint import LAYER_IDS
from paceline.proposers.heads.proposer import FeatureDrafter
from paceline.request.request import Request
from paceline.request.span import DraftTree
from tests.contracts.test_identity import MIXES, answers
from tests.proposers import dflash, heads
from tests.proposers.dflash import MASK, SIZE, sliding_layers
from tests.proposers.drive import make_request, propose
from tests.proposers.heads import TREE, fresh_features, target_info, write_head
from tests.proposers.parallel_heads import (
    RANK,
    PlainDSpark,
    PlainPEagle,
    built,
    dflash2_config,
    dflash2_tensors,
    dspark_config,
    dspark_tensors,
    following,
    peagle_config,
    peagle_tensors,
    plain_of,
    toy_dflash2,
    toy_dspark,
    toy_peagle,
)
from tests.proposers.test_dflash import BROKEN, check_broken
from tests.proposers.test_heads import jobs, paths, with_norms
from tests.quick import once
from tests.toy import TOY, VOCAB, assert_no_leak, run_jobs, toy_engine, toy_runner, toy_tensors

PROMPT = [5, 9, 2, 7, 7, 30, 11]
KINDS = {
    "peagle": (toy_peagle, peagle_config, peagle_tensors),
    "dspark": (toy_dspark, dspark_config, dspark_tensors),
    "dflash2": (toy_dflash2, dflash2_config, dflash2_tensors),
}
RECURRENT = dspark_config(markov_head_type="rnn", sample_from_anchor=False)
READ = KINDS | {
    "recurrent": (
        lambda runner, **options: built(
            runner, RECURRENT, dspark_tensors(5, markov="rnn"), **options
        ),
        lambda: RECURRENT,
        lambda: dspark_tensors(5, markov="rnn"),
    )
}
"""Those whose drafts depend on what was read before in other ways."""
native = pytest.mark.skipif(why_not_native() is not None, reason="the extension was not built")
FORMS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "masks": (peagle_config(), peagle_tensors(4)),
    "masks and the target's ends": (peagle_config(False), peagle_tensors(own_ends=False)),
    "masks and norms": (
        peagle_config(fc_norm=True, norm_before_residual=True),
        with_norms(peagle_tensors(2), **{f"fc_norm.{i}.weight": 32 for i in range(3)}),
    ),
    "blocks": (dspark_config(), dspark_tensors()),
    "blocks and the target's ends": (dspark_config(False), dspark_tensors(own_ends=False)),
    "blocks behind the anchor": (dspark_config(sample_from_anchor=False), dspark_tensors(1)),
    **{
        f"blocks, {markov}{where}": (
            dspark_config(markov_head_type=markov, sample_from_anchor=not where),
            dspark_tensors(5, markov=markov),
        )
        for markov in ("gated", "rnn")
        for where in ("", " behind the anchor")
    },
    "sliding blocks": (dspark_config(**sliding_layers()), dspark_tensors(2)),
    "selected blocks": (dflash2_config(), dflash2_tensors()),
    "selected blocks, from the anchor on": (
        dflash2_config(sample_from_anchor=True, conv_kernel_size=4),
        dflash2_tensors(3, kernel=4),
    ),
    "selected blocks, sliding": (dflash2_config(**sliding_layers()), dflash2_tensors(2)),
    "selected blocks, sliding and not ahead": (
        dflash2_config(**sliding_layers(), sliding_window_non_causal=False),
        dflash2_tensors(2),
    ),
}


def check_tree(
    tree: DraftTree, plain: PlainPEagle | PlainDSpark, tokens: Sequence[int], count: int
) -> int:
    """Every node has the children that plain torch ranks first; how many nodes branch."""
    features = fresh_features(tokens[:-1], plain.config.get(LAYER_IDS, heads.TAPS))
    branched = 0
    for node, path in enumerate([*paths(tree), []]):
        parent = node if node < len(tree) else -1
        below = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == parent]
        if below:
            assert below == plain.below(tokens, features, path, count)[: len(below)]
        branched += len(below) > 1
    return branched


@pytest.mark.parametrize("options", [{}, TREE])
@pytest.mark.parametrize("form", FORMS)
def test_every_tree_is_that_of_plain_torch(form: str, options: dict[str, Any]) -> None:
    config, tensors = FORMS[form]
    plain = plain_of(config, tensors)
    proposer = following(built, config, tensors, **options)
    request, branched, seen = make_request(1, PROMPT), 0, set()
    for step in range(6):
        (tree,) = propose(proposer, request)
        assert len(tree) == options.get("max_tree_nodes", 4)
        branched += check_tree(tree, plain, request.token_ids, options.get("max_branching", 1))
        seen.update(tree.token_ids)
        # Some drafts are accepted in part, others not at all.
        request.token_ids += [*tree.token_ids[: step % 3], 3 + step]
    assert proposer.num_forwards == 6
    assert (branched > 0) == bool(options)
    assert len(seen) > 3


def test_the_markov_head_makes_the_difference_between_nodes_of_a_depth() -> None:
    proposer, levels = following(toy_dspark, **TREE), dict[int, set[tuple[int, ...]]]()
    request = make_request(1, PROMPT)
    for step in range(6):
        (tree,) = propose(proposer, request)
        depths = tree.depths()
        for node in range(len(tree)):
            below = [t for t, p in zip(tree.token_ids, tree.parents, strict=True) if p == node]
            if below:
                levels.setdefault(100 * step + depths[node], set()).add((below[0],))
        request.token_ids.append(step)
    assert any(len(firsts) > 1 for firsts in levels.values())


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_the_likeliest_child_of_a_node_is_as_likely_as_the_confidence_head_says(
    markov: str,
) -> None:
    config, tensors = dspark_config(markov_head_type=markov), dspark_tensors(5, markov=markov)
    plain = plain_of(config, tensors)
    assert isinstance(plain, PlainDSpark)
    proposer, request = following(built, config, tensors, **TREE), make_request(1, PROMPT)
    (tree,) = propose(proposer, request)
    features, nodes, said = fresh_features(PROMPT[:-1], heads.TAPS), range(len(tree)), list[float]()
    for parent, path in zip([-1, *nodes], [[], *paths(tree)], strict=True):
        below = [tree.accept_probs[node] for node in nodes if tree.parents[node] == parent]
        if below:
            said.append(below[0])
            assert below[0] == pytest.approx(plain.row(PROMPT, features, path)[1], abs=1e-3)
            assert sum(below) <= 1 + 1e-9
            assert below == sorted(below, reverse=True)
    assert max(said) - min(said) > 0.1


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({"enable_confidence_head": False}, dspark_tensors()),
        ({}, {n: t for n, t in dspark_tensors().items() if "confidence" not in n}),
    ],
)
def test_a_head_without_confidence_head_is_as_sure_as_its_logits(
    fields: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    drafts = []
    for config, stored in ((dspark_config(), dspark_tensors()), (dspark_config(**fields), tensors)):
        (tree,) = propose(following(built, config, stored), make_request(1, PROMPT))
        drafts.append(tree)
    told, own = drafts
    assert told.token_ids == own.token_ids
    assert told.accept_probs != own.accept_probs
    assert max(own.accept_probs) <= 0.9  # what logits can say at most


def test_a_confidence_head_alone_is_read_too() -> None:
    tensors = {n: t for n, t in dspark_tensors(5).items() if "markov" not in n}
    name = "confidence_head.proj.weight"
    tensors[name] = tensors[name][:, : heads.HIDDEN].contiguous()
    config = dspark_config(markov_rank=0, confidence_head_with_markov=False)
    proposer = built(runner := toy_runner(prefix_caching=False), config, tensors)
    followed = heads.made_to_follow(proposer, dflash.FollowingBlocks, runner)
    features, plain = (
        fresh_features(PROMPT[:-1], heads.TAPS),
        PlainDSpark(tensors, config, toy_tensors()),
    )
    hidden = plain.hidden(PROMPT[-1], plain.fuse(features))
    said = (hidden @ tensors[name][0] + tensors["confidence_head.proj.bias"]).sigmoid()
    (tree,) = propose(followed, make_request(1, PROMPT))
    assert tree.accept_probs == pytest.approx(said[: len(tree)].tolist(), abs=1e-3)


def test_without_a_markov_head_it_is_dflash() -> None:
    left_out = "markov_head", "confidence_head"
    tensors = {n: t for n, t in dspark_tensors().items() if not n.startswith(left_out)}
    config = dspark_config(markov_rank=0)
    proposer = built(toy_runner(), config, tensors)
    assert (type(proposer), proposer.name) == (DFlashProposer, "dspark")


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_end_where_the_context_does(kind: str) -> None:
    proposer = following(KINDS[kind][0], num_speculative_tokens=8)
    beyond, most = {"peagle": (2, 8), "dspark": (1, SIZE), "dflash2": (0, SIZE - 1)}[kind]
    for left in (0, 1, 2, 3, SIZE, 12):
        prompt = [1 + i % 30 for i in range(TOY.max_position - left)]
        request = make_request(left, prompt, 999, max_tokens=500)
        (tree,) = propose(proposer, request)
        assert len(tree) == min(left + beyond, most)


@pytest.mark.parametrize("kind", KINDS)
def test_no_room_is_a_shorter_draft_or_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = following(KINDS[kind][0])
    requests = [make_request(1, PROMPT), make_request(2, PROMPT[:4])]
    reserve = KVCache.reserve

    def full(self: KVCache, request_id: int, num_nodes: int, certain: int = 0) -> bool:
        is_for_masks = self is proposer._runner.kv and num_nodes in (3, SIZE - 1)
        return not (is_for_masks and request_id == 1) and reserve(
            self, request_id, num_nodes, certain
        )

    monkeypatch.setattr(KVCache, "reserve", full)
    short, other = propose(proposer, *requests)
    monkeypatch.undo()
    whole = propose(proposer, *requests)
    assert other == whole[1]
    assert short.token_ids == whole[0].token_ids[: 1 if kind == "peagle" else 0]


# --- in an engine ---------------------------------------------------------------------------------

seen: list[tuple[list[int], int, DraftTree]] = []


class Watched(FeatureDrafter):
    """Keeps what it drafted."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = super().propose(requests, budget)
        for request, depth, tree in zip(requests, budget.max_depth, trees, strict=True):
            if len(tree):
                seen.append((list(request.token_ids), depth, replace(tree)))
        return trees


class WatchedMasks(Watched, PEagleProposer):
    pass


class WatchedMarkov(Watched, DSparkProposer):
    pass


def watched(kind: str, runner: ModelRunner, **options: Any) -> FeatureDrafter:
    proposer = READ[kind][0](runner, **options)
    proposer.__class__ = WatchedMasks if kind == "peagle" else WatchedMarkov
    return proposer


@pytest.mark.parametrize(("kind", "mix"), once(READ, ["staggered", "preempted_cached"]))
def test_no_state_is_stale_whatever_happens_to_requests(kind: str, mix: str) -> None:
    seen.clear()
    _, config, tensors = READ[kind]
    plain, answered = plain_of(config(), tensors()), answers(run_jobs(toy_engine(), jobs()))
    engine = toy_engine([lambda runner: watched(kind, runner, **TREE)], **MIXES[mix])
    for _ in range(2):  # the second time out of the prefix cache
        assert answers(run_jobs(engine, jobs())) == answered
        assert_no_leak(engine)
    assert len(seen) > 50
    for tokens, _, tree in seen[::5]:
        check_tree(tree, plain, tokens, TREE["max_branching"])
    stats = engine.stats()
    assert stats.num_proposer_failures == 0
    assert stats.speculation.num_draft_tokens > stats.speculation.num_accepted_tokens > 0
    assert stats.num_cached_tokens > 0


@native
@pytest.mark.parametrize("dtype", ["native-int8", "native-int4"])
@pytest.mark.parametrize("kind", READ)
def test_company_changes_no_native_draft(kind: str, dtype: str) -> None:
    """Each draft is, bit for bit, that of a head that reads the same tokens alone and at once."""
    seen.clear()
    options: dict[str, Any] = {"dtype": "int8", **TREE}
    engine = toy_engine(
        [lambda runner: watched(kind, runner, **options)], dtype=dtype, **MIXES["preempted_cached"]
    )
    run_jobs(engine, jobs())
    fresh = following(READ[kind][0], target=dtype, **options)
    assert len(seen) > 25
    for tokens, depth, tree in seen:
        request = make_request(1, tokens)
        assert propose(fresh, request, depth=depth) == [tree]
        fresh.finish(request)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_head_costs_drafts_alone(
    kind: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_broken(lambda runner: KINDS[kind][0](runner, **TREE), broken, monkeypatch)


# --- folders --------------------------------------------------------------------------------------


def original_peagle(**fields: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As vLLM reads it: an EAGLE-3 head with a mask token."""
    config, tensors = heads.as_original(peagle_config(), peagle_tensors())
    tensors["mask_hidden"] = tensors["mask_hidden"][0]
    return config | {"ptd_token_id": MASK} | fields, tensors


def original_dspark(**fields: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As DeepSpec writes it: all in one mapping."""
    config = dflash.as_original(dspark_config())
    inner = config.pop("dflash_config")
    return {
        **config,
        **inner,
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "num_anchors": 512,
    } | fields, dspark_tensors()


def original_dflash2() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As z-lab/dflash writes it: what a block is like in a part of its own."""
    said = dflash2_config()
    config = dflash.as_original(said)
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "block_size")
    config["dflash_config"] |= {key: said[key] for key in keys}
    del config["block_size"], config["draft_vocab_size"]
    return config | {"architectures": ["DFlash2DraftModel"]}, dflash2_tensors()


ORIGINALS = {
    "peagle": original_peagle,
    "dspark": original_dspark,
    "dflash2": original_dflash2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_layouts_are_one_head(kind: str, tmp_path: Path) -> None:
    _, config, tensors = KINDS[kind]
    new = write_head(tmp_path / "new", config(), tensors())
    old = write_head(tmp_path / "old", *ORIGINALS[kind]())
    drafts = []
    for folder in (new, old):
        with pytest.raises(UnsupportedModelError, match=f"--method {kind} --draft"):
            load_checkpoint(folder)

        def load(runner: ModelRunner, folder: Path = folder) -> FeatureDrafter:
            options = heads.head_options(kind, model=str(folder), num_speculative_tokens=5)
            return build(options, target_info(runner))

        drafts += propose(following(load), make_request(1, PROMPT))
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 5


def test_what_vllm_calls_a_parallel_eagle3_head_is_one() -> None:
    said = {"method": "eagle3", "model": "x", "parallel_drafting": True}
    assert parse_speculative_config(said) == parse_speculative_config(
        {"method": "peagle", "model": "x"}
    )
    with pytest.raises(ConfigError, match='"eagle3", which it makes "peagle"'):
        parse_speculative_config({"method": "mtp", "parallel_drafting": True})


def layer(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return config | {"transformer_layer_config": config["transformer_layer_config"] | fields}


def without(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
UNFIT: dict[str, tuple[str, Any, Any, type[PacelineError], str]] = {
    "vocabulary": (
        "peagle",
        layer(peagle_config(), vocab_size=VOCAB + 1),
        None,
        ConfigError,
        "reads 49 tokens.* has 48",
    ),
    "layer": ("peagle", peagle_config(**{LAYER_IDS: [0, 1, 3]}), None, ConfigError, "0 to 2,"),
    "fewer layers": ("peagle", peagle_config(**{LAYER_IDS: [0]}), None, ConfigError, "1 layers of"),
    "mask": ("peagle", peagle_config(mask_token_id=VOCAB), None, ModelLoadError, "from 0 to 47"),
    "no mask": (
        "peagle",
        peagle_config(mask_token_id=None),
        None,
        ModelLoadError,
        "no mask_token_id",
    ),
    "no vector of masks": (
        "peagle",
        peagle_config(),
        without("mask_hidden", peagle_tensors()),
        ModelLoadError,
        "no tensor mask_hidden",
    ),
    "another vector of masks": (
        "peagle",
        peagle_config(),
        peagle_tensors() | {"mask_hidden": torch.ones(1, 32)},
        ModelLoadError,
        "mask_hidden has shape",
    ),
    "another method": (
        "dspark",
        peagle_config(),
        peagle_tensors(),
        ConfigError,
        'method "peagle" is for it',
    ),
    "an EAGLE-3 head with masks": (
        "eagle3",
        peagle_config(speculators_model_type="eagle3"),
        peagle_tensors(),
        UnsupportedModelError,
        "mask_hidden",
    ),
    "vocabulary of blocks": (
        "dspark",
        dspark_config(**layer(dspark_config(), vocab_size=VOCAB + 1)),
        None,
        ConfigError,
        "reads 49 tokens.* has 48",
    ),
    "layer of blocks": (
        "dspark",
        dspark_config(aux_hidden_state_layer_ids=[0, 1, 3]),
        None,
        ConfigError,
        "0 to 2,",
    ),
    "a Markov head of another type": (
        "dspark",
        dspark_config(markov_head_type="fir"),
        None,
        UnsupportedModelError,
        "dspark heads with markov_head_type = fir .*: vanilla, gated, rnn",
    ),
    "a gated Markov head without its gate": (
        "dspark",
        dspark_config(markov_head_type="gated"),
        None,
        ModelLoadError,
        "no tensor markov_head.gate_proj",
    ),
    "a gate that the type does not know": (
        "dspark",
        dspark_config(),
        dspark_tensors(markov="gated"),
        UnsupportedModelError,
        "no use for .*markov_head.gate_proj",
    ),
    "a confidence head of another width": (
        "dspark",
        dspark_config(confidence_head_with_markov=False),
        None,
        ModelLoadError,
        r"confidence_head.proj.weight has shape \(1, 40\).*\(1, 32\)",
    ),
    "fewer tokens than the target's": (
        "dflash2",
        dflash2_config(draft_vocab_size=40),
        None,
        UnsupportedModelError,
        "dflash2 heads with draft_vocab_size = 40 .* all 48 tokens",
    ),
    "groups": (
        "dflash2",
        dflash2_config(conv_group_size=5),
        None,
        ModelLoadError,
        "conv_group_size = 5; it must divide the hidden_size, 32",
    ),
    "taps": (
        "dflash2",
        dflash2_config(conv_kernel_size=7),
        None,
        ModelLoadError,
        "conv_kernel_size = 7; it must be a number from 1 to 6",
    ),
    "fewer taps": (
        "dflash2",
        dflash2_config(conv_kernel_size=1),
        None,
        ModelLoadError,
        r"base_kernel.*\(2, 2, 32\).*\(2, 1, 32\)",
    ),
    "no candidates": (
        "dflash2",
        dflash2_config(selector_top_k=None),
        None,
        ModelLoadError,
        "no selector_top_k",
    ),
    "more candidates than tokens": (
        "dflash2",
        dflash2_config(selector_top_k=49),
        None,
        ModelLoadError,
        "selector_top_k = 49; it must be a number from 1 to 48",
    ),
    "rank of a selector": (
        "dflash2",
        dflash2_config(selector_rank=9),
        None,
        ModelLoadError,
        r"codebook.*\(48, 8\).*\(48, 9\)",
    ),
    "a selector and a Markov head": (
        "dflash2",
        dflash2_config(markov_rank=4),
        None,
        UnsupportedModelError,
        "markov_rank = 4, which is not known of heads of kind dflash2",
    ),
    "no codebook": (
        "dflash2",
        dflash2_config(),
        without("candidate_selector.successor_codebook", dflash2_tensors()),
        ModelLoadError,
        "successor_codebook",
    ),
    "no convolution": (
        "dflash2",
        dflash2_config(),
        without("layers.1.mlp_conv.base_kernel", dflash2_tensors()),
        ModelLoadError,
        "mlp_conv.base_kernel",
    ),
    "rank": ("dspark", dspark_config(markov_rank=9), None, ModelLoadError, r"\(48, 8\).*\(48, 9\)"),
    "no Markov head": (
        "dspark",
        dspark_config(),
        without(W1, dspark_tensors()),
        ModelLoadError,
        "no tensor markov_head.markov_w1",
    ),
    "half a Markov head": (
        "dspark",
        dspark_config(),
        without(W2, dspark_tensors()),
        ModelLoadError,
        "no tensor markov_head.markov_w2",
    ),
    "another architecture": (
        "dspark",
        original_dspark(architectures=["Gemma4DSparkModel"])[0],
        None,
        UnsupportedModelError,
        "is no head",
    ),
    "a DFlash head with a Markov head": (
        "dflash",
        dspark_config(speculators_model_type="dflash"),
        dspark_tensors(),
        UnsupportedModelError,
        "markov_head",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    method, config, tensors, error, message = UNFIT[case]
    write_head(tmp_path, config, KINDS[method][2]() if tensors is None else tensors)
    with pytest.raises(error, match=message):
        build(heads.head_options(method, model=str(tmp_path)), target_info(toy_runner()))
