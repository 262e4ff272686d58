"""What a machine has that decides how fast it decodes, and how much of that a step uses.

Facts are read where Linux tells them and are None where it does not. A forward reads every weight
and the KV of its context once, and multiplies and adds twice per weight and row (Williams,
Waterman and Patterson's roofline, 2009). The two roofs are measured: reading an array that no cache
holds, and a matrix product through the model's own backend. Advises nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from paceline import __version__
from paceline.backends.native.native import missing, native_module
from paceline.backends.native.packing import WEIGHT_BITS
from paceline.core.machine import cpu_quota, load_average, memory, read
from paceline.models.backend import KV_BYTES, Ops, WeightPart, head_elements
from paceline.models.config import ModelConfig
from paceline.models.threads import cores, num_threads, physical_cores
from paceline.tensors.placement import Placement

INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
"""Flags of a processor that kernels could use, as Linux spells them."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The native kernels.

    Attributes:
        problem: why they cannot run; None where they can.
        level: instruction-set level in use.
        levels: that this processor and this build have, best first.
        remedy: what to do to get them; None where they can run.
    """

    problem: str | None
    level: str | None = None
    levels: tuple[str, ...] = ()
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as this process sees it.

    Attributes:
        cores: that this process may use.
        physical_cores: of them, those that share nothing.
        cpu_quota: cores' worth of time that a container may use.
        threads: with which models compute.
        load: processes that wanted to run, on average over the last minute.
        memory_total, memory_available: bytes; a container's limit counts.
        governor: of the processor's frequency.
        huge_pages: transparent ones: ``always``, ``madvise`` or ``never``.
    """

    processor: str
    instructions: tuple[str, ...]
    cores: int
    physical_cores: int | None
    cpu_quota: float | None
    threads: int
    load: float | None
    memory_total: int | None
    memory_available: int | None
    governor: str | None
    huge_pages: str | None


def describe_kernels() -> Kernels:
    lacking = missing()
    if lacking is not None:
        return Kernels(lacking.reason, remedy=lacking.remedy)
    native = native_module()
    return Kernels(None, native.isa(), tuple(native.isas()))


def describe_machine(root: Path = Path("/")) -> Machine:
    """
    Args:
        root: folder in which ``proc`` and ``sys`` are.
    """
    flags = _flags(read(root / "proc/cpuinfo"))
    total, available = memory(root)
    return Machine(
        processor=processor(),
        instructions=tuple(name for name in INSTRUCTIONS if name in flags),
        cores=cores(),
        physical_cores=physical_cores(root / "sys/devices/system/cpu"),
        cpu_quota=cpu_quota(root),
        threads=num_threads(),
        load=load_average(root),
        memory_total=total,
        memory_available=available,
        governor=read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None,
        huge_pages=_chosen(read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    )


def _flags(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _chosen(text: str) -> str | None:
    """The word in brackets, as files of ``sys`` mark the setting that holds."""
    _, _, rest = text.partition("[")
    return rest.partition("]")[0] or None


READ_BYTES = 256 << 20
GEMM_ROWS, GEMM_WIDTH = 256, 2048
REPEATS = 5


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Two runs with equal keys take the same time, as far as software can tell.

    Attributes:
        machine: the processor's name and revision, its cores, and the instruction set in use.
        model: the checkpoint's name and a hash of its shape and flags, which fix the size of every
            tensor. The weights' values are not in it: no forward's time depends on them.
        dtype, kv_dtype: resolved precisions of arithmetic and KV.
        backend: of the ops, and whether it is the reproducible one.
        device: where it computes.
        threads: with which it computes.
        version: of Paceline and, for the reference ops, of torch, whose kernels these are.
        from_disk: the part of the weights that does not stay in memory; empty where all do.
    """

    machine: str
    model: str
    dtype: str
    kv_dtype: str
    backend: str
    device: str
    threads: int
    version: str
    from_disk: str = ""

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128(_canonical(asdict(self))).hexdigest()


def profile_key(
    name: str,
    config: ModelConfig,
    ops: Ops,
    dtype: str,
    kv_dtype: str,
    threads: int,
    placement: Placement | None = None,
) -> ProfileKey:
    """The key of a model that runs like this here."""
    shape = xxhash.xxh3_128(_canonical(asdict(config))).hexdigest()
    instructions = str(getattr(ops, "isa", ""))
    return ProfileKey(
        machine=f"{processor()}, {cores()} cores" + (f", {instructions}" if instructions else ""),
        model=f"{name} {shape}",
        dtype=dtype,
        kv_dtype=kv_dtype,
        backend=ops.name + (", deterministic" if ops.identity else ""),
        device=ops.device,
        threads=threads,
        version=_version(ops),
        from_disk=placement.from_disk if placement else "",
    )


def _version(ops: Ops) -> str:
    is_native = ops.name.startswith("native")
    return __version__ if is_native else f"{__version__}, torch {installed_version('torch')}"


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True).encode()


@cache
def processor() -> str:
    """The processor's name; with family, model and stepping where the system tells them.

    Clouds give generations of processors one name, so the name alone is not enough.
    """
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    name = facts.get("model name") or platform.machine()
    revision = [facts[part] for part in ("cpu family", "model", "stepping") if part in facts]
    return f"{name} ({'.'.join(revision)})" if revision else name


@dataclass(frozen=True, slots=True)
class Roofs:
    """The best of several runs: GB/s read, and GFLOP/s of a matrix product."""

    read_gb_per_s: float
    gflop_per_s: float


def measure_roofs(ops: Ops) -> Roofs:
    """Measure both roofs with the current number of threads; on the compute thread."""
    stored = np.ones((READ_BYTES // 4 // GEMM_WIDTH, GEMM_WIDTH), np.float32).view(np.uint8)
    part = WeightPart(len(stored), lambda first, last: stored[first:last], "F32")
    large = ops.pack_linear([part], GEMM_WIDTH, None)
    row = np.ones((1, GEMM_WIDTH), np.float32)
    read = _best_seconds(lambda: ops.linear(row, large))
    random = np.random.default_rng(0)
    part = WeightPart.of(random.standard_normal((GEMM_WIDTH, GEMM_WIDTH), np.float32))
    weights = ops.pack_linear([part], GEMM_WIDTH, None)
    rows = random.standard_normal((GEMM_ROWS, GEMM_WIDTH), np.float32)
    product = _best_seconds(lambda: ops.linear(rows, weights))
    operations = 2 * GEMM_ROWS * GEMM_WIDTH**2
    return Roofs(READ_BYTES / read / 1e9, operations / product / 1e9)


def _best_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(frozen=True, slots=True)
class Work:
    """How much a forward reads and computes.

    Attributes:
        weights: of all matrices that rows are multiplied with, the head's included.
        weight_bytes: as they lie in memory.
        kv_bytes: keys and values of one token in one layer, on average.
        attention_ops: operations per row and key, in one layer, on average.
        full_layers, sliding_layers: layers that see everything, and only the window.
        window: tokens that those see.
        expert_weights: of one expert's matrices, which count among ``weights``; 0: there are none.
        experts: of all layers together.
        experts_per_row: of them that a row is multiplied with.
    """

    weights: int
    weight_bytes: int
    kv_bytes: int
    attention_ops: int
    full_layers: int
    sliding_layers: int
    window: int
    expert_weights: int = 0
    experts: int = 0
    experts_per_row: int = 0

    @classmethod
    def of(cls, config: ModelConfig, dtype: str, kv_dtype: str, file_bytes: int = 0) -> Work:
        """The work of a model; dtypes are resolved ones, ``file_bytes`` is for ``file``."""
        c = config
        gathered = 0 if c.tie_embeddings else c.vocab_size * c.hidden_size
        if c.layer_inputs:
            gathered += c.layer_inputs.vocab_size * c.layer_inputs.total
        heads = [c.heads_of(index) for index in range(c.num_layers)]
        kv_elements = sum(each.kv_heads * head_elements(each.dim, kv_dtype) for each in heads)
        weights = c.num_weights - gathered
        sliding = sum(c.attention.is_sliding(index) for index in range(c.num_layers))
        mixtures = [each for index in range(c.num_layers) if (each := c.mlp.experts_of(index))]
        return cls(
            weights=weights,
            weight_bytes=(
                file_bytes if dtype == "file" else round(weights * WEIGHT_BITS[dtype] / 8)
            ),
            kv_bytes=c.kv_arrays * kv_elements * KV_BYTES[kv_dtype] // c.num_layers,
            attention_ops=4 * c.num_heads * sum(each.dim for each in heads) // c.num_layers,
            full_layers=c.num_layers - sliding,
            sliding_layers=sliding,
            window=c.attention.sliding_window,
            expert_weights=3 * c.hidden_size * mixtures[0].width if mixtures else 0,
            experts=sum(each.number for each in mixtures),
            experts_per_row=sum(each.per_token for each in mixtures),
        )

    @property
    def may_be_cached(self) -> bool:
        """Whether a cache may hold the weights, so that the roof of memory says nothing of them."""
        return self.weight_bytes < READ_BYTES

    @property
    def expert_bytes(self) -> float:
        """Of one expert's matrices, with as many bits per weight as the model has on average."""
        return self.weight_bytes * self.expert_weights / self.weights

    def bytes_read(self, width: int, context: int, experts: int = 0) -> int:
        """Weights, and the KV that one request's rows look at.

        Args:
            experts: that the rows chose, each counted once per layer.
        """
        tokens = context + width
        near = min(tokens, self.window + width)
        seen = self.full_layers * tokens + self.sliding_layers * near
        unread = (self.experts - experts) * self.expert_bytes
        return round(self.weight_bytes - unread) + self.kv_bytes * seen

    def operations(self, width: int, context: int) -> int:
        """Multiplications and additions, all rows sampled."""
        lengths = range(context + 1, context + width + 1)
        full = self.full_layers * sum(lengths)
        near = self.sliding_layers * sum(min(length, self.window) for length in lengths)
        idle = (self.experts - self.experts_per_row) * self.expert_weights
        return 2 * (self.weights - idle) * width + self.attention_ops * (full + near)
