"""What an engine says of itself and of the answers to prompts, as the HTTP side reads it.

Owns types only. Knows no process, no socket and no engine; importing it does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.request.metrics import SpeculationCounters
from paceline.request.request import TokenLogprobs
from paceline.request.sampling_defaults import AS_LLAMA_CPP, SamplingDefaults

EngineState = Literal["starting", "ready", "hung", "draining", "failed", "closed"]
"""``hung``: it was ready, and gives no sign of life. ``failed``: it is not started again."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives.

    Attributes:
        model: its name, for people.
        max_model_len: most tokens of a prompt and its answer together: the context, or what the
            KV cache holds where that is less.
        promises_identity: plain and speculative answers are equal by construction.
        dtype: how it computes, for people: a GGUF file's own format by its name.
        proposers: who drafts, as the engine was started.
        kv_blocks_total: blocks of ``block_size`` tokens.
        cost_curve: predicted step of one request: (rows, milliseconds). Without a profile the
            second are multiples of the plain step.
        sampling: how a request that says nothing is sampled.
        architecture: the model's family.
        num_bytes: of its weights as they are stored.
        kv_bytes: of the whole KV cache.
        num_weights: of its embeddings, head and layers.
        longest_token: characters of the longest token; 0 without a tokenizer. To tell it takes a
            look at the whole vocabulary.
        pooling: how it was trained to make one vector of a text; empty where no file says it.
    """

    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    backend: str
    promises_identity: bool
    proposers: tuple[str, ...]
    max_num_seqs: int
    kv_blocks_total: int
    block_size: int
    cost_curve: tuple[tuple[int, float], ...] = ()
    has_profile: bool = False
    sampling: SamplingDefaults = AS_LLAMA_CPP
    architecture: str = ""
    hidden_size: int = 0
    num_layers: int = 0
    num_bytes: int = 0
    kv_bytes: int = 0
    num_weights: int = 0
    longest_token: int = 0
    pooling: str = ""


class Piece(NamedTuple):
    """What one step, or several in a short time, added to one sample.

    Attributes:
        sample: which one of all prompts'; those of the first prompt come first.
        token_ids, origins: for each token the proposer that drafted it, or ``target``.
        text: what became certain; empty where the model has no tokenizer.
        logprobs: one per token where they were asked for.
        finish_reason: ``stop``, ``length`` or ``abort`` with the last piece of a sample.
        stop_reason: the stop string or stop token id that matched.
        counters: what speculation did for the sample; with its last piece.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache; with the first piece
            of a prompt's first sample.
        prompt_logprobs: one per prompt token (None for the first) where they were asked for; with
            the same piece.
        error: why the sample failed, with its last piece.
        embedding: the prompt's vector as float32 values, the lowest byte first, where it was asked
            for; with the first piece of a prompt's first sample.
    """

    sample: int
    token_ids: Sequence[int]
    origins: Sequence[str]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    counters: SpeculationCounters | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    error: Exception | None = None
    embedding: bytes = b""
