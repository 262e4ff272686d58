"""Decoders whose rows take hidden states in, against the same arithmetic in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.core.errors import ModelLoadError
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.request.span import Span
from tests.arrays import arrays, assert_close, same
from tests.heads import HEADS, head_config, head_runner, head_tensors
from tests.toy import TOY, VOCAB, toy_tensors

COUNT = 150  # more rows than go through at once
TOKENS = [(7 * i * i + 3) % VOCAB for i in range(COUNT)]
# The second one is neither itself nor doubled a multiple of a vector's width.
WIDTHS = [{}, {"hidden_size": 44, "intermediate_size": 100, "num_heads": 2, "head_dim": 16}]
INPUTS = 2.0 * torch.randn(COUNT, TOY.hidden_size, generator=torch.Generator().manual_seed(5))


def norm(x: torch.Tensor, t: dict[str, Any], name: str) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), t[name], TOY.norms.eps)


def turned(x: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, head_dim]`` by rotary embedding, row i at position i."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(half) / half)
    cos, sin = (f(angles)[:, None].repeat(1, 1, 2) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def block(
    c: ModelConfig, t: dict[str, Any], layer: int, x: torch.Tensor, read: torch.Tensor
) -> torch.Tensor:
    """One layer, the queries, keys and values of which read ``read``."""
    p, rows = f"model.layers.{layer}.", len(x)
    attn = p + "self_attn."
    q, k, v = ((read @ t[f"{attn}{n}_proj.weight"].T).view(rows, -1, c.head_dim) for n in "qkv")
    q, k = (turned(norm(y, t, f"{attn}{n}_norm.weight")) for n, y in (("q", q), ("k", k)))
    k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for y in (k, v))
    q, k, v = (y.transpose(0, 1) for y in (q, k, v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + seen.transpose(0, 1).flatten(1) @ t[attn + "o_proj.weight"].T
    inner = norm(x, t, p + "post_attention_layernorm.weight")
    gate, up = (inner @ t[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T


def want(
    c: ModelConfig, t: dict[str, Any], inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and all that can be tapped ``[rows, num_layers + 2, hidden_size]``."""
    embedded, first = t["model.embed_tokens.weight"][TOKENS], "model.layers.0."
    if c.entry.kind == "eagle3":
        normed = norm(inputs, t, first + "hidden_norm.weight")
        x = normed if c.entry.norm_before_residual else inputs
        read = torch.cat((norm(embedded, t, first + "input_layernorm.weight"), normed), 1)
    elif c.entry.kind == "mtp":
        pair = norm(embedded, t, "model.enorm.weight"), norm(inputs, t, "model.hnorm.weight")
        x = torch.cat(pair, 1) @ t["model.eh_proj.weight"].T
        read = norm(x, t, first + "input_layernorm.weight")
    else:
        joined = torch.cat((embedded, inputs), 1)
        x = read = joined @ t["model.eh_proj.weight"].T + t["model.eh_proj.bias"]
    streams = [x]
    for layer in range(c.num_layers):
        if layer:
            read = norm(x, t, f"model.layers.{layer}.input_layernorm.weight")
        x = block(c, t, layer, x, read)
        streams.append(x)
    x = x if c.entry.kind == "eagle" else norm(x, t, "model.norm.weight")
    return x @ t["lm_head.weight"].T, torch.stack([*streams, x], 1)


def batch_of(model: ModelRunner, samples: range = range(COUNT)) -> Any:
    if 0 not in model.kv:
        model.kv.open(0)
        model.kv.reserve(0, COUNT)
    return model.pack([Span(0, 0, TOKENS, range(-1, COUNT - 1), samples)])


def inputs_of(model: ModelRunner) -> Any:
    return INPUTS.repeat(1, 2)[:, : model.decoder.config.hidden_size].contiguous().numpy()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("changes", WIDTHS)
def test_a_head_is_what_it_says(ops_of: Any, name: str, changes: dict[str, Any]) -> None:
    model = head_runner(name, ops_of("float32"), **changes)
    c = model.decoder.config
    model.taps = tuple(range(c.num_layers + 2))
    inputs = inputs_of(model)
    result = model.forward(batch_of(model), inputs=inputs)
    logits, features = want(c, head_tensors(c), torch.from_numpy(inputs))
    assert_close(result.features, features, atol=1e-4, rtol=1e-4)
    assert_close(result.logits, logits, atol=1e-4, rtol=1e-4)
    some = model.forward(batch_of(model, range(140, 150)), greedy=True, inputs=inputs)
    assert same(some.features, result.features)
    if some.argmax is not None:
        assert some.argmax == result.logits[140:].argmax(-1).tolist()


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("changes", WIDTHS)
def test_native_quantises_as_the_reference_does(name: str, changes: dict[str, Any]) -> None:
    said = []
    for ops in (CpuOps("int8"), ReferenceOps("int8")):
        model = head_runner(name, ops, "float32", **changes)
        said.append(model.forward(batch_of(model), inputs=inputs_of(model)).logits)
        again = model.forward(batch_of(model), inputs=inputs_of(model)).logits
        assert same(again, said[-1])  # whatever the first forward has left behind
    difference = np.abs(said[0] - said[1]) / said[1].std()
    assert np.median(difference) < 0.02
    assert difference.max() < 0.25


def target_of(ops: Any, **changes: Any) -> Decoder:
    config = replace(TOY, **changes)
    return Decoder(config, arrays(toy_tensors(config=config)), ops, TOY.max_position)


@pytest.mark.parametrize("lent", [["model.embed_tokens"], ["model.embed_tokens", "lm_head"]])
def test_a_target_lends_what_a_head_has_not(ops_of: Any, lent: list[str]) -> None:
    """The same logits as with a copy; the packed weights are the target's own."""
    ops, config = ops_of("float32"), head_config("eagle3")
    target, tensors = target_of(ops), head_tensors(config)
    embedding = toy_tensors()["model.embed_tokens.weight"]
    own = tensors | {f"{name}.weight": embedding for name in lent}
    rest = {name: t for name, t in own.items() if name.removesuffix(".weight") not in lent}
    lending = Decoder(config, arrays(rest), ops, TOY.max_position, lent=target.ends)
    assert lending.embedding is target.embedding
    assert (lending.head is target.head) == ("lm_head" in lent)
    said = []
    for decoder in (Decoder(config, arrays(own), ops, TOY.max_position), lending):
        model = ModelRunner(decoder, KVCache(ops.kv_memory(config, 40, "float32")))
        said.append(model.forward(batch_of(model), inputs=INPUTS.numpy()).logits)
    assert same(*said)


@pytest.mark.parametrize("changes", [{"hidden_size": 48}, {"vocab_size": VOCAB + 1}])
def test_a_target_of_another_shape_lends_nothing(changes: dict[str, Any]) -> None:
    ops, config = ReferenceOps("float32"), head_config("eagle3")
    tensors = head_tensors(config)
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(ModelLoadError, match=r"no model\.embed_tokens\.weight"):
        Decoder(config, arrays(tensors), ops, TOY.max_position, lent=target_of(ops, **changes).ends)
