"""A prompt's vector: what transformers computes, and the same bits whatever shares the batch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.api.llm import LLM
from paceline.core.errors import RequestError
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.sampling_params import POOLINGS, SamplingParams
from tests.engine.test_faults import break_forward
from tests.loading.gguf_writing import convert, tokenizer_metadata
from tests.models.reference import VOCAB, saved_model
from tests.quick import once
from tests.text.vocabularies import byte_level_json
from tests.toy import USUAL, Job, assert_no_leak, lookup_config, run_jobs, toy_engine
from tests.toy import VOCAB as TOY_VOCAB

LONG = [(7 * i * i + 3) % TOY_VOCAB for i in range(70)]
OTHERS = [LONG[:40], [5, 6, 7] * 9, [9], LONG[3:50]]
SAMPLED = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
DTYPES = ("float32", "native-int8")


def pooling(kind: str = "mean") -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=kind)


def vector_of(result: Any) -> tuple[float, ...]:
    data = result.request.embedding
    return struct.unpack(f"<{len(data) // 4}f", data)


def alone(prompt: list[int], kind: str = "mean", dtype: str = USUAL) -> bytes:
    ((result,),) = run_jobs(toy_engine(dtype=dtype), [Job(prompt, pooling(kind))])
    assert result.request is not None
    return result.request.embedding


def pooled(states: torch.Tensor, kind: str) -> torch.Tensor:
    """As sentence-transformers 6.2.0 has it for one text."""
    weights = torch.arange(1.0, len(states) + 1)[:, None]
    return {
        "mean": states.mean(0),
        "last": states[-1],
        "cls": states[0],
        "max": states.max(0).values,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
    }[kind]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", POOLINGS)
def test_a_vector_is_that_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    model = saved_model(family, tmp_path)
    prompts = [
        torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 37)
    ]
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(str(tmp_path), speculative_config=[], num_threads=1, **options) as llm:
        found = embedded(llm, [p.tolist() for p in prompts], kind)
    for prompt, data in zip(prompts, found, strict=True):
        assert_is_transformers(data, model, prompt, kind)


def test_a_file_says_its_pooling_and_the_token_behind_texts(tmp_path: Path) -> None:
    """As files of Qwen3-Embedding do. llama.cpp (b11549) gives the same vectors, up to the
    rounding of its keys and values to 16 bits."""
    vocabulary = json.loads(byte_level_json())
    ids = {"bos_token_id": 0, "eos_token_id": 0, "add_eos_token": True}
    meta = tokenizer_metadata(vocabulary, "gpt2", pre="qwen2", **ids)
    size = {"vocab_size": len(meta["tokenizer.ggml.tokens"])}
    path = tmp_path / "m.gguf"
    model = convert("qwen3", path, metadata={**meta, "ARCH.pooling_type": 3}, changes=size)
    with LLM(str(path), speculative_config=[], num_threads=1, dtype="float32") as llm:
        kind, prompt = llm.checkpoint.pooling, llm.encode("dog")
        (data,) = embedded(llm, [prompt], kind)
    assert (kind, prompt) == ("last", [263, 73, 0])
    assert_is_transformers(data, model, torch.tensor(prompt), "last")


def embedded(llm: LLM, prompts: list[list[int]], kind: str) -> list[bytes]:
    inbox = list[Any]()
    jobs = llm.submit(prompts, [pooling(kind)] * len(prompts), inbox.extend)
    while len(inbox) < len(jobs):
        llm.stats()  # which is between two steps
    return [job.requests[0].embedding for job in jobs]


def assert_is_transformers(data: bytes, model: Any, prompt: torch.Tensor, kind: str) -> None:
    with torch.no_grad():
        states = model.model(prompt[None]).last_hidden_state[0]
    wanted = pooled(states, kind)
    wanted = wanted / wanted.norm()
    ours = torch.tensor(struct.unpack(f"<{len(data) // 4}f", data))
    assert torch.allclose(ours, wanted, atol=2e-5)
    assert abs(float(ours.norm()) - 1) < 1e-6


@pytest.mark.parametrize(("kind", "dtype"), once(POOLINGS, DTYPES))
def test_what_shares_the_batch_changes_no_bit(kind: str, dtype: str) -> None:
    wanted = alone(LONG, kind, dtype)
    proposers = [PromptLookupProposer(lookup_config())]
    engine = toy_engine(proposers, dtype, max_num_batched_tokens=24)
    jobs = [Job(prompt, SAMPLED, at=i) for i, prompt in enumerate(OTHERS)]
    jobs += [Job(LONG, pooling(kind), at=2), Job(OTHERS[0], pooling("mean"), at=3)]
    results = run_jobs(engine, jobs)
    (result,) = results[4]
    assert result.request is not None
    assert result.request.embedding == wanted
    plain = run_jobs(toy_engine(dtype=dtype), [Job(prompt, SAMPLED) for prompt in OTHERS])
    assert [group[0].token_ids for group in results[:4]] == [g[0].token_ids for g in plain]
    assert_no_leak(engine)


def test_cached_prefixes_are_computed_again_and_left_to_others() -> None:
    engine = toy_engine()
    for _ in range(2):
        ((result,),) = run_jobs(engine, [Job(LONG, pooling())])
        assert result.request is not None
        assert result.request.embedding == alone(LONG)
        assert result.request.num_cached_tokens == 0
    ((after,),) = run_jobs(engine, [Job(LONG, SAMPLED)])
    assert after.request is not None
    assert after.request.num_cached_tokens == 64
    assert after.token_ids == run_jobs(toy_engine(), [Job(LONG, SAMPLED)])[0][0].token_ids


def test_a_prompt_that_is_computed_twice_counts_once() -> None:
    # Eight blocks, which three others need while they grow: the prompt gives its own back midway.
    engine = toy_engine(num_blocks=9, max_num_batched_tokens=24)
    growing = SamplingParams(max_tokens=33, seed=2, ignore_eos=True)
    others = [Job(LONG[at : at + 15], growing) for at in (1, 20, 40)]
    *_, (result,) = run_jobs(engine, [*others, Job(LONG, pooling())])
    assert result.request is not None
    assert result.request.num_preemptions
    assert result.request.embedding == alone(LONG)


def test_a_step_that_fails_and_is_run_again_counts_once() -> None:
    engine = toy_engine(max_num_batched_tokens=16)
    script = {2: lambda engine, ids: break_forward(engine, None, times=1)}
    jobs = [Job(LONG, pooling()), Job(OTHERS[1], pooling("last"))]
    (mean,), (last,) = run_jobs(engine, jobs, script)
    assert mean.request is not None
    assert last.request is not None
    assert mean.request.embedding == alone(LONG)
    assert last.request.embedding == alone(OTHERS[1], "last")


def test_other_ways_of_pooling_are_refused() -> None:
    with pytest.raises(RequestError, match="pooling is 'rank'; allowed: mean, last, cls, max"):
        SamplingParams(pooling="rank")
    with pytest.raises(RequestError, match="n is 2; with pooling it must be 1"):
        SamplingParams(pooling="mean", n=2)
