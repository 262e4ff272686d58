"""A real model in a process of its own: what comes back is what it says in this one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.api.outputs import Completion, GenerationOutput
from paceline.core.errors import ContextLengthError, EngineDeadError, RequestError
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.server.engine_process.client import EngineClient
from tests.server import factories

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return"
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "logit_bias": {267: 3.0}, "n": 3},
    {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 4, "logprobs": 0, "min_tokens": 12, "n": 2},
    {"temperature": 0.0, "stop": ("return", "\n\n"), "max_tokens": 60},
    {"temperature": 0.0, "stop": ("+",), "include_stop_str_in_output": True},
    {"temperature": 0.0, "allowed_token_ids": (267, 297), "stop_token_ids": (297,)},
    {"temperature": 0.6, "seed": 5, "ignore_eos": True, "banned_token_ids": (294,)},
    {"temperature": 0.0, "speculative": SpeculativeParams(enabled=False)},
]


@dataclass
class Here:
    """The same engine in both processes, and a loop for the one that needs it."""

    runner: asyncio.Runner
    client: EngineClient
    llm: LLM

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 110))


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with asyncio.Runner() as runner, factories.embedded() as llm:
        client = EngineClient(factories.fragile)
        runner.run(client.start())
        yield Here(runner, client, llm)
        runner.run(client.close())


@dataclass
class Answer:
    completions: dict[int, Completion] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)

    def same_as(self, output: GenerationOutput) -> bool:
        found = [self.completions[index] for index in sorted(self.completions)]
        return (found, self.prompt_logprobs) == (output.completions, output.prompt_logprobs)


async def ask(
    client: EngineClient, params: SamplingParams, prompt: str = PROMPT, **rest: Any
) -> Answer:
    assert client.tokenizer is not None
    answer = Answer()
    async with client.generate([client.tokenizer.encode(prompt)], [params], **rest) as generation:
        async for piece in generation:
            answer.prompt_logprobs = list(generation.prompt_logprobs[0])
            own = answer.completions.setdefault(piece.sample, Completion(piece.sample))
            assert own.finish_reason is None
            own.token_ids += piece.token_ids
            own.origins += piece.origins
            own.logprobs += piece.logprobs
            own.text += piece.text
            own.finish_reason, own.stop_reason = piece.finish_reason, piece.stop_reason
            own.counters = piece.counters or own.counters
    return answer


def test_every_sampling_option_answers_as_in_one_process(here: Here) -> None:
    wishes = [SamplingParams(**{"max_tokens": 24, **options}) for options in OPTIONS]
    before = here.run(here.client.stats()).num_finished
    for params in wishes:
        here.llm.flush_prefix_cache()
        here.run(here.client.flush_prefix_cache())
        answer = here.run(ask(here.client, params))
        assert answer.same_as(here.llm.generate(PROMPT, params)), params
    stats = here.run(here.client.stats())
    assert stats.speculation.num_accepted_tokens > 0
    assert stats.num_finished - before == sum(params.n for params in wishes)


def test_many_prompts_at_once_are_not_mixed_up(here: Here) -> None:
    prompts = [f"def f{i}(x):\n    return x * {i}\n\n\ndef g" for i in range(64)]
    wishes = [SamplingParams(max_tokens=8 + i % 20, seed=i, temperature=0.7) for i in range(64)]

    async def all_of_them() -> list[Answer]:
        jobs = [ask(here.client, w, p) for p, w in zip(prompts, wishes, strict=True)]
        return await asyncio.gather(*jobs)

    answers = here.run(all_of_them())
    for answer, output in zip(answers, here.llm.generate(prompts, wishes), strict=True):
        assert answer.completions[0].token_ids == output.token_ids
        assert answer.completions[0].text == output.text
    assert here.client.num_generating == 0


def test_the_engine_refuses_with_its_own_errors(here: Here) -> None:
    cases = [
        (RequestError, [], SamplingParams()),
        (RequestError, [1, 1 << 20], SamplingParams()),
        (RequestError, [1], SamplingParams(stop_token_ids=(10**6,))),
        (ContextLengthError, [1] * 512, SamplingParams()),
    ]

    async def enter(token_ids: list[int], params: SamplingParams) -> None:
        async with here.client.generate([token_ids], [params]):
            raise AssertionError("it was accepted")

    for kind, token_ids, params in cases:
        with pytest.raises(kind) as caught:
            here.run(enter(token_ids, params))
        assert type(caught.value) is kind
    assert here.client.num_generating == 0


def test_leaving_frees_the_kv(here: Here) -> None:
    """Left after a piece, before the first one, and while it waits for a place in the batch.

    On a machine that is busy with others, all may be told before they are left; then once more.
    """
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, n=2)

    async def leave_all() -> Any:
        before = await here.client.stats()
        jobs = [asyncio.create_task(ask(here.client, params)) for _ in range(12)]
        async with here.client.generate([[5, 6, 7]], [params]) as generation:
            await anext(aiter(generation))
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert here.client.num_generating == 0
        while (after := await here.client.stats()).num_running + after.num_waiting:
            await asyncio.sleep(0.01)
        return before, after

    def tokens() -> int:
        before, after = here.run(leave_all())
        assert after.kv_blocks_used == 0
        return after.num_output_tokens - before.num_output_tokens

    while tokens() >= 26 * 400 / 2:
        pass


def test_a_slow_reader_loses_nothing_and_holds_up_nobody(here: Here) -> None:
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    assert here.client.tokenizer is not None
    ids = here.client.tokenizer.encode(PROMPT)

    async def read_slowly() -> tuple[list[int], Answer]:
        async with here.client.generate([ids], [params]) as slow:
            other = await ask(here.client, params)
            while here.client.num_generating:
                await asyncio.sleep(0.01)
            return [token async for piece in slow for token in piece.token_ids], other

    tokens, other = here.run(read_slowly())
    assert tokens == other.completions[0].token_ids == here.llm.generate(PROMPT, params).token_ids


def test_cached_prefixes_are_counted_kept_apart_and_flushed(here: Here) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    assert here.client.tokenizer is not None
    ids = here.client.tokenizer.encode(PROMPT * 2)

    async def cached(salt: str) -> int:
        async with here.client.generate([ids], [params], cache_salt=salt) as generation:
            return sum([piece.num_cached_tokens async for piece in generation])

    assert here.run(cached("one")) == 0
    found = here.run(cached("one"))
    assert 0 < found < len(ids)
    assert found % here.client.info.block_size == 0
    assert here.run(cached("two")) == 0
    here.run(here.client.flush_prefix_cache())
    assert here.run(cached("one")) == 0


@pytest.mark.parametrize("phase", [p for p in factories.PHASES if p not in factories.FATAL])
def test_a_phase_that_raises_changes_nothing(here: Here, phase: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.5, seed=9)
    answer = here.run(ask(here.client, params, cache_salt=f"break {phase}"))
    assert answer.completions[0].token_ids == here.llm.generate(PROMPT, params).token_ids
    assert f"broken {phase}" in here.run(here.client.stats()).seconds


@pytest.mark.slow
@pytest.mark.parametrize("phase", factories.FATAL)
def test_an_engine_that_raises_is_replaced(here: Here, phase: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.5, seed=9)
    restarts = here.client.num_restarts
    with pytest.raises(EngineDeadError, match=f"broken in {phase}"):
        here.run(ask(here.client, params, cache_salt=f"break {phase}"))

    async def again() -> Answer:
        while here.client.state == "starting":
            await asyncio.sleep(0.05)
        return await ask(here.client, params)

    answer = here.run(again())
    assert here.client.num_restarts == restarts + 1
    assert answer.completions[0].token_ids == here.llm.generate(PROMPT, params).token_ids
