"""docs/cli.md is what the help says."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.reference import reference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def test_the_page_is_the_help() -> None:
    command = "python -m paceline.cli.reference > docs/cli.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), f"outdated; run {command}"
