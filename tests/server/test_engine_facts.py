"""What an engine tells of itself: limits that hold, and defaults that requests can have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.server.engine_process.memory import memory_of, used_memory
from paceline.server.engine_process.process import engine_info
from tests.server.factories import Paper
from tests.server.fakes import embedded_tokenizer


class Small(Paper):
    """One whose KV cache has seven blocks, of which one is never used, of 16 tokens."""

    def __init__(self, context: int = 512) -> None:
        self.config = SimpleNamespace(max_model_len=context, dtype="float32", max_num_seqs=4)
        shape = SimpleNamespace(architecture="small", hidden_size=8, num_layers=2, num_weights=1)
        self.checkpoint = SimpleNamespace(
            name="s",
            tokenizer=None,
            config=shape,
            hf_config={"model_type": "llama"},
            num_bytes=64,
            pooling="last",
            arithmetic=lambda dtype: f"{dtype} by its file's name",
        )

    def call(self, function: Any) -> Any:
        kv = SimpleNamespace(pool=SimpleNamespace(num_blocks=7), block_size=16)
        cost = SimpleNamespace(predict=lambda shape: 1.0, has_profile=False)
        return function(SimpleNamespace(vocab_size=48, kv=kv, cost=cost))


def test_answers_are_as_long_as_the_kv_cache_and_the_context_allow() -> None:
    assert engine_info(Small()).max_model_len == 6 * 16
    assert engine_info(Small(context=90)).max_model_len == 90


def test_what_the_model_is() -> None:
    told = engine_info(Small())
    assert (told.architecture, told.hidden_size, told.num_layers) == ("llama", 8, 2)
    assert (told.num_bytes, told.pooling) == (64, "last")
    assert engine_info(Paper(0.01)).architecture == "paper"


def test_the_longest_token_is_told_with_the_tokenizer() -> None:
    engine, tokenizer = Small(), embedded_tokenizer()
    assert engine_info(engine).longest_token == 0
    engine.checkpoint.tokenizer = tokenizer
    told = engine_info(engine).longest_token
    assert told == max(len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size))


def test_an_unfilled_cache_is_kept_free_and_not_used() -> None:
    client: Any = SimpleNamespace(pid=None, info=SimpleNamespace(num_bytes=98, kv_bytes=4500))
    assert (used_memory(client), memory_of(client)) == (98, 4598)
