"""What an engine tells of itself: limits that hold, and defaults that requests can have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline import LLM
from paceline.request.engine_stats import EngineInfo
from paceline.server.hosting.serving import memory_of, used_memory
from tests.server.fakes import embedded_tokenizer


def told(context: int) -> EngineInfo:
    """Of an engine whose KV cache holds few blocks."""
    with LLM(
        "embedded", speculative_config=[], kv_cache_memory=1 << 17, max_model_len=context
    ) as llm:
        return llm.info()


def test_answers_are_as_long_as_the_kv_cache_and_the_context_allow() -> None:
    info = told(512)
    assert info.max_model_len == info.kv_blocks_total * info.block_size < 512
    assert told(20).max_model_len == 20


def test_what_the_model_is() -> None:
    info, tokenizer = told(20), embedded_tokenizer()
    assert (info.model, info.architecture, info.num_layers) == ("embedded", "qwen3", 8)
    assert info.vocab_size == tokenizer.vocab_size
    assert info.longest_token == max(
        len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size)
    )
    assert info.cost_curve[0] == (1, pytest.approx(1.0))


def test_an_unfilled_cache_is_kept_free_and_not_used() -> None:
    client: Any = SimpleNamespace(pid=None, info=SimpleNamespace(num_bytes=98, kv_bytes=4500))
    assert (used_memory(client), memory_of(client)) == (98, 4598)
