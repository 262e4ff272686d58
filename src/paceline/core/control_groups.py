"""Limits of the control groups that hold this process, in either version. Imports nothing slow.

https://docs.kernel.org/admin-guide/cgroup-v2.html and ``cgroup-v1/`` beside it name the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FOLDER = "sys/fs/cgroup"


def groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Folders of the process's group and of those that it is in, each with its version.

    In a container its own group is the root, whatever the kernel calls it: that comes always.

    Args:
        controller: whose files are wanted: ``cpu`` or ``memory``.
        root: folder in which ``proc`` and ``sys`` are.
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
    """Cores' worth of time that the process may use; None without a limit.

    Args:
        root: folder in which ``proc`` and ``sys`` are.
    """
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
