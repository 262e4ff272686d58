"""How much memory this machine lets a process have, as far as Linux tells. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


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
    for limit, used in _groups(root):
        if limit.isdecimal() and used.isdecimal() and total is not None:
            total = min(total, int(limit))
            available = min(available or total, max(0, int(limit) - int(used)))
    return total, available


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Limits and use of the process's control group and of those that it is in, in either version.

    In a container its own group is the root, whatever the kernel calls it: that comes always.
    """
    folder, own = root / "sys/fs/cgroup", {"": "/", "memory": "/"}
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        own |= dict.fromkeys(controllers.split(","), path)
    for place, names, path in (
        (folder, ("memory.max", "memory.current"), own[""]),
        (folder / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), own["memory"]),
    ):
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            limit, used = (read(place / group / name) for name in names)
            yield limit, used


def read(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
