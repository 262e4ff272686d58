"""Plain equals speculative where a model thinks first and then answers in a shape.

Drafts cross the end of the thoughts in the middle of a tree, mark by token or mark by parts. The
shape of the answer is an automaton written here, so nothing of a grammar library is believed. As in
:mod:`tests.contracts.test_identity` the log-probs of the whole vocabulary are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import SpeculativeConfig
from paceline.proposers.base import DraftBudget, Proposer
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from paceline.request.structured_outputs import StructuredOutputs, ThoughtMarks
from paceline.structured.thoughts import AfterThoughts, Marks, TextStage
from tests.automaton import Automaton
from tests.contracts.test_identity import GREEDY, WARM, answers, prompts
from tests.contracts.test_structured_identity import ALL
from tests.quick import in_turns
from tests.toy import EOS, VOCAB, Job, Result, assert_no_leak, run_jobs, toy_engine

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHI"
LONGER = ["(", ")", "(a", ")b", "))", "))c", "))de", "x))f", "(ab", "a(", "bc)", "))))"]
PIECES = [b"", *(text.encode() for text in [*LETTERS, *LONGER])]
TOKEN_OF = {piece: token for token, piece in enumerate(PIECES)}
MARKS = ThoughtMarks(["((", "(a"], ["))", ")b)"])
TABLE = Marks(MARKS.opening, MARKS.closing, PIECES, [EOS])
HURRY = {token: 2.5 for token, piece in enumerate(PIECES) if b"(" in piece or b")" in piece}
SAMPLING = {
    "greedy": replace(GREEDY, logit_bias=HURRY),
    "temperature": replace(WARM, logit_bias=HURRY),
    "filters": replace(WARM, logit_bias=HURRY, top_k=9, top_p=0.9, min_p=0.01),
    "penalties": replace(WARM, logit_bias=HURRY, repetition_penalty=1.2, presence_penalty=0.5),
    "n_3": replace(WARM, logit_bias=HURRY, n=3),
}
assert len(PIECES) == VOCAB


def letters(text: bytes) -> list[int]:
    return [TOKEN_OF[text[at : at + 1]] for at in range(len(text))]


def shaped(params: SamplingParams, seed: int, opened: bool) -> SamplingParams:
    """Parameters that carry the seed of their automaton, and whether thoughts are open."""
    shape = StructuredOutputs(regex=str(seed), after=replace(MARKS, opened=opened))
    return replace(params, structured_outputs=shape, max_tokens=40)


def constraints(job: Job) -> Sequence[AfterThoughts]:
    shape = job.params.structured_outputs
    if shape is None:
        return ()
    assert shape.after is not None
    seed, opened = int(shape.source), shape.after.opened
    return [
        AfterThoughts(TABLE, Automaton(seed), None if opened else Automaton(seed), letters)
        for _ in range(job.params.n)
    ]


class Foresight(Proposer):
    """Drafts what plain decoding said, with wrong branches beside it: it crosses every boundary."""

    name = "foresight"

    def __init__(self, told: Callable[[Request], list[int]]) -> None:
        self.config = SpeculativeConfig(num_speculative_tokens=6, min_accept_prob=0.0)
        self._told = told

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        limits = zip(requests, budget.max_nodes, budget.max_depth, strict=True)
        return [self._tree(request).within(*most) for request, *most in limits]

    def _tree(self, request: Request) -> DraftTree:
        tree, parent = DraftTree(), -1
        for token in self._told(request)[request.num_output_tokens :][:6]:
            for each in (token, (token + 11) % VOCAB):
                tree.token_ids.append(each)
                tree.parents.append(parent)
                tree.accept_probs.append(0.9)
                tree.origins.append(self.name)
            parent = len(tree) - 2
        return tree


def run(proposers: Sequence[Any], jobs: Sequence[Job], **config: Any) -> list[list[Result]]:
    engine = toy_engine(list(proposers), **config)
    results = run_jobs(engine, jobs, constraints=constraints)
    assert_no_leak(engine)
    assert engine.stats().num_proposer_failures == 0
    for job, group in zip(jobs, results, strict=True):
        for result in group:
            check(job, result)
    return results


def check(job: Job, result: Result) -> None:
    """Behind the first closing mark every token is the automaton's."""
    assert result.error is None
    shape = job.params.structured_outputs
    if shape is None:
        return
    assert shape.after is not None
    tokens = [token for token in result.token_ids if token != EOS]
    answer = answer_tokens(tokens, shape.after.opened)
    if answer is None:
        assert EOS not in result.token_ids, "thoughts do not end a text"
    else:
        assert Automaton(int(shape.source)).takes(answer)


def answer_tokens(tokens: Sequence[int], opened: bool) -> list[int] | None:
    """What follows the thoughts, or everything where there are none; None inside of them."""
    text = b"".join(PIECES[token] for token in tokens)
    if not opened:
        if text == b"(":
            return None
        if not text.startswith((b"((", b"(a")):
            return list(tokens)
    begin = 0 if opened else 2
    ends = [at + len(m) for m in (b"))", b")b)") if (at := text.find(m, begin)) >= 0]
    if not ends:
        return None
    left, behind = len(text) - min(ends), list[int]()
    for token in reversed(tokens):
        piece = PIECES[token]
        if left > 0:
            behind = [token, *behind] if len(piece) <= left else letters(piece[-left:]) + behind
            left -= len(piece)
    return behind


@pytest.fixture(scope="module")
def truth() -> Any:
    known: dict[str, Any] = {}

    def answer(job: Job) -> Any:
        key = repr((list(job.prompt), job.params))
        if key not in known:
            known[key] = answers(run([], [Job(job.prompt, job.params)]))[0]
        return known[key]

    return lambda jobs: [answer(job) for job in jobs]


def told_plainly(jobs: Sequence[Job]) -> Callable[[Request], list[int]]:
    """The plain output of each request's own job and sample."""
    outputs = {}
    for job in jobs:
        (group,) = run([], [job])
        for index, result in enumerate(group):
            outputs[tuple(job.prompt), repr(job.params), index] = result.token_ids

    def told(request: Request) -> list[int]:
        prompt = tuple(request.token_ids[: request.prompt_len])
        return outputs[prompt, repr(request.params), request.sample_index]

    return told


def eight_jobs(sampling: str) -> list[Job]:
    return [
        Job(prompts()[seed % len(prompts())], shaped(SAMPLING[sampling], seed, seed % 2 == 0))
        for seed in range(1, 9)
    ]


@pytest.mark.parametrize(
    ("proposer", "sampling"),
    in_turns(["suffix", "lookup_tree", "draft_tree", "several", "random", "grammar"], SAMPLING),
)
@pytest.mark.parametrize("at_once", [1, pytest.param(3, marks=pytest.mark.slow), 8])
def test_drafts_of_every_kind(proposer: str, sampling: str, at_once: int, truth: Any) -> None:
    jobs = eight_jobs(sampling)
    found = run([make() for make in ALL[proposer]], jobs, max_num_seqs=at_once * 3)
    assert answers(found) == truth(jobs)


@pytest.mark.parametrize(
    ("sampling", "at_once"),
    [("greedy", 1), ("greedy", 8), ("temperature", 8), ("filters", 8), ("n_3", 8)],
)
def test_drafts_across_the_boundary_are_accepted_there(
    sampling: str, at_once: int, truth: Any
) -> None:
    jobs = eight_jobs(sampling)
    found = run([Foresight(told_plainly(jobs))], jobs, max_num_seqs=at_once * 3)
    assert answers(found) == truth(jobs)
    places = [
        result.request.constraint.place
        for group in found
        for result in group
        if result.request is not None and isinstance(result.request.constraint, AfterThoughts)
    ]
    assert places.count(TextStage.ANSWER) >= len(places) / 2
    accepted = sum(origin == "foresight" for group in found for r in group for origin in r.origins)
    assert accepted > sum(len(r.origins) for group in found for r in group) / 3


def test_free_and_thinking_requests_share_batches(truth: Any) -> None:
    jobs = [
        Job(job.prompt, replace(job.params, max_tokens=12 + 5 * i), at=i)
        for i, job in enumerate(eight_jobs("temperature"))
    ]
    jobs[3] = Job(jobs[3].prompt, WARM, at=3)
    found = run([make() for make in ALL["several"]], jobs)
    assert answers(found) == truth(jobs)
