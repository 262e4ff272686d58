"""How much memory this machine lets a process have, as far as Linux tells. Imports nothing slow."""

from __future__ import annotations

from pathlib import Path


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
    limit, used = _group(root / "sys/fs/cgroup")
    if limit.isdecimal() and used.isdecimal() and total is not None:
        total = min(total, int(limit))
        available = min(available or total, max(0, int(limit) - int(used)))
    return total, available


def _group(folder: Path) -> tuple[str, str]:
    """The limit of the control group and what it uses, in either version; empty where unknown."""
    limit, used = (read(folder / f"memory.{name}") for name in ("max", "current"))
    if limit:
        return limit, used
    names = ("limit_in_bytes", "usage_in_bytes")
    limit, used = (read(folder / "memory" / f"memory.{name}") for name in names)
    return limit, used


def read(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
