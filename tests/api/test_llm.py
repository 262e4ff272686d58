"""The Python API on the embedded models: what a user of the library does, as they would do it."""

from __future__ import annotations

import asyncio
import doctest
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_overloads

import pytest

import paceline.api.async_llm
import paceline.api.llm
from paceline import LLM, AsyncLLM, SamplingParams, SpeculativeParams
from paceline.api.llm import embedded_model
from paceline.api.outputs import Job
from paceline.cli.options import RunOptions
from paceline.cli.settings import speculative_config
from paceline.core.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    ModelLoadError,
    RequestError,
)
from paceline.engine.engine import Engine
from paceline.loading.checkpoint import load_checkpoint
from paceline.request.request import StepOutput
from paceline.request.structured_outputs import StructuredOutputs

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [
    "def add(a, b):\n    return",
    "Once upon a time there was",
    "class Point:\n    def __init__(self, x, y):\n",
]
SPECULATIVE = [
    {"method": "draft_model", "model": embedded_model("draft"), "num_speculative_tokens": 4},
    {"method": "prompt_lookup"},
]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("embedded", speculative_config=[]) as llm:
        yield llm


@pytest.fixture(scope="module")
def speculative() -> Iterator[LLM]:
    with LLM("embedded", speculative_config=SPECULATIVE, planner="fixed") as llm:
        yield llm


def test_docstring_examples_run() -> None:
    for module in (paceline, paceline.api.llm, paceline.api.async_llm):
        failures, tried = doctest.testmod(module)
        assert tried
        assert not failures


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_answers_are_the_plain_ones(
    plain: LLM, speculative: LLM, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=32, logprobs=3)
    one, two = (
        [(o.token_ids, o.text, o.completions[0].logprobs) for o in llm.generate(PROMPTS, params)]
        for llm in (plain, speculative)
    )
    assert one == two
    assert speculative.promises_identity
    assert speculative.stats().speculation.num_accepted_tokens > 0
    assert plain.stats().speculation.num_draft_tokens == 0


def test_a_batch_keeps_its_order_and_a_prompt_stands_alone(plain: LLM) -> None:
    counts: list[int] = []
    batch = plain.generate(PROMPTS, GREEDY, on_finished=counts.append)
    assert counts == [1, 2, 3]
    assert [o.text for o in plain.generate(PROMPTS, GREEDY, progress=True)] == [
        o.text for o in batch
    ]
    singles = [plain.generate(prompt, GREEDY) for prompt in PROMPTS]
    assert [o.text for o in batch] == [o.text for o in singles]
    assert plain.generate(plain.encode(PROMPTS[0]), GREEDY).text == batch[0].text


def test_an_answer_says_how_long_its_first_token_took(plain: LLM) -> None:
    began = time.perf_counter()
    output = plain.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=64))
    took = time.perf_counter() - began
    first = output.completions[0].time_to_first_token
    assert first is not None
    assert 0.0 < first < took


def test_stream_adds_up_to_the_answer(speculative: LLM) -> None:
    whole = speculative.generate(PROMPTS[2], GREEDY)
    parts = list(speculative.stream(PROMPTS[2], GREEDY))
    assert "".join(p.text for p in parts) == whole.text
    assert [t for p in parts for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == whole.finish_reason
    origins = {o for p in parts for o in p.origins}
    assert "target" in origins
    assert origins <= {"target", "draft_model", "prompt_lookup"}


def test_leaving_a_stream_ends_the_request(plain: LLM) -> None:
    stream = plain.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=500))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    plain.generate(PROMPTS[1], GREEDY)
    stats = plain.stats()
    assert stats.num_running == 0
    assert stats.num_waiting == 0


def test_what_is_submitted_with_one_sink_comes_once_per_step(plain: LLM) -> None:
    steps: queue.SimpleQueue[list[StepOutput]] = queue.SimpleQueue()
    added: list[int] = []
    encoded = [plain.encode(prompt) for prompt in PROMPTS[:2]]

    def on_added(jobs: list[Job]) -> None:
        assert steps.empty()
        added.extend(i for job in jobs for i in job.ids)

    jobs = plain.submit(encoded, [GREEDY] * 2, steps.put, on_added=on_added)
    assert added == [i for job in jobs for i in job.ids]
    heard: dict[int, list[int]] = {i: [] for i in added}
    for _ in range(GREEDY.max_tokens or 0):
        step = steps.get(timeout=30)
        assert [output.request_id for output in step] == added
        for output in step:
            heard[output.request_id] += output.token_ids
    assert list(heard.values()) == [o.token_ids for o in plain.generate(PROMPTS[:2], GREEDY)]
    assert steps.empty()


def test_flushed_prefixes_are_computed_again(plain: LLM) -> None:
    def cached_by_one_more() -> int:
        before = plain.stats().num_cached_tokens
        plain.generate(PROMPTS[0] * 4, SamplingParams(max_tokens=1, temperature=0))
        return plain.stats().num_cached_tokens - before

    cached_by_one_more()
    assert cached_by_one_more() > 0
    plain.flush_prefix_cache()
    assert cached_by_one_more() == 0


def test_several_threads_share_a_model(speculative: LLM) -> None:
    truth = [o.text for o in speculative.generate(PROMPTS, GREEDY)]
    found: dict[int, str] = {}

    def work(index: int) -> None:
        found[index] = speculative.generate(PROMPTS[index % 3], GREEDY).text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == truth * 2


def test_samples_differ_and_repeat(speculative: LLM) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=16)
    first, again = (speculative.generate(PROMPTS[1], params) for _ in range(2))
    texts = [c.text for c in first.completions]
    assert len(set(texts)) == 3
    assert texts == [c.text for c in again.completions]


def test_stop_strings_cut_text_not_tokens(plain: LLM, speculative: LLM) -> None:
    free = plain.generate(PROMPTS[0], GREEDY).text
    stop = free.strip()[4:7]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=(stop,))
    for llm in (plain, speculative):
        output = llm.generate(PROMPTS[0], params)
        assert output.text == free[: free.index(stop)]
        assert output.completions[0].stop_reason == stop


def test_a_stop_string_may_be_a_special_token(plain: LLM, speculative: LLM) -> None:
    stop, token = "<|im_start|>", 1
    params = SamplingParams(max_tokens=24, stop=(stop,), logit_bias={token: 100.0})
    kept = replace(params, include_stop_str_in_output=True)
    for llm in (plain, speculative):
        output = llm.generate(PROMPTS[0], params)
        assert (output.text, output.token_ids) == ("", [token])
        assert output.completions[0].stop_reason == stop
        assert llm.generate(PROMPTS[0], kept).text == stop


def wait_for_proposers(engine: Engine) -> None:
    """Let an engine make its first step, and no second one before it has proposers."""
    step, outputs = engine.step, list[StepOutput]()

    def patient() -> list[StepOutput]:
        if not outputs:
            outputs.extend(step())
            return outputs
        if not engine.drafting.is_on:
            time.sleep(0.001)
            return []
        engine.step = step  # type: ignore[method-assign]
        return step()

    engine.step = patient  # type: ignore[method-assign]


def test_speculation_can_be_replaced_while_requests_run(plain: LLM) -> None:
    with LLM("embedded", speculative_config=[], planner="fixed") as llm:
        llm.call(wait_for_proposers)
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        truth = plain.generate(PROMPTS[0], params).token_ids
        stream = llm.stream(PROMPTS[0], params)
        tokens = list(next(stream).token_ids)
        llm.set_speculation({"method": "prompt_lookup", "prompt_lookup_min": 1})
        tokens += [t for part in stream for t in part.token_ids]
        assert tokens == truth
        assert llm.stats().speculation.num_drafts > 0
        llm.reset_stats()
        assert llm.stats().num_output_tokens == 0


def test_who_drafts_where_nothing_was_said_is_who_drafts_for_the_command_line() -> None:
    usual = tuple(config.method for config in speculative_config(RunOptions(), "embedded"))
    with AsyncLLM("embedded") as llm:
        assert llm.proposers == usual == ("suffix", "ngram_model")
        llm.set_speculation([])
        assert llm.proposers == ()
        llm.set_speculation(None)
        assert llm.proposers == usual
    checkpoint = load_checkpoint(embedded_model("target"))
    with LLM(checkpoint) as llm:  # it does not say where it lies, so what lies beside it
        assert llm.proposers == ("suffix",)
    for plain in ([], "[]", ()):
        with LLM(checkpoint, speculative_config=plain) as llm:
            assert llm.proposers == ()


def test_engines_over_one_checkpoint_share_its_weights() -> None:
    checkpoint = load_checkpoint(embedded_model("target"))
    with LLM(checkpoint, speculative_config=[]) as plain, LLM(checkpoint) as drafting:
        assert len(checkpoint.decoders) == 1
        answers = [llm.generate(PROMPTS[0], GREEDY) for llm in (plain, drafting)]
        assert answers[0].token_ids == answers[1].token_ids
        with LLM(checkpoint, max_model_len=64):  # positions of other lengths are turned otherwise
            assert len(checkpoint.decoders) == 2


def test_a_request_can_decline_speculation(speculative: LLM) -> None:
    off = SpeculativeParams(enabled=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, speculative=off)
    counters = speculative.generate(PROMPTS[0], params).completions[0].counters
    assert counters.num_draft_tokens == 0
    assert counters.num_steps == 8


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model") / "bare"
    shutil.copytree(
        embedded_model("target"), folder, ignore=shutil.ignore_patterns("tokenizer*.json")
    )
    with LLM(str(folder), speculative_config={"method": "suffix"}) as llm:
        yield llm


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(
    plain: LLM, without_tokenizer: LLM
) -> None:
    ids = plain.encode(PROMPTS[0])
    output = without_tokenizer.generate(ids, GREEDY)
    assert output.token_ids == plain.generate(ids, GREEDY).token_ids
    assert output.text == ""
    steps = list(without_tokenizer.stream(ids, GREEDY))
    assert [token for step in steps for token in step.token_ids] == output.token_ids
    end = SamplingParams(temperature=0.0, stop_token_ids=(output.token_ids[3],))
    assert without_tokenizer.generate(ids, end).finish_reason == "stop"


def test_what_needs_texts_is_refused_without_a_tokenizer(without_tokenizer: LLM) -> None:
    for prompt in (PROMPTS[0], [{"role": "user", "content": "hi"}]):
        with pytest.raises(ConfigError, match="bare has no tokenizer; pass token ids"):
            without_tokenizer.generate(prompt)
    with pytest.raises(RequestError, match="bare has no tokenizer; use stop_token_ids") as of_stop:
        without_tokenizer.generate([5], SamplingParams(stop="a"))
    assert of_stop.value.param == "stop"
    shaped = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    with pytest.raises(RequestError, match="needs a tokenizer, and the model has none"):
        without_tokenizer.generate([5], shaped)


def test_prompt_logprobs(plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    output = plain.generate(PROMPTS[0], params)
    found = output.prompt_logprobs
    assert len(found) == len(output.prompt_token_ids)
    assert found[0] is None
    assert [e.token_id for e in found[1:] if e] == output.prompt_token_ids[1:]


def test_async_generate_and_stream(speculative: LLM) -> None:
    async def go() -> tuple[list[str], str]:
        with AsyncLLM("embedded", speculative_config=SPECULATIVE) as llm:
            outputs = await asyncio.gather(*(llm.agenerate(p, GREEDY) for p in PROMPTS))
            streamed = [part.text async for part in llm.astream(PROMPTS[0], GREEDY)]
            return [o.text for o in outputs], "".join(streamed)

    texts, streamed = asyncio.run(go())
    assert texts == [o.text for o in speculative.generate(PROMPTS, GREEDY)]
    assert streamed == texts[0]


def test_encoding_holds_up_nobody_else_on_the_event_loop() -> None:
    threads = []

    async def go() -> None:
        with AsyncLLM("embedded") as llm:
            encode = llm.encode

            def noted(*given: Any, **options: Any) -> list[int]:
                threads.append(threading.current_thread())
                return encode(*given, **options)

            llm.encode = noted  # type: ignore[method-assign]
            await llm.agenerate(PROMPTS[:2], GREEDY)
            assert [part async for part in llm.astream(PROMPTS[0], GREEDY)]

    asyncio.run(go())
    assert len(threads) == 3
    assert threading.current_thread() not in threads


class Held:
    """Lets an engine make so many steps and no more."""

    def __init__(self, engine: Engine, num_steps: int) -> None:
        self.num_left = num_steps
        self._step = engine.step
        engine.step = self._held  # type: ignore[method-assign]

    def _held(self) -> list[StepOutput]:
        if not self.num_left:
            time.sleep(0.001)
            return []
        self.num_left -= 1
        return self._step()


def test_cancelling_ends_the_requests() -> None:
    """Before their first step, and in the middle; few steps are made before all have ended."""
    long = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)

    async def consume(llm: AsyncLLM) -> None:
        async for _ in llm.astream(PROMPTS[0], long):
            pass

    async def go() -> None:
        with AsyncLLM("embedded") as llm:
            for num_steps in (0, 1, 5):
                held = llm.call(lambda engine, steps=num_steps: Held(engine, steps))
                tasks = [
                    asyncio.create_task(consume(llm)),
                    asyncio.create_task(llm.agenerate(PROMPTS, long)),
                ]
                await asyncio.sleep(0)
                while held.num_left:
                    await asyncio.sleep(0.001)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                num_more = 0
                while (stats := llm.stats()).num_running + stats.num_waiting:
                    held.num_left, num_more = 1, num_more + 1
                    await asyncio.sleep(0.001)
                assert num_more < 750
                held.num_left = -1
                assert len((await llm.agenerate("x", GREEDY)).token_ids) == GREEDY.max_tokens

    asyncio.run(go())


def wait_for_requests(engine: Engine, count: int) -> None:
    """Let an engine make no step before it has been given so many requests."""
    step = engine.step

    def patient() -> list[StepOutput]:
        if len(engine.requests) < count:
            time.sleep(0.001)
            return []
        engine.step = step  # type: ignore[method-assign]
        return step()

    engine.step = patient  # type: ignore[method-assign]


def test_many_concurrent_awaits_run_as_one_batch() -> None:
    async def go() -> int:
        with AsyncLLM("embedded") as llm:
            llm.call(lambda engine: wait_for_requests(engine, 6 * len(PROMPTS)))
            await asyncio.gather(*(llm.agenerate(p, GREEDY) for p in PROMPTS * 6))
            return llm.stats().num_target_forwards

    assert asyncio.run(go()) < 3 * GREEDY.max_tokens  # type: ignore[operator]


def test_one_callers_mistake_does_not_end_the_engine(plain: LLM) -> None:
    wish = SpeculativeParams(methods=["ngram"])
    assert wish.methods == ("prompt_lookup",)
    assert plain.generate("x", SamplingParams(max_tokens=2, speculative=wish)).token_ids
    assert plain.generate("x", GREEDY, cache_salt="\ud800").token_ids
    for bad in ([None], [1.5], 3, {"role": "user"}, [True, 2]):
        with pytest.raises(RequestError):
            plain.generate(bad, GREEDY)  # type: ignore[arg-type]
    for options in ({"temperature": "a"}, {"max_tokens": 6.5}, {"n": 2.0}, {"stop": [1]}):
        with pytest.raises(RequestError):
            SamplingParams(**options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt_lookup, suffix"):
        SpeculativeParams(methods=["magic"])
    assert plain.generate("x", GREEDY).token_ids


TEMPLATE = "{% if loud %}!{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": PROMPTS[1]}]


@pytest.fixture(scope="module")
def chatty() -> Iterator[LLM]:
    """A model with a chat template, which mentions one option."""
    with LLM("embedded", speculative_config=[]) as llm:
        llm.tokenizer.set_chat_template(TEMPLATE)
        yield llm


def test_keywords_that_nothing_reads_are_type_errors(chatty: LLM) -> None:
    with pytest.raises(TypeError, match="'max_tokens', 'typo'") as refused:
        chatty.generate("x", max_tokens=3, typo=1)
    for field in fields(SamplingParams):
        assert field.name in str(refused.value)
    with pytest.raises(TypeError, match=r"'temperature'.*which does not mention them"):
        chatty.generate(CHAT, temperature=0.0)
    with pytest.raises(TypeError, match="this prompt is none"):
        chatty.generate("x", GREEDY, loud=True)
    with pytest.raises(TypeError, match="sampling_params is params here"):
        chatty.generate(CHAT, sampling_params=GREEDY)
    with pytest.raises(TypeError, match="'typo'"):
        next(chatty.stream(CHAT, GREEDY, typo=1))
    with pytest.raises(TypeError, match="'typo'"):
        chatty.encode(CHAT, typo=1)


def test_a_template_takes_what_it_mentions(chatty: LLM) -> None:
    for options in ({"loud": True}, {"loud": False, "tools": []}, {"add_generation_prompt": False}):
        text = ("!" if options.get("loud") else "") + PROMPTS[1]
        assert chatty.encode(CHAT, **options) == chatty.encode(text)


def test_chats(chatty: LLM) -> None:
    one = chatty.chat(CHAT, GREEDY)
    assert one.text == chatty.generate(CHAT, GREEDY).text == one.outputs[0].text
    assert [o.text for o in chatty.chat([CHAT, CHAT], GREEDY)] == [one.text] * 2
    assert chatty.chat(CHAT, GREEDY, loud=True).prompt_token_ids == chatty.encode("!" + PROMPTS[1])
    for nothing in ("hello", [1, 2], ["hello"], [CHAT, "hello"], [[]], 1):
        with pytest.raises(RequestError, match=r"allowed:"):
            chatty.chat(nothing)  # type: ignore[call-overload]


def test_types_tell_one_prompt_from_several() -> None:
    for method in (LLM.generate, LLM.chat, AsyncLLM.agenerate, AsyncLLM.achat):
        results = [each.__annotations__["return"] for each in get_overloads(method)]
        assert results == ["GenerationOutput", "list[GenerationOutput]"]


def test_refusals(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="allowed: dtype"):
        LLM("embedded", temprature=1)
    with pytest.raises(ModelLoadError):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match="refused"):
        plain.set_speculation({"method": "prompt_lookup", "acceptance_threshold": 0.5})
    with pytest.raises(RequestError, match="empty"):
        plain.generate([[]], GREEDY)
    with pytest.raises(ContextLengthError, match="context holds 2048"):
        plain.generate([1] * 5000, GREEDY)
    with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
        plain.generate(PROMPTS, [GREEDY] * 2)
    with pytest.raises(RequestError, match="top_p is 2"):
        SamplingParams(top_p=2)


def test_a_closed_model_says_so() -> None:
    llm = LLM("embedded")
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("x", GREEDY)
