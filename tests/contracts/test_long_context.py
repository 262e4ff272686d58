"""Plain equals speculative after 32768 tokens, whose keys and values are held in 8 bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.cache.block_pool import blocks_for
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.models.decoder import Decoder
from paceline.proposers.prompt_lookup import PromptLookupProposer
from paceline.request.sampling_params import SamplingParams
from tests.arrays import arrays
from tests.contracts.test_identity import RandomTrees
from tests.toy import TOY, VOCAB, Job, lookup_config, run_jobs, toy_tensors

CONTEXT, NEW = 32768, 40
LONG = replace(TOY, num_heads=2, num_kv_heads=1, head_dim=40, max_position=CONTEXT + NEW + 64)
native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))


@pytest.mark.slow
@native
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_int8_keys_and_values_at_32768_tokens(temperature: float) -> None:
    """Token ids and the log-probs of the whole vocabulary, bit for bit."""
    ops = CpuOps("int8")
    decoder = Decoder(LONG, arrays(toy_tensors(config=LONG)), ops, LONG.max_position)
    memory = ops.kv_memory(LONG, 2 + blocks_for(LONG.max_position), "int8")
    kv = KVCache(memory)  # the prompt's blocks serve both engines
    kv.poison_free()
    config = EngineConfig(
        max_model_len=LONG.max_position,
        max_num_batched_tokens=2048,
        max_step_ms=1e9,
        kv_cache_dtype="int8",
    )
    rng = random.Random(0)
    prompt = [rng.randrange(1, VOCAB) for _ in range(CONTEXT)]
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=NEW, logprobs=VOCAB, ignore_eos=True
    )
    answers, accepted = [], 0
    for proposers in ([], [PromptLookupProposer(lookup_config(max_branching=3)), RandomTrees()]):
        engine = Engine(ModelRunner(decoder, kv), config, proposers)
        ((result,),) = run_jobs(engine, [Job(prompt, params)])
        answers.append(result.answer)
        assert result.request is not None
        accepted = result.request.counters.num_accepted_tokens
    assert answers[1] == answers[0]
    assert len(answers[0][0]) == NEW
    assert accepted > 0
