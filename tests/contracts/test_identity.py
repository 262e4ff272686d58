"""Plain equals speculative: every proposer, every way of sampling, every mix of requests.

The answer that is compared holds the token ids, the finish and stop reasons and the log-probs of
the *whole* vocabulary at every token, so a single differing bit in any logit fails. Unused KV slots
hold NaN throughout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.backends.native.native import why_not_native
from paceline.config import KV_DTYPES, SpeculativeConfig
from paceline.engine.engine import Engine
from paceline.proposers.base import DraftBudget, Proposer
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.proposers.suffix import SuffixProposer
from paceline.request.request import Request, VerifyResult
from paceline.request.sampling_params import SamplingParams
from paceline.request.span import DraftTree
from tests.proposers.dflash import toy_dflash
from tests.proposers.heads import toy_head
from tests.proposers.mtp import toy_mtp
from tests.proposers.ngrams import ngram_proposer
from tests.proposers.parallel_heads import toy_dflash2, toy_dspark, toy_peagle
from tests.quick import in_step, in_turns, once
from tests.toy import (
    VOCAB,
    Job,
    OfRunner,
    Result,
    assert_no_leak,
    draft_config,
    lookup_config,
    run_jobs,
    suffix_config,
    toy_engine,
    toy_runner,
)


class RandomTrees(Proposer):
    """Drafts trees of random shape and tokens: what no sane proposer would do."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.config = SpeculativeConfig(
            num_speculative_tokens=6, max_tree_nodes=12, min_accept_prob=0.0
        )
        self._random = random.Random(seed)

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        limits = zip(budget.max_nodes, budget.max_depth, strict=True)
        return [self._tree(nodes, depth) for nodes, depth in limits]

    def _tree(self, nodes: int, depth: int) -> DraftTree:
        tree, seen = DraftTree(), set()
        for _ in range(self._random.randint(0, nodes)):
            parent = self._random.randint(-1, len(tree) - 1)
            token = self._random.randrange(VOCAB)
            deep = parent >= 0 and tree.depths()[parent] >= depth
            if deep or (parent, token) in seen:
                continue
            seen.add((parent, token))
            tree.token_ids.append(token)
            tree.parents.append(parent)
            tree.accept_probs.append(self._random.random())
            tree.origins.append(self.name)
        return tree


def draft(noise: float, **options: Any) -> Callable[[], Proposer]:
    return lambda: DraftModelProposer(
        draft_config(**options), toy_runner(prefix_caching=False, noise=noise)
    )


def lookup(**options: Any) -> Callable[[], Proposer]:
    return lambda: PromptLookupProposer(lookup_config(**options))


def head(**options: Any) -> Callable[[], OfRunner]:
    return lambda: lambda runner: toy_head(runner, **options)


def dflash(**options: Any) -> Callable[[], OfRunner]:
    return lambda: lambda runner: toy_dflash(runner, **options)


Factory = Callable[[], Proposer | OfRunner]
PROPOSERS: dict[str, list[Factory]] = {
    "lookup_chain": [lookup()],
    "lookup_tree": [lookup(max_branching=3, max_tree_nodes=9)],
    "suffix": [lambda: SuffixProposer(suffix_config())],
    "draft_chain": [draft(0.3)],
    "draft_tree": [draft(0.3, max_branching=2, max_tree_nodes=10)],
    "head_chain": [head()],
    "head_tree": [head(max_branching=3, max_tree_nodes=10)],
    "mtp_tree": [lambda: lambda runner: toy_mtp(runner, max_branching=3, max_tree_nodes=10)],
    "dflash_tree": [dflash(max_branching=3, max_tree_nodes=10)],
    "peagle_tree": [lambda: lambda runner: toy_peagle(runner, max_branching=3, max_tree_nodes=10)],
    "dspark_tree": [lambda: lambda runner: toy_dspark(runner, max_branching=3, max_tree_nodes=10)],
    "dflash2_tree": [
        lambda: lambda runner: toy_dflash2(runner, max_branching=3, max_tree_nodes=10)
    ],
    "several": [lookup(), ngram_proposer, draft(0.3, max_branching=2, max_tree_nodes=6), head()],
    "random": [RandomTrees],
}

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=VOCAB)
WARM = replace(GREEDY, temperature=0.8, seed=7)
SAMPLING = {
    "greedy": GREEDY,
    "temperature": WARM,
    "top_p": replace(WARM, top_p=0.9),
    "top_k": replace(WARM, top_k=20),
    "min_p": replace(WARM, min_p=0.05),
    "all_filters": replace(WARM, top_k=12, top_p=0.8, min_p=0.02),
    "penalties": replace(WARM, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "greedy_penalties": replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3),
    "logit_bias": replace(WARM, logit_bias={3: 4.0, 5: -100.0}),
    "allowed_and_banned": replace(
        WARM, allowed_token_ids=tuple(range(1, 20)), banned_token_ids=(4, 5)
    ),
    "bad_words": replace(
        WARM, bad_words_ids=[(a, b) for a in range(48) for b in range(a % 3, 48, 3)]
    ),
    "greedy_bad_words": replace(GREEDY, bad_words_ids=[(a, a) for a in range(48)], max_tokens=24),
    "min_tokens": replace(WARM, logit_bias={0: 6.0}, min_tokens=9),
    "stop_token": replace(WARM, stop_token_ids=(7, 11, 13)),
    "ignore_eos": replace(WARM, logit_bias={0: 3.0}, ignore_eos=True),
    "n_3": replace(WARM, n=3),
    "prompt_logprobs": replace(GREEDY, prompt_logprobs=5),
    "logprob_token_ids": replace(WARM, logprob_token_ids=(5, 3, 47, 5)),
    "n_2_prompt_logprobs": replace(WARM, n=2, prompt_logprobs=3),
    "stop_strings": replace(WARM, stop=("k", "no", "x")),
}


class LetterStop:
    """A stop checker over an alphabet in which token ``i`` is one letter."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._text = stop, ""

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        self._text += chr(97 + token_id)
        if not may_stop:
            return None
        return next((s for s in self._stop if self._text.endswith(s)), None)

    def take_text(self, *, final: bool) -> str:
        return ""


def checkers(job: Job) -> Sequence[Any]:
    return [LetterStop(job.params.stop) for _ in range(job.params.n)] if job.params.stop else ()


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    phrase = [rng.randrange(1, VOCAB) for _ in range(7)]
    return [
        phrase * 3 + phrase[:3],
        [rng.randrange(1, VOCAB) for _ in range(18)] + phrase,
        phrase * 2 + [rng.randrange(1, VOCAB) for _ in range(21)] + phrase,
        [rng.randrange(1, VOCAB) for _ in range(5)],
    ]


def make(names: Sequence[Factory], **config: Any) -> Engine:
    return toy_engine([factory() for factory in names], **config)


def plain_alone(job: Job, **config: Any) -> list[Result]:
    """The truth: an engine without speculation that serves nothing but this job."""
    return run_jobs(toy_engine(**config), [Job(job.prompt, job.params)], checkers=checkers)[0]


def answers(results: Sequence[Sequence[Result]]) -> list[list[Any]]:
    return [[result.answer for result in group] for group in results]


Truth = Callable[..., list[list[Any]]]


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Plain answers to jobs, computed once per prompt, parameters and dtypes."""
    known: dict[str, list[Any]] = {}

    def answer(job: Job, config: dict[str, Any]) -> list[Any]:
        key = repr((list(job.prompt), job.params, sorted(config.items())))
        if key not in known:
            known[key] = answers([plain_alone(job, **config)])[0]
        return known[key]

    return lambda jobs, **config: [answer(job, config) for job in jobs]


def check(engine: Engine, jobs: Sequence[Job], truth: Truth, script: Any = None) -> None:
    results = run_jobs(engine, jobs, script, checkers=checkers)
    assert answers(results) == truth(jobs)
    assert_no_leak(engine)


@pytest.mark.parametrize(
    ("proposer", "sampling", "prompt"), once(PROPOSERS, SAMPLING, range(2), times=6)
)
def test_one_request(proposer: str, sampling: str, prompt: int, truth: Truth) -> None:
    job = Job(prompts()[prompt], SAMPLING[sampling])
    check(make(PROPOSERS[proposer]), [job], truth)


@pytest.mark.parametrize(
    ("proposer", "stop"), once(PROPOSERS, [("c",), ("ab", "ba", "e"), ("k", "no", "x")])
)
def test_stop_strings(proposer: str, stop: tuple[str, ...], truth: Truth) -> None:
    for base in (GREEDY, WARM):
        check(make(PROPOSERS[proposer]), [Job(prompts()[0], replace(base, stop=stop))], truth)


GROUPS = [
    ("greedy", "penalties", "top_p", "n_3"),
    ("min_p", "top_k", "logit_bias", "prompt_logprobs"),
    ("all_filters", "min_tokens", "stop_strings", "n_2_prompt_logprobs"),
]


def staggered(group: int = 0) -> list[Job]:
    """Four requests with different lengths and settings that join and leave at different steps."""
    return [
        Job(prompt, replace(SAMPLING[mode], max_tokens=10 + 7 * i), at=2 * i)
        for i, (prompt, mode) in enumerate(zip(prompts(), GROUPS[group], strict=True))
    ]


MIXES: dict[str, dict[str, Any]] = {
    "staggered": {},
    "chunked": {"max_num_batched_tokens": 8, "max_step_ms": 1e6},
    "preempted": {"num_blocks": 6, "enable_prefix_caching": False},
    "preempted_cached": {"num_blocks": 6},
    "two_at_a_time": {"max_num_seqs": 2},
}


@pytest.mark.parametrize(
    ("proposer", "mix", "group"), in_step(PROPOSERS, MIXES, range(len(GROUPS)), steps=39)
)
def test_batch_mixes(proposer: str, mix: str, group: int, truth: Truth) -> None:
    engine = make(PROPOSERS[proposer], **MIXES[mix])
    check(engine, staggered(group), truth)
    assert (engine.stats().num_preemptions > 0) == mix.startswith("preempted")


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_prefix_cache_hit(proposer: str, truth: Truth) -> None:
    engine = make(PROPOSERS[proposer])
    jobs = [Job(prompt, params) for prompt in prompts()[:3] for params in (GREEDY, WARM)]
    check(engine, jobs, truth)
    used = engine.stats().num_rows
    check(engine, jobs, truth)
    assert engine.stats().num_rows - used < used, "the second run recomputed all prompts"
    assert engine.stats().num_cached_tokens > 0


NATIVE = [] if why_not_native() else ["native-int8", "native-int4"]
KINDS = (
    "draft_tree",
    "head_tree",
    "dflash_tree",
    "peagle_tree",
    "dspark_tree",
    "dflash2_tree",
    "several",
    "random",
)


@pytest.mark.parametrize(
    ("proposer", "dtype", "mix"),
    in_step(KINDS, ["float32", "int8"], MIXES) + in_step(KINDS, NATIVE, MIXES),
)
def test_every_dtype(proposer: str, dtype: str, mix: str, truth: Truth) -> None:
    engine = make(PROPOSERS[proposer], dtype=dtype, **MIXES[mix])
    check(engine, staggered(), partial(truth, dtype=dtype))


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "mix"),
    in_turns(KV_DTYPES[1:], ["float32", *NATIVE], ["staggered", "chunked", "preempted_cached"]),
)
def test_every_kv_dtype(kv_dtype: str, dtype: str, mix: str, truth: Truth) -> None:
    """Alone, in a batch, preempted and out of the prefix cache."""
    kinds = {"dtype": dtype, "kv_cache_dtype": kv_dtype}
    engine = make(PROPOSERS["several"] + [RandomTrees], **kinds, **MIXES[mix])
    for _ in range(2):  # the second time out of the prefix cache
        check(engine, staggered(), partial(truth, **kinds))
    assert engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize("proposer", ["lookup_tree", "several"])
def test_speculation_switched_on_and_off(proposer: str, truth: Truth) -> None:
    """Proposers come and go between steps; answers stay."""

    def on(engine: Engine, _: Any) -> None:
        made = [factory() for factory in PROPOSERS[proposer]]
        engine.set_speculation(
            [each if hasattr(each, "propose") else each(engine.runner) for each in made]
        )

    def off(engine: Engine, _: Any) -> None:
        engine.set_speculation([])

    check(toy_engine(), staggered(), truth, {3: on, 6: off, 9: on})


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_every_start_and_context_limit(proposer: str, truth: Truth) -> None:
    """Every prompt length modulo the block size, up to the end of the context."""
    base = prompts()[0] * 2
    jobs = [Job(base[:n], replace(GREEDY, max_tokens=6)) for n in range(1, 36)]
    check(make(PROPOSERS[proposer], max_num_seqs=5), jobs, truth)


class Watched(DraftModelProposer):
    """Checks that each tree is accepted along its first-ranked children, to their end."""

    def observe(self, request: Request, result: VerifyResult) -> None:
        parents, depth, node = list(result.draft.parents), 0, -1
        while node in parents:  # the first of a node's children is the likeliest
            node = parents.index(node)
            depth += 1
        if request.finish_reason is None:
            assert result.num_accepted == depth
        super().observe(request, result)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("branching", [1, 3])
def test_self_draft_is_always_accepted(temperature: float, branching: int) -> None:
    """The oracle: a draft that is the target. It catches stale draft KV and mismatched noise."""
    nodes = {"max_branching": branching, "max_tree_nodes": 4 * branching}
    proposer = Watched(draft_config(**nodes), toy_runner(prefix_caching=False))
    engine = toy_engine([proposer])
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=41, ignore_eos=True)
    results = run_jobs(engine, [Job(p, params, at=i) for i, p in enumerate(prompts())])
    assert engine.stats().num_proposer_failures == 0
    for (result,) in results:
        assert result.request is not None
        counters = result.request.counters
        if branching == 1:
            assert counters.acceptance_rate == 1.0
            assert counters.num_steps == 9  # 1 + 40 / 5
