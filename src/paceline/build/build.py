"""From a checkpoint and a configuration to an engine. Owns the sizes it resolves on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

from paceline.backends.resolve import backend_of, resolve_dtype, resolve_ops
from paceline.build.weight_memory import self_draft, tensors_within
from paceline.cache.block_pool import blocks_for
from paceline.cache.kv_cache import KVCache
from paceline.cache.memory_needs import (
    DEFAULT_MEMORY_SHARE,
    bytes_per_block,
    free_memory,
    least_budget,
    state_room,
)
from paceline.cache.model_runner import ModelRunner
from paceline.cache.states import States
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.errors import ConfigError
from paceline.engine.engine import Engine
from paceline.loading.checkpoint import Checkpoint, load_checkpoint, model_fingerprint
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.threads import set_num_threads
from paceline.models.weights import check_whole_head
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import CostTable, ExpertCost
from paceline.planner.planner import PLANNERS
from paceline.proposers import build_proposers
from paceline.proposers.base import Proposer, TargetInfo
from paceline.stages.backend import StagedOps, split
from paceline.tensors.arrays import give_back_freed
from paceline.tensors.placement import Placement

log = logging.getLogger(__name__)
DRAFT_SHARE = 5
"""A draft model's KV gets one part in this many of the byte budget."""


@dataclass(slots=True)
class BuiltEngine:
    """An engine, and the facts about it that its callers need.

    Attributes:
        config: resolved for the checkpoint and the machine.
        target: describes the target model to proposers that are built later.
        backend: name of the ops, with the instruction-set level of native ones.
        promises_identity: plain and speculative outputs are bitwise identical by construction.
    """

    engine: Engine
    checkpoint: Checkpoint
    config: EngineConfig
    target: TargetInfo
    backend: str
    promises_identity: bool

    def proposers_for(self, configs: tuple[SpeculativeConfig, ...]) -> list[Proposer]:
        return build_proposers(configs, self.target, strict=self.config.strict)


def resolve_config(config: EngineConfig, checkpoint: Checkpoint) -> tuple[EngineConfig, Ops]:
    """Resolve values that depend on the checkpoint and the machine, and choose the backend.

    Raises:
        ConfigError: ``max_model_len`` is beyond the model's own longest context.
        UnsupportedModelError: the model's head lacks tokens of the vocabulary.
    """
    check_whole_head(checkpoint.name, checkpoint.config)
    limit = checkpoint.config.max_position
    wanted = config.max_model_len or limit
    if wanted > limit:
        raise ConfigError(
            f"max_model_len is {wanted}; {checkpoint.name} was made for at most {limit} tokens"
        )
    backend = backend_of(checkpoint.config, config.backend)
    dtype = resolve_dtype(config.dtype, config.device, checkpoint, backend)
    ops = resolve_ops(dtype, config.device, config.deterministic, backend)
    kv_dtype = ops.default_kv_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    resolved = replace(
        config,
        max_model_len=wanted,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
    )
    return resolved, ops


def kv_budget(config: EngineConfig) -> int:
    """Bytes for all KV caches: the configured number, or a share of the free memory."""
    return config.kv_cache_memory or int(free_memory() * DEFAULT_MEMORY_SHARE)


def target_info(
    checkpoint: Checkpoint, config: EngineConfig, kv_bytes: int, runner: ModelRunner | None = None
) -> TargetInfo:
    """Describe a target model to its proposers, by a resolved configuration."""
    assert config.max_model_len is not None
    tokenizer = checkpoint.tokenizer
    return TargetInfo(
        vocab_size=checkpoint.config.vocab_size,
        fingerprint=tokenizer.fingerprint if tokenizer else None,
        device=config.device,
        backend=config.backend,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_bytes=kv_bytes,
        runner=runner,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        dtype=config.dtype,
    )


def expert_cost(config: ModelConfig) -> ExpertCost | None:
    """A model's mixtures; an expert costs its part of the weights that a single row reads."""
    mixtures = [
        each for layer in range(config.num_layers) if (each := config.mlp.experts_of(layer))
    ]
    if not mixtures:
        return None
    of = mixtures[0]
    weights = 3 * of.width * config.hidden_size
    idle = len(mixtures) * (of.number - of.per_token) * weights
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    read = config.num_weights - looked_up - idle
    return ExpertCost(len(mixtures), of.number, of.per_token, weights / read)


FindTable = Callable[[str, ModelConfig, Ops, str, str, Placement | None], CostTable | None]
"""From a model's name and shape, its ops, its dtype and its KV's, and the placement of its weights,
to what its steps cost here."""


def build_engine(
    model: str | Checkpoint, config: EngineConfig, find_table: FindTable | None = None
) -> BuiltEngine:
    """Load a model and its drafts.

    Args:
        find_table: looks for a profile of the model on this machine.

    Raises:
        ModelLoadError, ConfigError: the model cannot be loaded, or the configuration does not fit.
    """
    if config.num_threads is not None:
        set_num_threads(config.num_threads)
    if isinstance(model, Checkpoint):
        checkpoint = model
    else:
        checkpoint = load_checkpoint(model, load_format=config.load_format)
    config, ops = resolve_config(config, checkpoint)
    runner, left = open_runner(checkpoint, config, ops, model if isinstance(model, str) else "")
    if runner.kv.states is not None:
        config = replace(config, max_num_seqs=runner.kv.states.memory.num_lanes)
    target = target_info(checkpoint, config, left, runner)
    proposers = build_proposers(config.speculative, target, strict=config.strict)
    if (
        config.speculative
        and config.self_drafts
        and (own := self_draft(runner.decoder, kv_budget(config)))
    ):
        proposers += build_proposers([own], target, strict=False)
    table, placement = None, runner.decoder.placement
    is_staged = config.pipeline_parallel_size > 1  # which no profile knows
    if find_table is not None and not is_staged:
        name, shape = checkpoint.name, checkpoint.config
        table = find_table(name, shape, ops, config.dtype, config.kv_cache_dtype, placement)
    cost = CostModel(
        table,
        ops=ops.name,
        experts=expert_cost(checkpoint.config),
        from_disk=placement.share_from_disk if placement else 0.0,
        streamed=placement.share_streamed if placement else 0.0,
    )
    planner = PLANNERS[config.planner](cost, config.objective)
    stops = checkpoint.config.eos_token_ids
    engine = Engine(runner, config, proposers, stops, planner, cost)
    if isinstance(runner.decoder.ops, StagedOps):
        engine.close = runner.decoder.ops.close
    give_back_freed()
    return BuiltEngine(engine, checkpoint, config, target, ops.name, ops.identity)


def _decoder(checkpoint: Checkpoint, config: EngineConfig, ops: Ops) -> Decoder:
    """The checkpoint's decoder, which engines that compute alike share: weights lie there once."""
    assert config.max_model_len is not None
    length = config.max_model_len
    key = ops.name, config.dtype, config.deterministic, config.device, length, config.weight_memory
    decoder = checkpoint.decoders.get(key)
    if decoder is None:
        tensors = tensors_within(checkpoint, config, ops)
        decoder = Decoder(checkpoint.config, tensors, ops, length)
        checkpoint.decoders[key] = decoder
    return decoder


def open_states(
    shape: ModelConfig, config: EngineConfig, ops: Ops, budget: int, drafts: int
) -> tuple[States | None, int]:
    """The states of recurrent layers, None where there are none, and their bytes."""
    if shape.recurrent is None:
        return None, 0
    nodes, wanted = sum(each.tree_nodes for each in config.speculative), config.max_num_seqs
    room = state_room(shape, budget - drafts, wanted, nodes, config.enable_prefix_caching)
    log.info(
        "states of recurrent layers take %.1f MB of the KV cache's memory; at most %d requests run "
        "at once",
        room.num_bytes / 1e6,
        room.num_lanes,
    )
    if room.num_lanes < wanted:
        least = least_budget(shape.recurrent, wanted, nodes) * budget // (budget - drafts)
        log.warning(
            "at most %d requests run at once, not %d (--max-num-seqs): of %d MB for keys, values "
            "and states, running requests' states of recurrent layers get half; "
            "--kv-cache-memory %dM is enough for all",
            room.num_lanes,
            wanted,
            budget >> 20,
            (least >> 20) + 1,
        )
    memory = ops.state_memory(shape, room.num_slots, room.num_lanes, room.num_nodes)
    return States(memory), room.num_bytes


def _staged(checkpoint: Checkpoint, config: EngineConfig, ops: Ops, source: str) -> Decoder:
    """The first layers of the model, on a backend that has the others in stages."""
    assert config.max_model_len is not None
    if not source:
        raise ConfigError("stages load a model by its path or name: give that, not what it holds")
    if any(each.method == "self" for each in config.speculative):
        raise ConfigError("self drafts with all layers, which stages have: choose another method")
    parts = split(checkpoint.config, config.pipeline_parallel_size)
    first = checkpoint.stage(0, parts[0].stop)
    own = Decoder(first.config, first.tensors, ops, config.max_model_len)
    greeting = {
        "model": source,
        "fingerprint": model_fingerprint(checkpoint),
        "dtype": config.dtype,
        "backend": config.backend,
        "deterministic": config.deterministic,
        "ops": ops.name,
        "max_model_len": config.max_model_len,
        "threads": config.num_threads,
    }
    addresses = config.pipeline_stages or [""] * (len(parts) - 1)
    whole = copy(own)
    whole.config = checkpoint.config
    whole.ops = StagedOps(ops, own, checkpoint.config, addresses, parts, greeting)
    return whole


def open_runner(
    checkpoint: Checkpoint, config: EngineConfig, ops: Ops, source: str = ""
) -> tuple[ModelRunner, int]:
    """The model with its KV cache, and the bytes that are left for the KV caches of drafts."""
    assert config.max_model_len is not None
    shape = checkpoint.config
    if config.pipeline_parallel_size > 1:
        decoder = _staged(checkpoint, config, ops, source)
    else:
        decoder = _decoder(checkpoint, config, ops)
    ops = decoder.ops
    budget = kv_budget(config)
    needed = any(c.has_own_kv or (c.model and not c.needs_forwards) for c in config.speculative)
    drafts = budget // DRAFT_SHARE if needed else 0
    states, state_bytes = open_states(shape, config, ops, budget, drafts)
    budget -= state_bytes
    # One block is reserved, and every sequence may need one more for its draft's nodes.
    most = 1 + config.max_num_seqs * (blocks_for(config.max_model_len) + 17)
    block_bytes = bytes_per_block(shape, config.kv_cache_dtype)
    count = min(most, (budget - drafts) // block_bytes)
    memory = ops.kv_memory(shape, max(0, count), config.kv_cache_dtype)
    runner = ModelRunner(decoder, KVCache(memory, config.enable_prefix_caching, states))
    if isinstance(ops, StagedOps):
        ops.lose = runner.kv.lose
    return runner, budget - count * block_bytes
