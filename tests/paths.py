"""Paths that no file system takes, or that lead nowhere."""

from __future__ import annotations

from pathlib import Path


def impossible_paths(folder: Path) -> dict[str, str]:
    """By what is wrong with them; ``folder`` gets what they lead through."""
    file, circle = folder / "a file", folder / "a circle"
    file.write_text("x")
    circle.unlink(missing_ok=True)
    circle.symlink_to(circle)
    return {
        "a long name": str(folder / ("a" * 300)),
        "a long path": "/" + "/".join(["a" * 200] * 30),
        "through a file": str(file / "inside"),
        "a circle": str(circle),
        "no such user": "~no-such-user-here/folder",
        "a zero byte": str(folder / "a\0b"),
    }
