"""Plain equals speculative where outputs have to fit a grammar; and they do fit.

The grammar is an automaton written here, so nothing of a grammar library is believed. As in
:mod:`tests.contracts.test_identity` the log-probs of the whole vocabulary are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import parse_speculative_config
from paceline.core.errors import RequestFailedError
from paceline.engine.engine import Engine
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.grammar import GrammarProposer
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.request.structured_outputs import StructuredOutputs
from tests.automaton import Automaton
from tests.contracts.test_identity import (
    GREEDY,
    MIXES,
    PROPOSERS,
    WARM,
    Factory,
    answers,
    checkers,
    prompts,
)
from tests.quick import in_turns
from tests.toy import EOS, Job, Result, assert_no_leak, draft_config, run_jobs, toy_engine
from tests.toy import toy_runner as runner

(GRAMMAR,) = parse_speculative_config({"method": "grammar"})
ALL: dict[str, list[Factory]] = {
    **PROPOSERS,
    "grammar": [lambda: GrammarProposer(GRAMMAR)],
}
SAMPLING = {
    "greedy": GREEDY,
    "temperature": WARM,
    "filters": replace(WARM, top_k=6, top_p=0.9, min_p=0.01),
    "penalties": replace(WARM, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "logit_bias": replace(GREEDY, logit_bias={0: 3.0, 5: -100.0, 9: 5.0}),
    "min_tokens": replace(WARM, logit_bias={0: 6.0}, min_tokens=6),
    "ignore_eos": replace(WARM, logit_bias={0: 3.0}, ignore_eos=True),
    "stop_token": replace(WARM, stop_token_ids=(7, 11, 13, 20)),
    "stop_strings": replace(WARM, stop=("k", "no", "x")),
    "n_3": replace(WARM, n=3),
}


def shaped(params: SamplingParams, seed: int) -> SamplingParams:
    """Parameters that carry the seed of their automaton."""
    return replace(params, structured_outputs=StructuredOutputs(regex=str(seed)))


def automata(job: Job) -> Sequence[Automaton]:
    spec = job.params.structured_outputs
    if spec is None:
        return ()
    return [Automaton(int(spec.source)) for _ in range(job.params.n)]


def make(name: str, **config: Any) -> Engine:
    return toy_engine([factory() for factory in ALL[name]], **config)


def run(engine: Engine, jobs: Sequence[Job]) -> list[list[Result]]:
    results = run_jobs(engine, jobs, checkers=checkers, constraints=automata)
    assert_no_leak(engine)
    for job, group in zip(jobs, results, strict=True):
        for result in group:
            check_result(job, result)
    return results


def check_result(job: Job, result: Result) -> None:
    """The output is a path of the automaton, and the constraint has followed exactly that."""
    assert result.error is None
    assert result.request is not None
    if job.params.structured_outputs is None:
        return
    (*body, last) = result.token_ids
    assert EOS not in body
    output = body if last == EOS else result.token_ids
    fresh, followed = automata(job)[0], result.request.constraint
    assert isinstance(followed, Automaton)
    for token in output:
        assert not fresh.is_complete
        fresh.advance(token)
    assert followed.output == fresh.output
    if last == EOS or fresh.is_complete:
        assert result.finish_reason == "stop"


@pytest.fixture(scope="module")
def truth() -> Any:
    known: dict[str, Any] = {}

    def answer(job: Job) -> Any:
        key = repr((list(job.prompt), job.params))
        if key not in known:
            known[key] = answers(run(toy_engine(), [Job(job.prompt, job.params)]))[0]
        return known[key]

    return lambda jobs: [answer(job) for job in jobs]


@pytest.mark.parametrize(
    ("proposer", "sampling", "seed"),
    in_turns(["lookup_tree", "draft_tree", "head_tree", "random", "grammar"], SAMPLING, (1, 4)),
)
def test_one_request(proposer: str, sampling: str, seed: int, truth: Any) -> None:
    job = Job(prompts()[0], shaped(SAMPLING[sampling], seed))
    assert answers(run(make(proposer), [job])) == truth([job])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("proposer", ["several", "random", "grammar"])
def test_constrained_and_free_requests_mixed(proposer: str, mix: str, truth: Any) -> None:
    modes = [shaped(GREEDY, 1), WARM, shaped(SAMPLING["n_3"], 7), shaped(SAMPLING["penalties"], 5)]
    endless = {EOS: -100.0}
    jobs = [
        Job(prompt, replace(params, max_tokens=10 + 7 * i, logit_bias=endless), at=2 * i)
        for i, (prompt, params) in enumerate(zip(prompts(), modes, strict=True))
    ]
    engine = make(proposer, **MIXES[mix])
    assert answers(run(engine, jobs)) == truth(jobs)
    assert (engine.stats().num_preemptions > 0) == mix.startswith("preempted")
    if mix == "staggered":
        assert answers(run(engine, jobs)) == truth(jobs), "with cached prefixes"


def test_only_legal_nodes_are_verified() -> None:
    """Of 47 tokens few fit, so random drafts lose most of their nodes before they cost a row."""
    rows = {}
    for grammar in (False, True):
        engine = make("random")
        params = shaped(WARM, 1) if grammar else WARM
        run(engine, [Job(prompts()[0], replace(params, max_tokens=60, logit_bias={0: -100.0}))])
        counters = engine.stats().speculation
        rows[grammar] = counters.by_proposer["random"].num_draft_tokens / counters.num_steps
    assert rows[True] < rows[False] / 3


def test_every_certain_token_is_accepted() -> None:
    """The grammar's own drafts: what one token alone can follow costs no step."""
    for seed in range(6):
        engine = make("grammar")
        (result,) = run(engine, [Job(prompts()[1], shaped(WARM, seed))])[0]
        automaton = Automaton(seed)
        for token, origin in itertools.islice(
            zip(result.token_ids, result.origins, strict=True), 1, None
        ):
            automaton.output = result.token_ids[: len(automaton.output) + 1]
            if origin == "target" and automaton.certain(()) == token:
                # A certain token is only left to the target behind an uncertain one.
                previous = Automaton(seed)
                previous.output = automaton.output[:-1]
                assert previous.certain(()) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_self_draft_under_the_same_mask_is_always_accepted(temperature: float) -> None:
    proposer = DraftModelProposer(draft_config(), runner(prefix_caching=False))
    engine = toy_engine([proposer])
    engine.drafting.join(GrammarProposer(GRAMMAR))  # it would join anyway; here it may not draft
    params = SamplingParams(
        temperature=temperature,
        seed=3,
        max_tokens=40,
        logit_bias={EOS: -100.0},
        speculative=SpeculativeParams(methods=["draft_model"]),
    )
    for seed in (1, 2, 5):
        (result,) = run(engine, [Job(prompts()[0], shaped(params, seed))])[0]
        assert result.request is not None
        counters = result.request.counters
        missed = counters.num_draft_tokens - counters.num_accepted_tokens
        assert counters.num_accepted_tokens > 0
        assert missed < 5, "only a stop cuts the last draft"
    assert engine.stats().num_proposer_failures == 0


@pytest.mark.parametrize("proposer", ["several", "random", "grammar"])
def test_a_grammar_that_fails_ends_its_request_alone(proposer: str, truth: Any) -> None:
    def some_fail(job: Job) -> Sequence[Automaton]:
        return [Automaton(1, fails_at=5)] if job.params.seed == 99 else automata(job)

    bad = shaped(replace(WARM, seed=99, logit_bias={EOS: -100.0}), 1)
    jobs = [Job(prompts()[0], shaped(WARM, 2)), Job(prompts()[1], bad), Job(prompts()[2], GREEDY)]
    engine = make(proposer)
    good, (failed,), free = run_jobs(engine, jobs, checkers=checkers, constraints=some_fail)
    assert answers([good, free]) == truth([jobs[0], jobs[2]])
    assert isinstance(failed.error, RequestFailedError)
    assert "out of fuel" in str(failed.error)
    assert len(failed.token_ids) == 5, "as many as without drafts"
    assert engine.stats().num_proposer_failures == 0
    assert_no_leak(engine)


def test_the_grammar_joins_whoever_drafts_and_only_then() -> None:
    plain, drafting = toy_engine(), make("lookup_chain")
    for engine in (plain, drafting):
        run(engine, [Job(prompts()[0], GREEDY)])
        assert "grammar" not in [p.name for p in engine.drafting.proposers]
        run(engine, [Job(prompts()[0], shaped(GREEDY, 1))])
    assert not plain.drafting.is_on
    assert [p.name for p in drafting.drafting.proposers] == ["grammar", "prompt_lookup"]
    (result,) = run(drafting, [Job(prompts()[0], shaped(excluding(GREEDY), 1))])[0]
    assert "grammar" not in result.origins


def excluding(params: SamplingParams) -> SamplingParams:
    return replace(params, speculative=SpeculativeParams(methods=["prompt_lookup"]))
