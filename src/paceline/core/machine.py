"""What this machine lets a process use, as far as Linux tells: cores, memory, and its load.

Limits of the control groups that hold the process count, in either version:
https://docs.kernel.org/admin-guide/cgroup-v2.html and ``cgroup-v1/`` beside it name the files.
``root`` is the folder in which ``proc`` and ``sys`` are. Imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_FOLDER = "sys/fs/cgroup"


def groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Folders of the process's group and of those that it is in, each with its version.

    In a container its own group is the root, whatever the kernel calls it: that comes always.
    ``controller`` is ``cpu`` or ``memory``.
    """
    own = {"": "/", controller: "/"}
    place = root / _FOLDER / controller
    for line in read(root / "proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        own |= dict.fromkeys(names.split(","), path)
        if controller in names.split(",") and not place.is_dir():
            place = root / _FOLDER / names  # without the link that most systems have
    for folder, path, version in ((root / _FOLDER, own[""], 2), (place, own[controller], 1)):
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            yield folder / group, version


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the process may use; None without a limit."""
    found = []
    for group, version in groups("cpu", root):
        if version == 2:
            parts = read(group / "cpu.max").split()
        else:
            parts = [read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        # "max" and -1 are no limit.
        if len(parts) == 2 and all(map(str.isdecimal, parts)) and int(parts[1]):
            found.append(int(parts[0]) / int(parts[1]))
    return min(found, default=None)


def read(path: Path) -> str:
    """The text of a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Bytes in all and those available, within the limit of the control group."""
    facts: dict[str, int] = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[0] if value.split() else ""
        if number.isdecimal():
            facts[name] = int(number) * 1024
    total, available = facts.get("MemTotal"), facts.get("MemAvailable")
    for limit, used in _limits(root):
        if total is not None:
            total = min(total, limit)
            available = min(available or total, max(0, limit - used))
    return total, available


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limits and use of the process's control group and of those that it is in.

    What keeps parts of files that were not used lately can be had, so it is not counted as used.
    """
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}
    for group, version in groups("memory", root):
        *files, prefix = names[version]
        limit, used = (read(group / f"memory.{name}") for name in files)
        words = read(group / "memory.stat").split()
        facts = dict(zip(words[::2], words[1::2], strict=False))
        idle = facts.get(f"{prefix}inactive_file", "0")
        if all(map(str.isdecimal, (limit, used, idle))):
            yield int(limit), max(0, int(used) - int(idle))


BUSY_SHARE = 0.5
"""Load per core from which on the machine counts as busy."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much there was to compute.

    Attributes:
        average: processes that wanted to run, on average over the last minute.
        cores: that this process may use.
    """

    average: float
    cores: int

    @property
    def is_busy(self) -> bool:
        return self.average > BUSY_SHARE * self.cores

    def __str__(self) -> str:
        return f"load {self.average:.1f} on {self.cores} cores"


def current_load(cores: int, root: Path = Path("/")) -> Load | None:
    """None where the system does not say."""
    average = load_average(root)
    return None if average is None else Load(average, cores)


def load_average(root: Path = Path("/")) -> float | None:
    """Processes that wanted to run, on average over the last minute; None where not told."""
    try:
        return float(read(root / "proc/loadavg").split()[0])
    except (IndexError, ValueError):
        return None
