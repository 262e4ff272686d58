"""A toy target with random weights and the harness that drives an engine step by step.

Small enough for hundreds of engines per second of test time, real enough to have several heads
per KV head, a chain of layers, and logits whose every bit can be compared.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import why_not_native
from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.kv_cache import KVCache
from paceline.cache.model_runner import ModelRunner
from paceline.cache.states import States
from paceline.config import EngineConfig, SpeculativeConfig, parse_speculative_config
from paceline.engine.engine import Engine
from paceline.models.config import AttentionConfig, ModelConfig, Multipliers
from paceline.models.decoder import Decoder
from paceline.models.layer_sizes import DELTA, MAMBA2, SHORT_CONV, Recurrent
from paceline.proposers.base import Proposer
from paceline.request.request import Request, StepOutput
from paceline.request.sampling_params import SamplingParams
from tests.arrays import arrays

VOCAB = 48
EOS = 0
DEVICE = os.environ.get("PACELINE_TEST_DEVICE", "cpu")
"""Where the reference ops compute; the contracts hold on ``cuda`` too."""
USUAL = "float32" if DEVICE != "cpu" or why_not_native() else "native-float32"
"""Floats on the native kernels, which take a tenth of the reference's time, if there are any."""
TOY = ModelConfig(
    architecture="toy",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=44,  # not a multiple of any vector width
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
    tie_embeddings=True,
    attention=AttentionConfig(qk_norm=True),
)

_SIZES: dict[str, Any] = {"heads": 4, "groups": 2, "key_dim": 6, "value_dim": 8}
HYBRIDS = {
    each.kind: replace(TOY, num_layers=4, recurrent=each)
    for each in (
        Recurrent(DELTA, (True, False, True, True), kernel=4, norm="before_gate", **_SIZES),
        Recurrent(MAMBA2, (True, False, True, True), kernel=3, norm="after_gate", **_SIZES),
        Recurrent(SHORT_CONV, (True, False, True, True), kernel=3, value_dim=TOY.hidden_size),
    )
}
HYBRIDS["beside"] = replace(
    TOY,
    recurrent=Recurrent(
        MAMBA2, (True, True), kernel=3, norm="after_gate", beside=True, out_scale=0.7, **_SIZES
    ),
    multipliers=Multipliers(attention_out=0.6),
)
"""The toy with recurrent layers, by their kinds, or with attention beside each of them."""


def toy_tensors(seed: int = 0, config: ModelConfig = TOY, noise: float = 0.0) -> dict[str, Any]:
    """Random weights; ``noise`` perturbs them, which makes a draft that is often right."""
    return {name: tensor.clone() for name, tensor in _drawn(seed, config, noise).items()}


@functools.lru_cache(maxsize=16)
def _drawn(seed: int, config: ModelConfig, noise: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    c = config
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        shapes |= {
            p + "self_attn.q_proj.weight": (c.num_heads * c.head_dim, c.hidden_size),
            p + "self_attn.k_proj.weight": (c.num_kv_heads * c.head_dim, c.hidden_size),
            p + "self_attn.v_proj.weight": (c.num_kv_heads * c.head_dim, c.hidden_size),
            p + "self_attn.o_proj.weight": (c.hidden_size, c.num_heads * c.head_dim),
            p + "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            p + "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            p + "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
    tensors = {
        name: torch.randn(shape, generator=generator) * 2.0 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{norm}.weight"] = torch.ones(c.hidden_size)
        for norm in ("q_norm", "k_norm") if c.attention.qk_norm else ():
            tensors[f"{p}self_attn.{norm}.weight"] = torch.ones(c.head_dim)
    for i in range(c.num_layers):
        if c.recurrent_of(i):
            tensors |= _recurrent(f"model.layers.{i}.", tensors, c, generator)
        if c.mlp.experts_of(i):
            tensors |= _experts(f"model.layers.{i}.mlp.", tensors, c, generator)
    tensors["model.norm.weight"] = torch.ones(c.hidden_size)
    if noise:
        tensors = {
            name: t + noise * torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5
            for name, t in tensors.items()
        }
    return tensors


def _recurrent(p: str, tensors: dict[str, Any], c: ModelConfig, generator: Any) -> dict[str, Any]:
    """A recurrence in place of a layer's attention, or beside it."""
    assert c.recurrent is not None
    replaced = [name for name in tensors if name.startswith(p + "self_attn.")]
    for name in [] if c.recurrent.beside else replaced:
        del tensors[name]
    r, hidden = c.recurrent, c.hidden_size
    names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    widths = dict(zip(names, r.in_widths, strict=True)) if r.kind == DELTA else {}
    widths = widths or {"in_proj": sum(r.in_widths)}
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": (w, hidden) for n, w in widths.items()}
    shapes |= {"out_proj.weight": (hidden, r.inner), "conv1d.weight": (r.channels, 1, r.kernel)}
    found = {
        p + "linear_attn." + name: torch.randn(shape, generator=generator) * 2.0 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    p += "linear_attn."
    if r.key_dim:
        found[p + "A_log"] = torch.rand(r.heads, generator=generator) - 2.0
        found[p + "dt_bias"] = torch.randn(r.heads, generator=generator)
        found[p + "norm.weight"] = torch.ones(r.value_dim if r.kind == DELTA else r.inner)
    if r.kind == MAMBA2:
        found[p + "D"] = torch.randn(r.heads, generator=generator)
    return found


def _experts(p: str, tensors: dict[str, Any], c: ModelConfig, generator: Any) -> dict[str, Any]:
    """A mixture in place of a dense layer's feed-forward."""
    assert c.mlp.experts is not None
    for name in ("gate_proj", "up_proj", "down_proj"):
        del tensors[f"{p}{name}.weight"]
    e, hidden = c.mlp.experts, c.hidden_size
    found = {p + "gate.weight": (e.number, hidden)}
    widths = {f"{p}experts.{i}.": e.width for i in range(e.number)}
    if e.shared_width:
        widths[p + "shared_expert."] = e.shared_width
    if e.shared_gate:
        found[p + "shared_expert_gate.weight"] = (1, hidden)
    for prefix, width in widths.items():
        found |= {f"{prefix}{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
        found[prefix + "down_proj.weight"] = (hidden, width)
    return {
        name: torch.randn(shape, generator=generator) * 2.0 / shape[-1] ** 0.5
        for name, shape in found.items()
    }


def toy_ops(dtype: str) -> Any:
    """The backend of a dtype: ``native-int8`` is the native kernels', ``int8`` the reference's."""
    if dtype.startswith("native-"):
        return CpuOps(dtype.removeprefix("native-"))
    return ReferenceOps(dtype, DEVICE, deterministic=True)


def toy_runner(
    dtype: str = USUAL,
    num_blocks: int = 200,
    prefix_caching: bool = True,
    kv_dtype: str = "auto",
    shape: ModelConfig = TOY,
    num_slots: int = 40,
    max_num_seqs: int = 8,
    **tensors: Any,
) -> ModelRunner:
    ops = toy_ops(dtype)
    decoder = Decoder(shape, arrays(toy_tensors(config=shape, **tensors)), ops, shape.max_position)
    kv_dtype = ops.default_kv_dtype if kv_dtype == "auto" else kv_dtype
    memory, states = ops.kv_memory(shape, num_blocks, kv_dtype), None
    if shape.recurrent is not None:
        states = States(ops.state_memory(shape, num_slots, max_num_seqs, 17))
    return ModelRunner(decoder, KVCache(memory, prefix_caching, states))


OfRunner = Callable[[ModelRunner], Proposer]


def toy_engine(
    proposers: Sequence[Proposer | OfRunner] = (),
    dtype: str = USUAL,
    num_blocks: int = 200,
    poison: bool = True,
    shape: ModelConfig = TOY,
    num_slots: int = 40,
    **config: Any,
) -> Engine:
    """An engine on the toy target whose free KV slots hold NaN.

    Args:
        proposers: or what makes them for the target's runner.
    """
    config.setdefault("max_model_len", TOY.max_position)
    config.setdefault("max_num_seqs", 8)
    caching = config.get("enable_prefix_caching", True)
    kv_dtype, seqs = config.get("kv_cache_dtype", "auto"), config["max_num_seqs"]
    runner = toy_runner(dtype, num_blocks, caching, kv_dtype, shape, num_slots, seqs)
    made = [each if hasattr(each, "propose") else each(runner) for each in proposers]
    engine = Engine(runner, EngineConfig(**config), made, eos_token_ids=[EOS])
    if poison:
        engine.kv.poison_free()
    return engine


@dataclass(slots=True)
class Job:
    """A request to be added before step ``at``."""

    prompt: Sequence[int]
    params: SamplingParams
    at: int = 0
    resume_at: int = 0
    adapter: str | None = None


@dataclass(slots=True)
class Result:
    """What one sample of one job produced."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    request: Request | None = None

    @property
    def answer(self) -> tuple[Any, ...]:
        """Everything that must not depend on how it was computed."""
        return (
            self.token_ids,
            self.logprobs,
            self.prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
        )


def run_jobs(
    engine: Engine,
    jobs: Sequence[Job],
    script: Mapping[int, Callable[[Engine, list[list[int]]], None]] | None = None,
    max_steps: int = 3000,
    checkers: Callable[[Job], Sequence[Any]] = lambda job: (),
    constraints: Callable[[Job], Sequence[Any]] = lambda job: (),
) -> list[list[Result]]:
    """Drive an engine; ``script[step]`` runs before that step with the ids of the jobs so far."""
    ids: list[list[int]] = []
    results: dict[int, Result] = {}
    pending = sorted(range(len(jobs)), key=lambda i: jobs[i].at)
    ids = [[] for _ in jobs]
    for step in range(max_steps):
        while pending and jobs[pending[0]].at <= step:
            index = pending.pop(0)
            job = jobs[index]
            ids[index] = engine.add_request(
                job.prompt,
                job.params,
                checkers(job),
                constraints=constraints(job),
                resume_at=job.resume_at,
                adapter=job.adapter,
            )
            for request_id in ids[index]:
                results[request_id] = Result(request=engine.requests[request_id])
        if script and step in script:
            script[step](engine, ids)
        if not engine.has_work and not pending:
            break
        for output in engine.step():
            _collect(results[output.request_id], output)
        check_contexts(engine)
    else:
        raise AssertionError(f"not done after {max_steps} steps")
    for result in results.values():
        assert result.request is not None
        result.prompt_logprobs = result.request.prompt_logprobs
    return [[results[i] for i in group] for group in ids]


def _collect(result: Result, output: StepOutput) -> None:
    result.token_ids += output.token_ids
    result.logprobs += output.logprobs
    result.origins += output.origins
    result.finish_reason = output.finish_reason
    result.stop_reason = output.stop_reason
    result.error = output.error


def check_contexts(engine: Engine) -> None:
    """After every step each proposer's context is the request's tokens."""
    for request in engine.scheduler.running:
        if request.num_uncomputed != 1:
            continue
        for proposer in engine.drafting.proposers:
            assert proposer.context_length(request) == len(request.token_ids)


def assert_no_leak(engine: Engine) -> None:
    """Nobody runs, so every block is free or cached without a user."""
    assert not engine.requests
    pool, states, kept = engine.kv.pool, engine.kv.states, engine.kv.checkpoints
    if states is not None:
        assert states.num_available == states.memory.num_slots - 1 - len(kept)
    assert engine.kv.num_used == 0
    users = {block: pool.users(block) for block in range(pool.num_blocks)}
    assert {block: count for block, count in users.items() if count} == kept.blocks()


def lookup_config(**options: Any) -> SpeculativeConfig:
    options = {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "min_accept_prob": 0.0} | options
    return SpeculativeConfig(method="prompt_lookup", **options)


def suffix_config(**options: Any) -> SpeculativeConfig:
    (config,) = parse_speculative_config({"method": "suffix", "min_accept_prob": 0.0} | options)
    return config


def draft_config(**options: Any) -> SpeculativeConfig:
    options = {"min_accept_prob": 0.0, "deterministic": True} | options
    return SpeculativeConfig(method="draft_model", model="toy", **options)


def toy_folder(folder: Path) -> Path:
    """The toy model in the Hugging Face layout, without a tokenizer."""
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": TOY.hidden_size,
        "intermediate_size": TOY.intermediate_size,
        "num_hidden_layers": TOY.num_layers,
        "num_attention_heads": TOY.num_heads,
        "num_key_value_heads": TOY.num_kv_heads,
        "head_dim": TOY.head_dim,
        "max_position_embeddings": TOY.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(toy_tensors(), folder / "model.safetensors")
    return folder
