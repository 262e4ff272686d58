"""Drafting across vocabularies: trees, KV, and a draft that is the target under other names."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.cache.model_runner import ModelRunner
from paceline.proposers.draft_model.heterogeneous import translate
from paceline.proposers.draft_model.translation import Translation, VocabularyPair
from paceline.request.request import Request
from paceline.request.span import DraftTree
from tests.proposers.drive import Target, commit, make_request, propose
from tests.proposers.vocabularies import (
    close_pair,
    far_pair,
    foreign_drafter,
    letters,
    merging,
    reversed_letters,
    reversed_self,
    toy_vocabulary,
)
from tests.toy import VOCAB, Job, assert_no_leak, run_jobs, toy_engine, toy_runner

PROMPT = [5, 9, 2, 7, 7, 30, 11]
TREE = {"max_tree_nodes": 12, "max_branching": 3, "num_speculative_tokens": 4}
SAMPLING = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3}]


# --- the oracle: a draft that is the target, under other names ---------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("options", [{}, TREE])
def test_a_close_vocabulary_drafts_as_the_target_would(
    options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    model, request = Target(toy_runner()), make_request(1, PROMPT, **sampling)
    proposer = foreign_drafter(close_pair(), reversed_self(), **options)
    for _ in range(6):
        draft, result = model.step(proposer, request)
        assert len(draft) == (12 if options else 4)
        assert result.path[-1] - 1 not in draft.parents  # down to a leaf


def test_a_draft_by_texts_says_what_the_target_will() -> None:
    pair = far_pair(letters(), reversed_letters())
    model, request = Target(toy_runner()), make_request(1, PROMPT)
    proposer = foreign_drafter(pair, reversed_self())
    for _ in range(6):
        draft, result = model.step(proposer, request)
        assert result.num_accepted == len(draft) >= 2


def own_runner() -> ModelRunner:
    """The draft model's."""
    return toy_runner(prefix_caching=False, noise=0.2)


# --- what it holds ------------------------------------------------------------------------------


def held(runner: ModelRunner, request: Request) -> int:
    return runner.kv[request.request_id].length


def test_kept_kv_is_what_a_fresh_draft_computes() -> None:
    model, request, runner = Target(toy_runner()), make_request(1, PROMPT), own_runner()
    proposer = foreign_drafter(far_pair(), runner, **TREE)
    drafted = 0
    for _ in range(8):
        assert propose(proposer, request) == propose(foreign_drafter(far_pair(), **TREE), request)
        draft, _ = model.step(proposer, request)
        drafted += len(draft)
    assert drafted
    proposer.finish(request)
    assert runner.kv.pool.num_used == 0


def spelt(pair: VocabularyPair, text: str) -> list[int]:
    return pair.target.tokenizer.encode(text)


def test_kv_is_rolled_back_to_the_first_token_that_differs() -> None:
    pair = far_pair(replacements=[("fxy", "o")])
    runner, request = own_runner(), make_request(1, spelt(pair, "efx"))
    proposer = foreign_drafter(pair, runner)
    propose(proposer, request)
    assert held(runner, request) == 3
    commit(proposer, request, spelt(pair, "y"))
    assert held(runner, request) == 1
    assert propose(proposer, request) == propose(foreign_drafter(pair), request)


def test_the_oldest_text_is_forgotten_where_the_context_ends() -> None:
    pair, runner = far_pair(), own_runner()
    proposer = foreign_drafter(pair, runner)
    request = make_request(1, spelt(pair, "efx"), max_len=2000)
    drafted = []
    for _ in range(12):
        drafted.append(len(propose(proposer, request)[0]))
        assert held(runner, request) < 256
        commit(proposer, request, spelt(pair, "cdxefghzabA" * 5))
    assert len(request.token_ids) > 300
    assert all(drafted)


# --- in an engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [11, 100])
def test_an_engine_says_what_it_says_plainly(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too few blocks for all requests, and a draft that fails now and then."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=7, logprobs=VOCAB)
    jobs = [
        Job(PROMPT, replace(params, temperature=0.0)),
        Job(PROMPT[::-1], replace(params, n=2)),
        Job(PROMPT * 3, replace(params, repetition_penalty=1.3, frequency_penalty=0.4), at=3),
    ]
    runner, calls = own_runner(), itertools.count()
    proposer, forward = foreign_drafter(far_pair(), runner, **TREE), runner.forward

    def failing(*arguments: Any) -> Any:
        if next(calls) in (4, 20):
            raise RuntimeError("broken")
        return forward(*arguments)

    monkeypatch.setattr(runner, "forward", failing)
    engine = toy_engine([proposer], num_blocks=num_blocks)
    found = run_jobs(engine, jobs)
    plain = run_jobs(toy_engine(), jobs)
    assert [[r.answer for r in group] for group in found] == [
        [r.answer for r in group] for group in plain
    ]
    assert any("draft_model" in result.origins for group in found for result in group)
    assert next(calls) > 20
    assert_no_leak(engine)
    assert runner.kv.pool.num_used == 0


# --- trees --------------------------------------------------------------------------------------


def translated(
    pair: VocabularyPair, prompt: str, tokens: list[str], parents: list[int], **options: Any
) -> list[tuple[bytes | str | None, int, float]]:
    """The target's tree for a tree of the draft, all of whose nodes are half sure."""
    ids = {piece.decode(): token for token, piece in enumerate(pair.draft.pieces) if piece}
    ids |= pair.draft.specials
    translation = Translation(pair, 100)
    translation.update(pair.target.tokenizer.encode(prompt))
    count = len(tokens)
    draft = DraftTree([ids[t] for t in tokens], parents, [0.5] * count, ["draft_model"] * count)
    tree = translate(translation, draft, options.pop("max_nodes", 20), 20, 0.0, **options)
    spell = pair.target.tokenizer.id_to_token
    return [
        (spell(token), parent, prob)
        for token, parent, prob in zip(tree.token_ids, tree.parents, tree.accept_probs, strict=True)
    ]


def single_letters() -> VocabularyPair:
    """A target that merges, and a draft that does not."""
    return far_pair(merging(), letters())


def test_a_token_is_as_likely_as_all_that_it_takes() -> None:
    found = translated(single_letters(), "x", ["e", "f", "z"], [-1, 0, 1])
    assert found == [("ef", -1, 0.25), ("z", 0, 0.5)]


def test_paths_that_say_the_same_are_added_up() -> None:
    pair = far_pair(letters(), merging())
    found = translated(pair, "x", ["cd", "c", "d", "e", "c"], [-1, -1, 1, 1, 0])
    # "c" by "cd" and by "c"; "d" after it by "cd" and by "c" "d".
    assert found[:2] == [("c", -1, 1.0), ("d", 0, 0.75)]
    assert {(token, parent) for token, parent, _ in found[2:]} == {("e", 0), ("c", 1)}


def test_what_may_still_merge_is_not_drafted() -> None:
    assert translated(single_letters(), "x", ["z", "a"], [-1, 0]) == [("z", -1, 0.5)]


def test_what_the_target_would_have_merged_is_not_drafted() -> None:
    assert translated(single_letters(), "xa", ["b"], [-1]) == []


def test_of_a_chain_the_likeliest_path_is_left() -> None:
    pair = far_pair(letters(), merging())
    found = translated(pair, "x", ["c", "d", "d", "z"], [-1, -1, 0, 1], is_chain=True)
    assert [(token, parent) for token, parent, _ in found] == [("c", -1), ("d", 0)]
    assert len(translated(pair, "x", ["c", "d", "z"], [-1, -1, 0], max_nodes=2)) == 2


def test_an_end_is_an_end_in_either_vocabulary() -> None:
    specials = {"eos_token": "<end>"}
    pair = far_pair(merging(), toy_vocabulary(["<end>", *"abcdefxyz"], **specials))
    assert translated(pair, "x", ["z", "a", "<end>"], [-1, 0, 1]) == [
        ("z", -1, 0.5),
        ("a", 0, 0.5),  # nothing can merge with it
        ("</s>", 1, 0.5),
    ]
    assert translated(pair, "x", ["<end>"], [-1]) == [("</s>", -1, 0.5)]


# --- trained models -----------------------------------------------------------------------------

MODELS = ("tinystories-656k", "stories260k", "babyllama-tok105")
PROMPTS = ("Once upon a time, there was a", "One day, a little girl named Lily went to the")


def answers(target: Path, draft: Path | None, params: SamplingParams, **options: Any) -> Any:
    config = None
    if draft is not None:
        config = {"model": str(draft), "use_heterogeneous_vocab": True, **options}
    with LLM(
        str(target), speculative_config=config, planner="fixed", max_model_len=200, strict=True
    ) as llm:
        outputs = llm.generate(list(PROMPTS), params)
        return [output.token_ids for output in outputs], llm.stats().speculation


@pytest.mark.parametrize("pair", [(0, 1), (1, 2)])
def test_trained_models_draft_for_each_other(shared_data: Path, pair: tuple[int, int]) -> None:
    target, draft = (shared_data / "models" / MODELS[i] for i in pair)
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    plain, _ = answers(target, None, greedy)
    drafted, counters = answers(target, draft, greedy, max_tree_nodes=8, max_branching=2)
    assert drafted == plain
    assert counters.num_accepted_tokens > 8


@pytest.mark.slow
@pytest.mark.parametrize("target", MODELS)
@pytest.mark.parametrize("draft", MODELS)
def test_every_trained_model_drafts_for_every_other(
    shared_data: Path, target: str, draft: str
) -> None:
    folder = shared_data / "models"
    for params in (
        SamplingParams(temperature=0.0, max_tokens=100),
        SamplingParams(temperature=0.8, seed=5, max_tokens=100),
        SamplingParams(temperature=1.0, seed=6, max_tokens=60, repetition_penalty=1.2),
    ):
        plain, _ = answers(folder / target, None, params)
        for options in ({}, {"max_tree_nodes": 16, "max_branching": 3}):
            drafted, counters = answers(folder / target, folder / draft, params, **options)
            assert drafted == plain
            assert counters.num_accepted_tokens > 0
