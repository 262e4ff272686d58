"""Where the models that come with Paceline lie. Imports nothing slow."""

from __future__ import annotations

from importlib.resources import files

EMBEDDED = "embedded"
"""The target's name in the catalogue."""


def embedded_model(name: str) -> str:
    """Folder of an embedded model: ``target`` or ``draft``."""
    return str(files("paceline") / "embedded" / name)


def embedded_ngram_model() -> str:
    """The file of the n-gram model that drafts for the embedded target."""
    return str(files("paceline") / "embedded" / "ngram" / "model.ngram")
