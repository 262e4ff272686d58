"""A head that nobody asks reads nothing, and begins anew with what comes once it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.cache.model_runner import ModelRunner
from paceline.engine.engine import Engine
from paceline.proposers.base import DraftBudget
from paceline.proposers.heads.proposer import LEAST_CONTEXT, PATIENCE, HeadProposer
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from tests.contracts.test_identity import answers, prompts
from tests.proposers.heads import PlainHead, fresh_features, head_config, head_tensors, toy_head
from tests.toy import Job, assert_no_leak, run_jobs, toy_engine

DEPTH = 3
LONG = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
PROMPT = prompts()[0] * 2


class Noted(HeadProposer):
    """Keeps the chains that it drafted, by the tokens below which they are."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        trees = super().propose(requests, budget)
        for request, tree in zip(requests, trees, strict=True):
            drafted.append((request.request_id, tuple(request.token_ids), tuple(tree.token_ids)))
        return trees


drafted: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
tensors = head_tensors(1)


@pytest.fixture(autouse=True)
def _nothing_drafted() -> None:
    drafted.clear()


def engine_that_asks(asks: Callable[[Request], bool], **config: Any) -> Engine:
    """An engine with a head that is asked for those requests alone."""

    def make(runner: ModelRunner) -> HeadProposer:
        return toy_head(runner, tensors=tensors, kind=Noted, num_speculative_tokens=DEPTH)

    engine = toy_engine([make], **config)
    planner, requests = engine.drafting.planner, list[Request]()

    def begin(step: Any, given: Sequence[Request]) -> int:
        requests[:] = given
        return 0

    def ask(source: Any, able: Sequence[int]) -> list[int]:
        return [i for i in able if source.lag(requests[i]) is not None and asks(requests[i])]

    planner.begin, planner.ask = begin, ask  # type: ignore[method-assign]
    return engine


def read_steps(engine: Engine, jobs: Sequence[Job]) -> tuple[list[bool], Any]:
    """For each step whether its forward returned hidden states, and the answers."""
    read, forward = list[bool](), engine.runner.forward

    def watched(*arguments: Any, **named: Any) -> Any:
        result = forward(*arguments, **named)
        read.append(result.features is not None)
        return result

    engine.runner.forward = watched  # type: ignore[method-assign]
    found = answers(run_jobs(engine, jobs))
    engine.runner.forward = forward  # type: ignore[method-assign]
    return read, found


def all_begin_at(begin: int) -> bool:
    """Whether plain torch that reads from there drafts the same, and not if it reads all."""
    plain, chains = PlainHead(tensors, head_config()), [each for each in drafted if each[2]]

    def drafts(tokens: tuple[int, ...], first: int, depth: int) -> tuple[int, ...]:
        features = fresh_features(tokens[:-1])[first:]
        return tuple(plain.chain(tokens[first:], features, depth))

    fits = all(drafts(tokens, begin, len(chain)) == chain for _, tokens, chain in chains)
    return fits and any(drafts(tokens, 0, len(chain)) != chain for _, tokens, chain in chains)


def test_hidden_states_are_not_read_for_long_where_nobody_asks() -> None:
    plain = answers(run_jobs(toy_engine(), [Job(PROMPT, LONG)]))
    engine = engine_that_asks(lambda request: False)
    read, found = read_steps(engine, [Job(PROMPT, LONG)])
    assert found == plain
    assert read == [True] * (1 + PATIENCE) + [False] * (len(read) - 1 - PATIENCE)
    read, _ = read_steps(engine, [Job(PROMPT[:9], LONG)])
    assert not any(read)  # the next request is not read at all
    assert_no_leak(engine)


def test_one_that_is_asked_again_drafts_with_what_came_since() -> None:
    plain = answers(run_jobs(toy_engine(), [Job(PROMPT, LONG)]))
    woken_at = len(PROMPT) + 40
    engine = engine_that_asks(lambda request: len(request.token_ids) >= woken_at)
    _, found = read_steps(engine, [Job(PROMPT, LONG)])
    assert found == plain
    chains = [each for each in drafted if each[2]]
    assert len(chains) > 10
    assert len(chains[0][1]) == woken_at + LEAST_CONTEXT
    assert all_begin_at(woken_at - 1)
    read, _ = read_steps(engine, [Job(PROMPT[:9], replace(LONG, max_tokens=4))])
    assert all(read)  # it was wanted to the end, and so is read for whoever comes


def test_what_was_not_read_of_a_shared_prefix_is_left_out() -> None:
    """The second request finds keys and values in the prefix cache, but no hidden states."""
    engine = engine_that_asks(lambda request: request.request_id == 1)
    drafter = engine.drafting.proposers[0]
    assert isinstance(drafter, Noted)
    for is_wanted in (False, True):
        drafter._is_wanted = is_wanted
        run_jobs(engine, [Job(PROMPT, LONG)])
    shared = engine.stats().num_cached_tokens
    assert shared > 0
    assert all_begin_at(shared)


def test_few_tokens_are_not_worth_waking_for() -> None:
    engine = engine_that_asks(lambda request: True)
    drafter = engine.drafting.proposers[0]
    assert isinstance(drafter, Noted)
    drafter._is_wanted = False
    read, _ = read_steps(engine, [Job(PROMPT, replace(LONG, max_tokens=2 * LEAST_CONTEXT))])
    assert not any(read)
    assert not drafted
