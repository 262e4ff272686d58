"""Parallel drafts on toy models: masks, their KV, trees of independent depths, and what fails."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.api.llm import embedded_model
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.core.errors import ConfigError
from paceline.engine.contained_proposers import Entry, source_of
from paceline.models.families.config_json import config_from_hf
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import StepShape
from paceline.planner.planner import CostAwarePlanner
from paceline.proposers.base.parallel import likeliest_tree
from paceline.request.request import Request
from paceline.request.span import ROOT, DraftTree, Span
from tests.proposers.drive import Target, commit, make_request, propose
from tests.proposers.parallel_drafts import (
    MASK,
    KnowingRunner,
    parallel_drafter,
)
from tests.toy import TOY, Job, assert_no_leak, run_jobs, toy_engine, toy_runner

PROMPT = [5, 9, 2, 7, 7, 30, 11]
TREE = {"max_tree_nodes": 12, "max_branching": 3, "num_speculative_tokens": 5}
SAMPLING = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5}]


def target() -> Target:
    return Target(toy_runner())


def own_runner() -> ModelRunner:
    """The draft model's."""
    return toy_runner(prefix_caching=False, noise=0.3)


# --- the oracle: masks that know what the target says -------------------------------------------


def all_knowing(request: Request) -> ModelRunner:
    """Its row at each position has the logits of the target, along plain decoding."""
    model, plain = target(), replace(request, token_ids=list(PROMPT))
    for _ in range(70):
        model.verify(plain, DraftTree())
    runner, tokens = toy_runner(), plain.token_ids
    runner.kv.open(0)
    assert runner.kv.reserve(0, len(tokens))
    whole = Span(0, 0, tokens, range(-1, len(tokens) - 1), range(len(tokens)))
    known = runner.forward(runner.pack([whole])).logits
    return KnowingRunner(known, toy_runner(prefix_caching=False))


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("options", [{}, TREE])
def test_knowing_masks_are_accepted_whole(
    sampling: dict[str, Any], options: dict[str, int]
) -> None:
    request = make_request(1, PROMPT, **sampling)
    runner = all_knowing(request)
    model, proposer = target(), parallel_drafter(runner, **options)
    for _ in range(8):
        runner.kv.poison_free()
        draft, result = model.step(proposer, request)
        assert result.num_accepted == max(draft.depths())
    assert proposer.num_forwards == 8


def test_the_noise_is_that_of_each_position() -> None:
    request = make_request(1, PROMPT, temperature=1.5)
    proposer = parallel_drafter(all_knowing(request), num_speculative_tokens=6)
    (draft,) = propose(proposer, request)
    other = make_request(1, PROMPT, temperature=1.5)
    other.seed += 1
    again = parallel_drafter(all_knowing(request), num_speculative_tokens=6)
    (elsewhere,) = propose(again, other)
    assert draft.is_chain
    assert draft.token_ids != elsewhere.token_ids


# --- masks ----------------------------------------------------------------------------------------


def test_a_mask_reads_the_tokens_and_the_masks_before_it() -> None:
    proposer, request = parallel_drafter(), make_request(1, PROMPT)
    (draft,) = propose(proposer, request)
    expected = []
    for masks in range(4):
        runner, tokens = toy_runner(prefix_caching=False, noise=0.3), [*PROMPT, *[MASK] * masks]
        runner.kv.open(0)
        runner.kv.reserve(0, len(tokens))
        logits = runner.forward(runner.pack([Span.chunk(0, 0, tokens, sample=True)])).logits
        expected.append(logits.argmax().item())
    assert draft.token_ids == expected


@pytest.mark.parametrize("options", [{}, TREE])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_no_mask_leaves_anything_behind(options: dict[str, Any], sampling: dict[str, Any]) -> None:
    runner = own_runner()
    model, proposer = target(), parallel_drafter(runner, **options)
    request = make_request(1, PROMPT, **sampling)
    for _ in range(6):
        assert propose(proposer, request) == propose(parallel_drafter(**options), request)
        assert runner.kv[1].length == len(request.token_ids)
        assert len(runner.kv[1].block_table) == math.ceil(len(request.token_ids) / 16)
        model.step(proposer, request)
        runner.kv.poison_free()


def test_requests_share_one_forward() -> None:
    runner = own_runner()
    proposer = parallel_drafter(runner, num_speculative_tokens=6)
    requests = [make_request(i, PROMPT[i:], temperature=0.4 * i) for i in range(4)]
    alone = [propose(parallel_drafter(num_speculative_tokens=6), each)[0] for each in requests]
    assert propose(proposer, *requests) == alone
    assert proposer.num_forwards == 1
    assert runner.num_rows == sum(len(r.token_ids) + 5 for r in requests)


@pytest.mark.parametrize(("nodes", "depth", "masks"), [(64, 8, 4), (64, 3, 2), (1, 8, 0)])
def test_no_more_masks_are_read_than_the_budget_has_depth(
    nodes: int, depth: int, masks: int
) -> None:
    runner = own_runner()
    proposer = parallel_drafter(runner, **TREE)
    propose(proposer, make_request(1, PROMPT), nodes=nodes, depth=depth)
    assert runner.num_rows == len(PROMPT) + masks


def test_at_the_end_of_its_context_the_draft_is_shorter() -> None:
    proposer = parallel_drafter(num_speculative_tokens=4)
    for length, depth in ((TOY.max_position - 2, 3), (TOY.max_position, 1)):
        request = make_request(length, [3] * length, max_len=400)
        (draft,) = propose(proposer, request)
        assert len(draft) == depth
    assert propose(proposer, make_request(1, [3] * (TOY.max_position + 1), 400)) == [DraftTree()]


def test_without_room_for_masks_one_token_is_drafted() -> None:
    proposer = parallel_drafter(num_blocks=2)  # one of them is reserved
    request = make_request(1, [*PROMPT, *PROMPT, 3, 4])
    (draft,) = propose(proposer, request)
    assert len(draft) == 1
    commit(proposer, request, [3])
    assert propose(proposer, request) == [DraftTree()]


def test_a_long_prompt_is_caught_up_in_chunks() -> None:
    proposer, request = parallel_drafter(catch_up_tokens=16), make_request(1, PROMPT * 10)
    sizes = [len(propose(proposer, request)[0]) for _ in range(5)]
    assert sizes == [0, 0, 0, 0, 4]
    assert propose(proposer, request) == propose(parallel_drafter(), request)


# --- trees ----------------------------------------------------------------------------------------

LEVELS = st.lists(
    st.lists(st.floats(0.001, 0.45), min_size=1, max_size=3).map(lambda p: sorted(p, reverse=True)),
    min_size=1,
    max_size=4,
)


@given(levels=LEVELS, nodes=st.integers(1, 20), least=st.sampled_from([0.0, 0.02, 0.2]))
def test_the_tree_has_the_likeliest_combinations(
    levels: list[list[float]], nodes: int, least: float
) -> None:
    candidates = [(list(range(len(probs))), probs) for probs in levels]
    tree = likeliest_tree(candidates, nodes, least)
    everything = [
        math.prod(path)
        for depth in range(1, len(levels) + 1)
        for path in itertools.product(*levels[:depth])
    ]
    best = [p for p in sorted(everything, reverse=True) if p >= least][:nodes]
    assert tree.path_probs() == pytest.approx(best)
    tree.validate(3)


def test_numbers_that_are_none_end_a_tree() -> None:
    tree = likeliest_tree([([4], [0.5]), ([5], [math.nan]), ([6], [0.5])], 8, 0.0)
    assert (tree.token_ids, tree.parents) == ([4], [ROOT])
    assert not len(likeliest_tree([([4], [0.0])], 8, 0.0))


# --- faults ---------------------------------------------------------------------------------------


def test_after_a_forward_that_failed_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, requests = own_runner(), [make_request(i, PROMPT) for i in (1, 2)]
    proposer = parallel_drafter(runner)
    propose(proposer, *requests)
    for request in requests:
        commit(proposer, request, [8])

    def fail(*_: Any) -> ForwardResult:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", fail)
        with pytest.raises(RuntimeError):
            propose(proposer, *requests)
    assert runner.kv.pool.num_used == 0
    assert propose(proposer, *requests) == propose(parallel_drafter(), *requests)


def test_logits_that_are_no_numbers_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = own_runner()
    proposer, forward = parallel_drafter(runner), runner.forward

    def broken(*given: Any) -> ForwardResult:
        result = forward(*given)
        return ForwardResult(np.full_like(result.logits, math.nan), result.offsets)

    monkeypatch.setattr(runner, "forward", broken)
    assert propose(proposer, make_request(1, PROMPT, temperature=0.8)) == [DraftTree()]


# --- in an engine ---------------------------------------------------------------------------------

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 5}


@pytest.mark.parametrize("options", [{}, TREE])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, **PENALTIES}])
def test_the_answers_are_those_of_plain_decoding(
    options: dict[str, int], sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=20, seed=4, logprobs=2, **sampling)
    jobs = [Job(PROMPT[i:] * (1 + i), params, at=i) for i in range(4)]
    runner = own_runner()
    engine = toy_engine([parallel_drafter(runner, **options)])
    answers = [[r.answer for r in group] for group in run_jobs(engine, jobs)]
    assert answers == [[r.answer for r in group] for group in run_jobs(toy_engine(), jobs)]
    assert engine.stats().speculation.num_accepted_tokens
    assert_no_leak(engine)
    assert runner.kv.pool.num_used == 0


def test_the_planner_is_charged_one_forward_however_deep_the_drafts() -> None:
    planner = CostAwarePlanner(CostModel(learns=False))
    source = source_of([Entry(parallel_drafter())])
    request = make_request(1, PROMPT)
    planner.set_sources([source])
    for depth in (1, 8, 2, 5):
        planner.begin(StepShape(1, 7, 7, 1, 1), [request])
        planner.drafts.begin([1])
        assert planner.ask(source, [0]) == [0]
        drafted = DraftTree.chain([3] * depth, [0.5] * depth, source.name)
        planner.drafts.add(0, source.name, drafted)
        planner.drafted(source, [0], 2.0)
    assert planner.prices(source, [0], 8).level == 0.0


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "token"),
    [
        ({"pard_token": 3}, 3),
        ({"ptd_token_id": 7}, 7),
        ({"pard_token": [5, 5, 5]}, 5),
        ({"pard_token": -1}, None),
        ({}, None),
    ],
)
def test_the_mask_token_is_read_as_checkpoints_name_it(
    keys: dict[str, Any], token: int | None
) -> None:
    raw = json.loads((Path(embedded_model("draft")) / "config.json").read_text())
    assert config_from_hf(raw | keys).mask_token_id == token


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """The embedded draft under another configuration."""

    def made(**keys: Any) -> str:
        folder = tmp_path / "draft"
        shutil.copytree(embedded_model("draft"), folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))
        return str(folder)

    return made


def test_a_checkpoint_is_loaded_and_drafts(checkpoint: Callable[..., str]) -> None:
    config = {"method": "parallel_draft", "model": checkpoint(pard_token=3)}
    wish = SamplingParams(max_tokens=12, temperature=0.0)
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 1, "planner": "fixed"}
    plain_options = options | {"speculative_config": []}
    with (
        LLM("embedded", speculative_config=config, strict=True, **options) as llm,
        LLM("embedded", **plain_options) as plain,
    ):
        assert llm.proposers == ("parallel_draft",)
        answer = llm.generate("def add(a, b):", wish)
        assert answer.token_ids == plain.generate("def add(a, b):", wish).token_ids
        assert llm.stats().speculation.by_proposer["parallel_draft"].num_accepted_tokens


def test_a_draft_without_a_mask_token_is_refused(checkpoint: Callable[..., str]) -> None:
    config = {"method": "parallel_draft", "model": checkpoint()}
    with pytest.raises(ConfigError, match="train draft --parallel"):
        LLM("embedded", speculative_config=config, strict=True, max_model_len=128)


def test_a_configuration_needs_the_draft() -> None:
    with pytest.raises(ConfigError, match='"parallel_draft" needs "model"'):
        SpeculativeConfig("parallel_draft")


def test_it_can_be_asked_for_as_of_vllm() -> None:
    asked = {"method": "draft_model", "model": "folder", "parallel_drafting": True}
    (config,) = parse_speculative_config(asked)
    assert config == SpeculativeConfig("parallel_draft", "folder", num_speculative_tokens=8)
    (config,) = parse_speculative_config(asked | {"parallel_drafting": False})
    assert config.method == "draft_model"
    for broken in ({"parallel_drafting": "yes"}, {"method": "suffix"}):
        with pytest.raises(ConfigError, match="parallel_drafting"):
            parse_speculative_config(asked | broken)
