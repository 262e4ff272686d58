"""What a machine has that decides how fast it decodes. Measures nothing and advises nothing.

Facts are read where Linux tells them and are None where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.backends.native.native import missing, native_module
from paceline.core.control_groups import cpu_quota, read
from paceline.core.load import load_average
from paceline.core.memory import memory
from paceline.models.threads import cores, num_threads, physical_cores
from paceline.profiling.profile_machine import processor

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
    found = missing()
    if found is not None:
        return Kernels(found.reason, remedy=found.remedy)
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
