"""Engine options, resolved once by pure functions. Knows no models and no files.

Names of speculative configurations are offered here too: whoever builds an engine needs them as
well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config.methods import METHOD_ALIASES, METHODS, check_method
from paceline.config.objective import Objective, parse_objective
from paceline.config.speculative import (
    DTYPES,
    GRAMMAR_DRAFTS,
    LOOSENING_KEYS,
    MAX_SPECULATIVE_TOKENS,
    MAX_TREE_NODES,
    SpeculativeConfig,
    parse_speculative_config,
)
from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError

__all__ = [
    "BACKENDS",
    "DTYPES",
    "GRAMMAR_DRAFTS",
    "KV_DTYPES",
    "LOOSENING_KEYS",
    "MAX_SPECULATIVE_TOKENS",
    "MAX_THREADS",
    "MAX_TREE_NODES",
    "METHODS",
    "METHOD_ALIASES",
    "PACKED_DTYPES",
    "PLANNERS",
    "REFERENCE_DTYPES",
    "EngineConfig",
    "SpeculativeConfig",
    "check_method",
    "check_number",
    "environment_name",
    "parse_speculative_config",
]

PACKED_DTYPES = ("float32", "bfloat16", "float16", "file", "int8", "int4", "int3", "int2")
"""What weights are packed to for the native kernels, from most bits to fewest; ``file`` keeps the
formats in which they are stored."""
REFERENCE_DTYPES = ("float32", "bfloat16", "float16", "file", "int8")
"""What the reference backend computes in, from most bits to fewest."""
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
BACKENDS = ("auto", "native", "reference")
PLANNERS = ("auto", "fixed")
MAX_THREADS = 1024
"""That the native kernels take."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built with.

    Attributes:
        dtype: arithmetic of the target; ``auto`` is resolved from the machine and the checkpoint.
        device: torch device string.
        max_model_len: context limit in tokens; None takes the model's own.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most rows of one forward.
        max_step_ms: while anyone decodes, prefill chunks are sized so that a step stays below this;
            None means the larger of 100 ms and four plain decode steps.
        weight_memory: bytes for the target's weights; layers or experts beyond that are read from
            disk when they are needed. None takes what is available, which is as much as it needs
            or a share.
        packed_space: bytes of disk for the models that are packed to be read from it, this one
            included; those that were not used for the longest go. None is half of what is free.
        kv_cache_memory: bytes for keys and values of target and drafts; None derives it from free
            memory.
        kv_cache_dtype: ``auto`` follows the arithmetic.
        enable_prefix_caching: whether committed blocks serve later requests.
        speculative: the proposers, in the order in which they were configured.
        self_drafts: beside these, if there are some, a dense model that is read from disk drafts
            with a copy of its layers in 4 bits where there is memory for it.
        objective: what draft nodes are chosen for; whatever
            :func:`~paceline.config.objective.parse_objective` reads is taken, and its result kept.
        planner: ``auto`` weighs what a draft costs against what it brings; ``fixed`` verifies what
            was drafted, up to its caps.
        strict: fail, instead of decoding plainly, when a draft cannot be used.
        backend: ``native`` kernels, ``reference`` ops in torch, or ``auto`` for the native ones
            wherever they can run.
        num_threads: of the kernels and of torch; None leaves them.
        seed: seeds the seeds that requests do not bring.
        load_format: ``mmap`` or ``memory``.
        pipeline_parallel_size: parts of the target's layers, each in a process of its own; the
            first is this one.
        pipeline_stages: ``HOST:PORT`` of the others, where ``paceline stage`` listens; empty starts
            them on this machine.
        deterministic: force or forbid the reproducible kernels; None means wherever they exist.
    """

    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_step_ms: float | None = None
    weight_memory: int | None = None
    packed_space: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    speculative: tuple[SpeculativeConfig, ...] = field(default_factory=tuple)
    self_drafts: bool = True
    objective: Objective = field(default_factory=Objective)
    planner: str = "auto"
    strict: bool = False
    num_threads: int | None = None
    seed: int | None = None
    load_format: str = "mmap"
    pipeline_parallel_size: int = 1
    pipeline_stages: tuple[str, ...] = ()
    deterministic: bool | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", parse_objective(self.objective))
        check_choice("planner", self.planner, PLANNERS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("load_format", self.load_format, ("mmap", "memory"))
        check_number("max_num_seqs", self.max_num_seqs, 1, 4096)
        check_number("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs "
                f"({self.max_num_seqs}); every running request needs one row"
            )
        if self.max_model_len is not None:
            check_number("max_model_len", self.max_model_len, 2, 1 << 24)
        for name in ("enable_prefix_caching", "self_drafts", "strict", "deterministic"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name != "deterministic"):
                raise ConfigError(f"{name} is {value!r}; allowed: True and False")
        if self.seed is not None:
            check_number("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("kv_cache_memory", "weight_memory", "packed_space"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, 1 << 50)
        if self.num_threads is not None:
            check_number("num_threads", self.num_threads, 1, MAX_THREADS)
        check_number("pipeline_parallel_size", self.pipeline_parallel_size, 1, 1024)
        if self.pipeline_stages and len(self.pipeline_stages) + 1 != self.pipeline_parallel_size:
            raise ConfigError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size}, and "
                f"{len(self.pipeline_stages)} pipeline_stages are named; the engine itself is one "
                "more"
            )
        if self.pipeline_parallel_size > 1 and (self.weight_memory or self.device != "cpu"):
            raise ConfigError(
                "pipeline_parallel_size is for CPUs, and no part reads its weights from disk: "
                "leave weight_memory and device out"
            )
        if self.max_step_ms is not None:
            check_number("max_step_ms", self.max_step_ms, 0.001, 1e9, float)


def environment_name(option: str) -> str:
    """The variable that an option also reads: PACELINE_MAX_TOKENS for ``--max-tokens``."""
    return "PACELINE_" + option.lstrip("-").replace("-", "_").upper()
