"""Engine options and what the planner aims at, resolved once by pure functions.

Knows no models and no files. Names of speculative configurations are offered here too: whoever
builds an engine needs them as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from paceline.config.speculative import (
    DTYPES,
    MAX_SPECULATIVE_TOKENS,
    MAX_TREE_NODES,
    METHOD_ALIASES,
    METHODS,
    SpeculativeConfig,
    check_method,
)
from paceline.config.speculative_json import LOOSENING_KEYS, parse_speculative_config
from paceline.core.checks import (
    check_number,
    check_settings,
    check_switch,
    memory_bytes,
    number,
    one_of,
    optional,
    setting,
    whole,
)
from paceline.core.errors import ConfigError

__all__ = [
    "BACKENDS",
    "DTYPES",
    "KV_DTYPES",
    "LOOSENING_KEYS",
    "MAX_SPECULATIVE_TOKENS",
    "MAX_THREADS",
    "MAX_TREE_NODES",
    "METHODS",
    "METHOD_ALIASES",
    "OBJECTIVES",
    "PACKED_DTYPES",
    "PLANNERS",
    "REFERENCE_DTYPES",
    "EngineConfig",
    "Objective",
    "SpeculativeConfig",
    "check_method",
    "environment_name",
    "parse_objective",
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
OBJECTIVES = ("throughput", "latency", "tpot")
_ALLOWED = 'allowed: throughput, latency and {"tpot_ms": milliseconds per token}'


@dataclass(frozen=True, slots=True)
class Objective:
    """What the nodes of a step are chosen for.

    Attributes:
        kind: ``throughput``: most tokens per second over all requests; ``latency``: least time
            per token of each request; ``tpot``: most tokens per second, where a request may be
            held up by the drafts of others as long as it keeps ``tpot_ms``.
        tpot_ms: wanted milliseconds per output token; with ``tpot`` only.

    Raises:
        ConfigError: an unknown kind, or a time that is missing, out of place or out of range.
    """

    kind: str = "throughput"
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise ConfigError.of("objective", f"is {self.kind!r}; {_ALLOWED}")
        if (self.kind == "tpot") != (self.tpot_ms is not None):
            raise ConfigError.of("objective", f"{self.kind} has tpot_ms {self.tpot_ms}; {_ALLOWED}")
        if self.tpot_ms is not None:
            check_number("tpot_ms", self.tpot_ms, 0.001, 1e9, float)


def parse_objective(source: str | Mapping[str, Any] | Objective) -> Objective:
    """Read an objective: a name, ``{"tpot_ms": 20}``, or that as JSON text.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(source, Objective):
        return source
    value: Any = source
    if isinstance(source, str) and source.lstrip().startswith("{"):
        try:
            value = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ConfigError.of(
                "objective", f"{source[:60]!r} is not valid JSON: {error}; {_ALLOWED}"
            ) from error
    if isinstance(value, Mapping):
        if set(value) != {"tpot_ms"}:
            raise ConfigError.of("objective", f"is {dict(value)}; {_ALLOWED}")
        return Objective("tpot", value["tpot_ms"])
    return Objective(value)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built with.

    Amounts of memory may be texts such as ``2G``, and the objective whatever
    :func:`~paceline.config.parse_objective` reads; what is kept is the number or the
    :class:`Objective`.
    """

    dtype: str = setting(
        "auto", f"Precision of the arithmetic: {', '.join(DTYPES)}.", one_of(DTYPES)
    )
    device: str = setting("cpu", "Device to run on, as torch names it.")
    max_model_len: int | None = setting(
        None,
        "Maximum context length in tokens (default: the model's own).",
        optional(whole(2, 1 << 24)),
    )
    max_num_seqs: int = setting(32, "Maximum number of sequences that run at once.", whole(1, 4096))
    max_num_batched_tokens: int = setting(
        512, "Maximum number of tokens in one forward pass.", whole(1, 1 << 20)
    )
    max_step_ms: float | None = setting(
        None,
        "Maximum milliseconds per step while a prompt is read and other requests decode (default: "
        "the larger of 100 ms and four plain decode steps).",
        optional(number(0.001, 1e9)),
    )
    weight_memory: int | None = setting(
        None,
        "Memory for weights, e.g. 6G. Layers or experts that do not fit are read from disk when "
        "they are needed (default: what is available).",
        optional(whole(1, 1 << 50)),
    )
    packed_space: int | None = setting(
        None,
        "Disk space for models packed to be read from disk, e.g. 60G. The least recently used are "
        "deleted first (default: half of the free space).",
        optional(whole(1, 1 << 50)),
    )
    kv_cache_memory: int | None = setting(
        None,
        "Memory for the KV caches of the model and its drafts, e.g. 512M or 2G (default: a share "
        "of what is free).",
        optional(whole(1, 1 << 50)),
    )
    kv_cache_dtype: str = setting(
        "auto", f"Precision of the KV cache: {', '.join(KV_DTYPES)}.", one_of(KV_DTYPES)
    )
    enable_prefix_caching: bool = setting(
        True, "Reuse the KV cache of earlier prompts that begin the same way.", check_switch
    )
    speculative: tuple[SpeculativeConfig, ...] = setting(
        (), "The proposers, in the order in which they were configured."
    )
    self_drafts: bool = setting(
        True,
        "Let a dense model that is read from disk also draft with a copy of its layers in fewer "
        "bits, where there are other proposers and memory for it.",
        check_switch,
    )
    objective: Objective = setting(
        MISSING,
        'What the planner optimises: throughput, latency, or {"tpot_ms": 20} to keep a time per '
        "token.",
        default_factory=Objective,
    )
    planner: str = setting(
        "auto",
        "auto checks the drafted tokens that pay off, fixed checks all of them.",
        one_of(PLANNERS),
    )
    strict: bool = setting(
        False, "Fail if a draft is unusable, instead of running without it.", check_switch
    )
    num_threads: int | None = setting(
        None, "Number of compute threads.", optional(whole(1, MAX_THREADS))
    )
    seed: int | None = setting(
        None,
        "Seeds the requests that bring no seed (default: random).",
        optional(whole(-(2**63), 2**64 - 1)),
    )
    load_format: str = setting(
        "mmap",
        "How weights are read: mmap maps the file and reads when needed, memory reads everything "
        "at once.",
        one_of(("mmap", "memory")),
    )
    pipeline_parallel_size: int = setting(
        1,
        "Number of stages that the layers are split into. Each runs in a process, the first in "
        "this one.",
        whole(1, 1024),
    )
    pipeline_stages: tuple[str, ...] = setting(
        (),
        "HOST:PORT of a `paceline stage`, one for each stage after the first (default: processes "
        "on this machine).",
    )
    deterministic: bool | None = setting(
        None,
        "Force or forbid the reproducible kernels (default: wherever they exist).",
        optional(check_switch),
    )
    backend: str = setting("auto", f"CPU kernels: {', '.join(BACKENDS)}.", one_of(BACKENDS))

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", parse_objective(self.objective))
        for name in ("weight_memory", "packed_space", "kv_cache_memory"):
            if isinstance(size := getattr(self, name), str):
                object.__setattr__(self, name, memory_bytes(size))
        check_settings(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError.of(
                "max_num_batched_tokens",
                f"is {self.max_num_batched_tokens}, below max_num_seqs ({self.max_num_seqs}); "
                "every running request needs one row",
            )
        if self.pipeline_stages and len(self.pipeline_stages) + 1 != self.pipeline_parallel_size:
            raise ConfigError.of(
                "pipeline_parallel_size",
                f"is {self.pipeline_parallel_size}, and {len(self.pipeline_stages)} "
                "pipeline_stages are named; the engine itself is one more",
            )
        if self.pipeline_parallel_size > 1 and (self.weight_memory or self.device != "cpu"):
            raise ConfigError.of(
                "pipeline_parallel_size",
                "is for CPUs, and no part reads its weights from disk: leave weight_memory and "
                "device out",
            )


def environment_name(option: str) -> str:
    """The variable that an option also reads: PACELINE_MAX_TOKENS for ``--max-tokens``."""
    return "PACELINE_" + option.lstrip("-").replace("-", "_").upper()
