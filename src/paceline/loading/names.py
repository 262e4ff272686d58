"""What a name stands for: a model of the catalogue, or one that another program has downloaded."""

from __future__ import annotations

from paceline.loading.catalogue import CatalogueEntry, catalogue, find_entry
from paceline.loading.downloaded import downloaded_models, find_downloaded


def find_model(name: str) -> CatalogueEntry | None:
    """The catalogue's entry comes first; None for what is no name.

    Raises:
        ConfigError: the user's file of names is malformed.
        ModelLoadError: another program's model cannot be used, or is not there.
    """
    return find_entry(name) or find_downloaded(name)


def all_models() -> list[CatalogueEntry]:
    """All that have a name; ``ConfigError`` where the user's file of names is malformed."""
    return [*catalogue().values(), *downloaded_models()]
