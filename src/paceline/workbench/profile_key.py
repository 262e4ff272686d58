"""What a profile is of: the machine, the model, and how the one runs the other."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import xxhash

from paceline import __version__
from paceline.models.config import ModelConfig
from paceline.models.ops.base import Ops


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Two runs with equal keys take the same time, as far as software can tell.

    Attributes:
        machine: the processor's name and revision, its cores, and the instruction set in use.
        model: the checkpoint's name and a hash of its shape and flags, which fix the size of every
            tensor. The weights' values are not in it: no forward's time depends on them.
        dtype, kv_dtype: resolved precisions of arithmetic and KV.
        backend: of the ops, and whether it is the reproducible one.
        device: torch device string.
        threads: torch threads.
        version: of Paceline and torch, whose kernels these are.
    """

    machine: str
    model: str
    dtype: str
    kv_dtype: str
    backend: str
    device: str
    threads: int
    version: str

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128(_canonical(asdict(self))).hexdigest()


def profile_key(
    name: str, config: ModelConfig, ops: Ops, dtype: str, kv_dtype: str, threads: int
) -> ProfileKey:
    """The key of a model that runs like this here.

    Args:
        name: the checkpoint's.
        dtype, kv_dtype: resolved ones.
    """
    shape = xxhash.xxh3_128(_canonical(asdict(config))).hexdigest()
    instructions = str(getattr(ops, "isa", ""))
    return ProfileKey(
        machine=f"{processor()}, {cores()} cores" + (f", {instructions}" if instructions else ""),
        model=f"{name} {shape}",
        dtype=dtype,
        kv_dtype=kv_dtype,
        backend=ops.name + (", deterministic" if ops.identity else ""),
        device=str(ops.device),
        threads=threads,
        version=f"{__version__}, torch {torch.__version__}",
    )


def _canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True).encode()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
