"""How much memory this machine lets a process have, as far as Linux tells. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.core.control_groups import groups, read


def memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Bytes in all and those available, within the limit of the control group.

    Args:
        root: folder in which ``proc`` and ``sys`` are.
    """
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
