"""Blocks, whose rows see each other and vectors that stand for what came before, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.layer_sizes import LocalConv
from paceline.request.span import Span
from tests.arrays import arrays, assert_close, same
from tests.models.test_entry import norm, turned
from tests.toy import TOY, VOCAB, toy_tensors

LONGEST, SIZE = 600, 12
SLIDING = {"attention.sliding_window": 9, "attention.sliding_layers": (True, False)}
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": SLIDING,
    "sliding ahead": {**SLIDING, "entry.sliding_sees_ahead": True},
    "one key head": {"num_kv_heads": 1, "head_dim": 16, "num_heads": 2, "hidden_size": 44},
    "convolved": {"local_conv": LocalConv(3, 8)},
    "convolved and sliding": {"local_conv": LocalConv(4, 11), "hidden_size": 44, **SLIDING},
    "biased": {"attention.qkv_bias": True, "attention.o_bias": True},
}
CONTEXTS = (0, 5, 37, 506)  # the last one's block lies in two chunks of keys
VECTORS = 2.0 * torch.randn(LONGEST, 44, generator=torch.Generator().manual_seed(5))
TOKENS = [(7 * i * i + 3) % VOCAB for i in range(SIZE)]


def shape(form: str) -> ModelConfig:
    usual = {"entry.kind": "dflash", "max_position": LONGEST + 20}
    return TOY.with_traits({**usual, **FORMS[form]})


def tensors_of(c: ModelConfig) -> dict[str, Any]:
    tensors = toy_tensors(3, c)
    for name in [n for n in tensors if n.endswith("_proj.weight") and "self_attn" in n]:
        if c.attention.qkv_bias:
            drawn = torch.Generator().manual_seed(len(tensors))
            bias = torch.randn(len(tensors[name]), generator=drawn)
            tensors[name.replace("weight", "bias")] = bias
    drawn = torch.Generator().manual_seed(9)
    for part in [f"{i}.{p}" for i in range(c.num_layers) for p in ("attention", "mlp")]:
        if c.local_conv:
            shape, p = (2, c.local_conv.kernel, c.hidden_size), f"model.layers.{part}_conv."
            outs = c.local_conv.num_deltas(c.hidden_size)
            tensors[p + "base_kernel"] = torch.randn(shape, generator=drawn)
            weight = 0.1 * torch.randn(outs, c.hidden_size, generator=drawn)
            tensors[p + "kernel_projection.weight"] = weight
    return tensors


def convolved(
    c: ModelConfig, t: dict[str, Any], part: str, x: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """What a part of a layer reads of a block's rows, and what makes its results of them."""
    if c.local_conv is None:
        return x, lambda y: y
    deltas = x @ t[part + "_conv.kernel_projection.weight"].T
    deltas = deltas.view(len(x), 2, c.local_conv.kernel, -1)

    def run(side: int, y: torch.Tensor) -> torch.Tensor:
        assert c.local_conv is not None
        found = torch.zeros_like(y)
        for row in range(len(y)):
            for tap in range(min(c.local_conv.kernel, row + 1)):
                delta = deltas[row, side, tap].repeat_interleave(c.local_conv.group)
                factor = t[part + "_conv.base_kernel"][side, tap] + delta
                found[row] += factor * y[row - tap]
        return found

    return run(0, x), lambda y: run(1, y)


def runner_of(form: str, ops: Any) -> ModelRunner:
    c = shape(form)
    decoder = Decoder(c, arrays(tensors_of(c)), ops, c.max_position)
    memory = ops.kv_memory(c, 150, ops.default_kv_dtype)
    return ModelRunner(decoder, KVCache(memory, prefix_caching=False))


def read(model: ModelRunner, contexts: Sequence[int], chunk: int = LONGEST) -> None:
    """Open a sequence for each context, and write the vectors that stand for it."""
    hidden = model.decoder.config.hidden_size
    for number, length in enumerate(contexts):
        model.kv.open(number)
        for first in range(0, length, chunk):
            count = min(chunk, length - first)
            assert model.kv.reserve(number, count)
            batch = model.pack([Span.chunk(number, first, [0] * count, sample=False)])
            model.write_kv(batch, VECTORS[first : first + count, :hidden].contiguous().numpy())
            model.kv.commit(number, range(count))


def blocks(model: ModelRunner, contexts: Sequence[int], size: int = SIZE) -> torch.Tensor:
    """Logits of the rows of one block after each context, ``[blocks, size, vocab]``."""
    spans = []
    for number, length in enumerate(contexts):
        assert model.kv.reserve(number, size)
        tokens = (TOKENS * size)[:size]
        spans.append(Span(number, length, tokens, range(-1, size - 1), range(size)))
    result = model.forward(model.pack(spans))
    return torch.from_numpy(result.logits).view(len(spans), size, -1)


def want(c: ModelConfig, context: int, size: int = SIZE) -> torch.Tensor:
    t, known = tensors_of(c), VECTORS[:context, : c.hidden_size]
    x = t["model.embed_tokens.weight"][(TOKENS * size)[:size]]
    for index in range(c.num_layers):
        p = f"model.layers.{index}."
        attn = p + "self_attn."
        # [context + block]
        read, out = convolved(c, t, p + "attention", norm(x, t, p + "input_layernorm.weight"))
        own = torch.cat((known, read))

        def heads(name: str, own: torch.Tensor = own, attn: str = attn) -> torch.Tensor:
            bias = t.get(f"{attn}{name}_proj.bias", torch.zeros(()))
            return (own @ t[f"{attn}{name}_proj.weight"].T + bias).view(len(own), -1, c.head_dim)

        q, k = (turned(norm(heads(n), t, f"{attn}{n}_norm.weight")) for n in "qk")
        k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for y in (k, heads("v")))
        q, k, v = (y.transpose(0, 1) for y in (q[context:], k, v))
        at, key = torch.arange(context, context + size)[:, None], torch.arange(len(own))
        seen = torch.ones(size, len(own), dtype=torch.bool)
        if c.attention.is_sliding(index):
            seen &= at - key < c.attention.sliding_window
            if not c.entry.sliding_sees_ahead:
                seen &= key <= at
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)
        x = x + out(y @ t[attn + "o_proj.weight"].T + t.get(attn + "o_proj.bias", torch.zeros(())))
        inner, out = convolved(c, t, p + "mlp", norm(x, t, p + "post_attention_layernorm.weight"))
        gate, up = (inner @ t[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + out((F.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T)
    return norm(x, t, "model.norm.weight") @ t["model.embed_tokens.weight"].T


@pytest.mark.parametrize("form", FORMS)
def test_rows_see_what_came_before_and_their_block(ops_of: Any, form: str) -> None:
    model = runner_of(form, ops_of("float32"))
    read(model, CONTEXTS)
    for context, logits in zip(CONTEXTS, blocks(model, CONTEXTS), strict=True):
        wanted = want(model.decoder.config, context)
        assert_close(logits, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["full", "convolved"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_neither_company_nor_chunks_change_a_bit(ops_of: Any, dtype: str, form: str) -> None:
    """Twelve blocks are more rows than go through at once, and none of them may be cut."""
    ops, contexts = ops_of(dtype), [3 * n for n in range(12)]
    together = runner_of(form, ops)
    read(together, contexts, chunk=7)
    logits = blocks(together, contexts)
    for number, length in enumerate(contexts):
        alone = runner_of(form, ops)
        read(alone, [length])
        assert same(blocks(alone, [length])[0], logits[number])


@pytest.mark.parametrize("form", ["full", "convolved"])
def test_a_block_may_have_more_rows_than_go_through_at_once(ops_of: Any, form: str) -> None:
    model = runner_of(form, ops_of("float32"))
    read(model, [5, 0])
    for context, logits in zip([5, 0], blocks(model, [5, 0], size=150), strict=True):
        wanted = want(model.decoder.config, context, size=150)
        assert_close(logits, wanted, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["full", "convolved"])
@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
def test_native_quantises_as_the_reference_does(form: str) -> None:
    said = []
    for ops in (CpuOps("int8"), ReferenceOps("int8")):
        model = runner_of(form, ops)
        read(model, [40])
        said.append(blocks(model, [40]))
    difference = (said[0] - said[1]).abs() / said[1].std()
    assert difference.median() < 0.02
    assert difference.max() < 0.25


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
def test_native_refuses_what_would_read_or_write_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    model = runner_of("full", CpuOps("float32"))
    model.kv.open(0)
    model.kv.reserve(0, 4)
    batch = model.pack([Span.chunk(0, 0, [1, 2, 3], sample=False)])
    for rows, width in ((2, TOY.hidden_size), (3, TOY.hidden_size - 1)):
        with pytest.raises(ValueError, match="another shape"):
            model.write_kv(batch, torch.zeros(rows, width))
    with pytest.raises(ValueError, match="no tree"):
        model.pack([Span(0, 0, [1, 2, 3], [-1, 0, 0], (0,))])
