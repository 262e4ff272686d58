"""Fixtures that this folder shares with others."""

from __future__ import annotations

from tests.ops_fixtures import one_thread, ops_of

__all__ = ["one_thread", "ops_of"]
