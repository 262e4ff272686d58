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
        if total is not None:
            total = min(total, limit)
            available = min(available or total, max(0, limit - used))
    return total, available


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limits and use of the process's control group and of those that it is in, in either version.

    What keeps parts of files that were not used lately can be had, so it is not counted as used. In
    a container its own group is the root, whatever the kernel calls it: that comes always.
    """
    folder, own = root / "sys/fs/cgroup", {"": "/", "memory": "/"}
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        own |= dict.fromkeys(controllers.split(","), path)
    one, two = ("limit_in_bytes", "usage_in_bytes", "total_"), ("max", "current", "")
    for place, names, path in ((folder, two, own[""]), (folder / "memory", one, own["memory"])):
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            limit, used = (read(place / group / f"memory.{name}") for name in names[:2])
            words = read(place / group / "memory.stat").split()
            facts = dict(zip(words[::2], words[1::2], strict=False))
            idle = facts.get(f"{names[2]}inactive_file", "0")
            if all(map(str.isdecimal, (limit, used, idle))):
                yield int(limit), max(0, int(used) - int(idle))


def read(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
