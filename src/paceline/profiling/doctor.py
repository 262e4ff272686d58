"""What would make decoding faster here: a machine, a model and their parts, looked at together.

Owns the order of advice, the greatest gain first. Knows no terminal.
"""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline import __version__
from paceline.backends.resolve import resolve_ops
from paceline.build.build import expert_cost, resolve_config, target_info
from paceline.build.default_drafts import FoundDraft, found_drafts
from paceline.build.weight_memory import placement_for
from paceline.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.folders import UserFolder, places
from paceline.core.machine import Load
from paceline.disk.packed_cache import find_packed, packed_place
from paceline.engine.threads import COMPUTE
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.backend import Ops
from paceline.models.threads import set_num_threads, within_quota
from paceline.profiling.machine import (
    Kernels,
    Machine,
    Roofs,
    Work,
    describe_kernels,
    describe_machine,
    installed_version,
    measure_roofs,
)
from paceline.profiling.profile_store import stored_table
from paceline.proposers import check_fit
from paceline.tensors.arrays import Arena
from paceline.tensors.placement import Placement

DOT_PRODUCTS = frozenset(("avx_vnni", "avx512_vnni", "asimddp"))
PARTS = (
    ("torch", ("torch",), "the reference ops, GPUs, and training"),
    ("server", ("fastapi", "uvicorn", "prometheus_client"), "paceline serve and run-batch"),
    ("grammar", ("llguidance",), "structured output: JSON schemas, regular expressions, choices"),
    ("hub", ("huggingface_hub",), "models by their name on the hub"),
    ("gguf", ("gguf",), "GGUF files"),
    ("bench", ("aiohttp",), "paceline bench serve"),
    ("events", ("msgspec", "pyzmq"), "KV cache events for routers"),
    ("ray", ("ray", "pyarrow"), "replicas on Ray: serve and run-batch"),
    ("plot", ("matplotlib",), "plots of profiles, tunings and explanations"),
)
"""Extra, the distributions that it needs at least, and what it gives."""


@dataclass(frozen=True, slots=True)
class OptionalPart:
    """An optional part; ``versions`` is empty unless all of it is installed."""

    extra: str
    gives: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """A draft that a model brings; ``problem`` says why it is not used.

    Attributes:
        place: its file or folder; empty for a layer of the model's own.
        method: that drafts with it; empty where it cannot be told.
    """

    place: str
    method: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """How a model would run here; ``problem`` says why it would not.

    Attributes:
        name: as it was given.
        weight_bytes: that every step reads.
        best_plain_rate: tokens per second of plain decoding at which reading the weights alone
            takes all of the time; None where a cache may hold them.
        can_be_int4: loading it with half the bits is possible.
        packs_into: the folder that the first run would pack the weights into, so that they can be
            read from disk, until when the following is expected by the model's shape; empty where
            they fit, or are packed.
        layers: of the model; ``streamed_layers`` of them would be. ``streamed_bytes`` come from
            disk in a step of one row, at ``disk_gb_per_s``; ``resident_bytes`` stay, with the room
            for what is read.
        experts: that would come from disk where they are not in memory, as ``kept_experts`` are.
        drafts: that were found beside the model and in it.
    """

    name: str
    problem: str | None = None
    dtype: str = ""
    backend: str = ""
    promises_identity: bool = False
    weight_bytes: int = 0
    best_plain_rate: float | None = None
    can_be_int4: bool = False
    has_profile: bool = False
    packs_into: str = ""
    layers: int = 0
    streamed_layers: int = 0
    streamed_bytes: int = 0
    resident_bytes: int = 0
    experts: int = 0
    kept_experts: int = 0
    disk_gb_per_s: float | None = None
    drafts: tuple[DraftFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    machine: Machine
    kernels: Kernels
    roofs: Roofs
    model: ModelFacts
    parts: tuple[OptionalPart, ...]
    versions: dict[str, str]
    advice: tuple[str, ...] = ()
    places: tuple[UserFolder, ...] = ()


def diagnose(model: str, config: EngineConfig) -> Diagnosis:
    """Look at everything; takes a few seconds, most of it to measure the roofs."""

    def looked_at() -> Diagnosis:
        if config.num_threads is not None:
            set_num_threads(config.num_threads)
        kernels = describe_kernels()
        dtype = "float32" if kernels.problem or config.backend == "reference" else "int8"
        roofs = measure_roofs(resolve_ops(dtype, config.device, None, config.backend))
        machine, facts = describe_machine(), model_facts(model, config, roofs)
        advice = tuple(advise(machine, kernels, facts, config.num_threads))
        parts = installed_parts()
        return Diagnosis(machine, kernels, roofs, facts, parts, versions, advice, places())

    versions = {"paceline": __version__, "python": platform.python_version()}
    return COMPUTE.call(looked_at)


def model_facts(name: str, config: EngineConfig, roofs: Roofs) -> ModelFacts:
    """Open a model without reading its weights."""
    try:
        found = found_drafts(name)
        checkpoint = load_checkpoint(name, with_tokenizer=bool(found))
        config, ops = resolve_config(config, checkpoint)
        placement = placement_for(checkpoint, config, ops)
    except Exception as error:  # whatever is wrong with it, the machine can be looked at
        return ModelFacts(name, problem=str(error))
    shape = checkpoint.config
    work = Work.of(shape, config.dtype, config.kv_cache_dtype, checkpoint.num_bytes)
    most = roofs.read_gb_per_s * 1e9 / work.weight_bytes
    table = stored_table(
        checkpoint.name, shape, ops, config.dtype, config.kv_cache_dtype, placement
    )
    return ModelFacts(
        name,
        dtype=config.dtype,
        backend=ops.name,
        promises_identity=ops.identity,
        weight_bytes=work.weight_bytes,
        best_plain_rate=None if work.may_be_cached else most,
        can_be_int4=config.dtype == "int8" and ops.identity and checkpoint.packed is None,
        has_profile=table is not None,
        layers=shape.num_layers,
        drafts=draft_facts(found, checkpoint, config),
        **_from_disk(checkpoint, config, ops, placement),
    )


def model_drafts(name: str, found: list[FoundDraft]) -> tuple[DraftFacts, ...]:
    """:func:`draft_facts` of a model by its name; of one that cannot run here none."""
    try:
        checkpoint = load_checkpoint(name)
        config, _ = resolve_config(EngineConfig(), checkpoint)
    except PacelineError:
        return ()
    return draft_facts(found, checkpoint, config)


def draft_facts(
    found: list[FoundDraft], checkpoint: Checkpoint, config: EngineConfig
) -> tuple[DraftFacts, ...]:
    """Which of the drafts that lie beside a model were made for it.

    Args:
        checkpoint: the model, with its tokenizer.
        config: resolved for it.
    """
    target = target_info(checkpoint, config, 0)
    facts = []
    for draft in found:
        place, method, problem = str(draft.place), "", draft.problem
        if draft.config is not None:
            place, method = draft.config.model or "", draft.config.method
            try:
                check_fit(draft.config, target)
            except PacelineError as error:
                problem = str(error)
        facts.append(DraftFacts(place, method, problem))
    return tuple(facts)


def _from_disk(
    checkpoint: Checkpoint, config: EngineConfig, ops: Ops, placement: Placement | None
) -> dict[str, Any]:
    """What of a model would be read from disk, and how fast that is."""
    if placement is None:
        return {}
    is_packed = checkpoint.packed is not None or find_packed(checkpoint, config.dtype) is not None
    cost = expert_cost(checkpoint.config)
    rate = disk_rate(max(checkpoint.files, key=lambda path: path.stat().st_size))
    return {
        "packs_into": "" if is_packed else str(packed_place(checkpoint, config.dtype)),
        "streamed_layers": len(placement.streamed),
        "streamed_bytes": placement.bytes_of_row(cost.least if cost else 0),
        "resident_bytes": placement.resident_bytes,
        "experts": placement.experts,
        "kept_experts": placement.kept,
        "disk_gb_per_s": rate / 1e9,
    }


def disk_rate(path: Path, most: int = 512 << 20) -> float:
    """Bytes per second of reading a file from its beginning, past the cache where it can be."""
    try:
        return _read_rate(path, most, getattr(os, "O_DIRECT", 0))
    except OSError:  # some file systems refuse the flag, others the reads
        return _read_rate(path, most, 0)


def _read_rate(path: Path, most: int, flags: int) -> float:
    descriptor = os.open(path, os.O_RDONLY | flags)
    buffer = Arena().zeros(8 << 20, np.uint8)
    began, done = time.perf_counter(), 0
    try:
        while done < most and (count := os.preadv(descriptor, [buffer.data], done)):
            done += count
    finally:
        os.close(descriptor)
    return done / (time.perf_counter() - began)


def installed_parts() -> tuple[OptionalPart, ...]:
    return tuple(OptionalPart(extra, gives, _versions(names)) for extra, names, gives in PARTS)


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    versions = {name: version for name in names if (version := installed_version(name))}
    return versions if len(versions) == len(names) else {}


# --- advice ---------------------------------------------------------------------------------------


def advise(
    machine: Machine, kernels: Kernels, model: ModelFacts, threads: int | None
) -> Iterator[str]:
    """What would make it faster, in the order of how much."""
    yield from _kernel_advice(machine, kernels)
    yield from _memory_advice(machine, model)
    yield from _thread_advice(machine, threads)
    if model.problem is None and not model.has_profile:
        command = shlex.join(["paceline", "profile", model.name])
        yield (
            "measure what steps cost, so that drafts are chosen well from the first token: "
            + command
        )
    yield from _setting_advice(machine)
    if model.can_be_int4 and model.best_plain_rate is not None:
        yield (
            "--dtype int4 reads about half the bytes per step; paceline verify MODEL --quality "
            "measures what that costs in accuracy"
        )


def _kernel_advice(machine: Machine, kernels: Kernels) -> Iterator[str]:
    if kernels.problem is not None:
        yield (
            "the native kernels, which are several times faster, are not in use: to get them "
            f"{kernels.remedy} ({kernels.problem})"
        )
    elif kernels.levels and kernels.level != kernels.levels[0]:
        yield (
            f"the kernels run at level {kernels.level}, as PACELINE_CPU_ISA says; this processor "
            f"has {kernels.levels[0]}: unset the variable"
        )
    elif kernels.levels and (unbuilt := _unbuilt_level(machine, kernels)):
        yield (
            f"the kernels were built for another processor, without level {unbuilt}, which this "
            "one has: build them again, in a checkout by make native"
        )
    elif not DOT_PRODUCTS & set(machine.instructions):
        yield (
            "this processor has no 8-bit dot products (AVX-VNNI, AVX-512 VNNI or Arm's dot "
            "product): a processor with them computes wide steps about twice as fast"
        )


def _unbuilt_level(machine: Machine, kernels: Kernels) -> str | None:
    """The best level that the processor promises and the build lacks."""
    levels = {"avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni", "avx2": "avx2"}
    promised = next((levels[flag] for flag in levels if flag in machine.instructions), None)
    return None if promised in kernels.levels else promised


def _memory_advice(machine: Machine, model: ModelFacts) -> Iterator[str]:
    available = machine.memory_available
    if available is not None and model.weight_bytes > available:
        yield (
            f"the weights take {model.weight_bytes / 1e9:.1f} GB and {available / 1e9:.1f} GB of "
            "memory are available, so every step reads from disk: --dtype int4, a smaller model, "
            "or fewer other programs"
        )


def _thread_advice(machine: Machine, threads: int | None) -> Iterator[str]:
    quota = machine.cpu_quota
    usable = within_quota(machine.physical_cores or machine.cores, quota)
    if quota is not None and machine.threads > max(quota, usable):
        yield (
            f"{machine.threads} threads share {quota:g} cores' worth of time and are stopped when "
            f"it is used up: --threads {usable}, or a higher limit of the container"
        )
    elif machine.threads < usable:
        cause = f"--threads {threads}" if threads is not None else "OMP_NUM_THREADS or the system"
        yield (
            f"{machine.threads} of {usable} cores compute, because of {cause}: --threads {usable}"
        )
    elif machine.threads > usable:
        yield (
            f"{machine.threads} threads share {usable} cores and wait for each other: "
            f"--threads {usable}"
        )
    load = None if machine.load is None else Load(machine.load, machine.cores)
    if load is not None and load.is_busy:
        yield (
            f"other programs compute ({load}): steps wait for them, and figures measured here say "
            "little"
        )


def _setting_advice(machine: Machine) -> Iterator[str]:
    if machine.governor in ("powersave", "conservative", "ondemand", "userspace"):
        yield (
            f"the frequency governor is {machine.governor}: with performance, steps do not wait "
            "for the processor to speed up (cpupower frequency-set -g performance)"
        )
    if machine.huge_pages == "never":
        yield (
            "transparent huge pages are off: with madvise, weights are read through fewer address "
            "translations (/sys/kernel/mm/transparent_hugepage/enabled)"
        )
