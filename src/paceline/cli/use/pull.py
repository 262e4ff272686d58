"""``paceline pull`` and ``paceline models``: real models by short names. Owns the view.

Imports nothing slow: neither needs torch.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass

from paceline.build.default_drafts import default_speculative_config
from paceline.cli.options.options import argument, option
from paceline.cli.terminal.display import Screen, printable, table
from paceline.core.errors import ConfigError
from paceline.core.folders import PACKED, cache_folder
from paceline.disk.packed_room import packed_copies
from paceline.loading.catalogue import (
    CatalogueEntry,
    all_models,
    catalogue,
    find_model,
    similar_names,
    users_catalogue,
)
from paceline.loading.fetching import Download, fetch, is_intact, pip_download


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PullOptions:
    """Options of ``paceline pull``."""

    name: str = argument(..., "Name of a model, as paceline models lists it.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelsOptions:
    """Options of ``paceline models``."""

    remove_packed: bool = option(
        False,
        "Delete packed copies of models that are read from disk. They are packed again when "
        "needed.",
    )
    json: bool = option(False, "Print one line of JSON instead.")


def pull_command(options: PullOptions, download: Download = pip_download) -> int:
    """The work of ``paceline pull``."""
    entry, screen = _entry(options.name), Screen()
    if is_intact(entry):
        screen.note(f"{entry.name} is here already")
    else:
        if entry.is_here:
            screen.note(f"{entry.name} is damaged")
        screen.note(f"fetching {printable(str(entry))}")
        fetch(entry, download)
    screen.say(str(entry.place))
    screen.note(f"next: paceline run {entry.name}")
    return 0


def _entry(name: str) -> CatalogueEntry:
    entry = find_model(name)
    if entry is None:
        near = "".join(f" (did you mean {each}?)" for each in similar_names(name))
        raise ConfigError(
            f"there is no model named {name}{near}; there are {', '.join(catalogue())}, and "
            f"{users_catalogue()} may name others"
        )
    if entry.path and not entry.is_here:
        raise ConfigError(
            f"{users_catalogue()} says that {name} is {entry.path}, which does not exist"
        )
    return entry


def models_command(options: ModelsOptions) -> int:
    """The work of ``paceline models``."""
    entries, screen = all_models(), Screen(json=options.json)
    cache = cache_folder(PACKED)
    if options.remove_packed:
        for place in packed_copies(cache):
            shutil.rmtree(place, ignore_errors=True)
    packed = packed_copies(cache)
    if options.json:
        rows = [
            {**asdict(e), "place": str(e.place), "is_here": e.is_here, "methods": _drafters(e)}
            for e in entries
        ]
        copies = {str(place): size for place, size in packed.items()}
        told = {"models": rows, "users_catalogue": str(users_catalogue()), "packed": copies}
        screen.document(told)
        return 0
    screen.say(printable(table([_row(entry) for entry in entries], num_texts=3)))
    screen.note(f"paceline pull NAME fetches one; {users_catalogue()} may name more")
    if packed:
        screen.note(
            f"{sum(packed.values()) / 1e9:.2f} GB in {cache} are models packed to "
            "be read from disk; --remove-packed deletes them"
        )
    return 0


def _drafters(entry: CatalogueEntry) -> list[str]:
    """The methods that draft for it where nothing else is asked for."""
    return list(dict.fromkeys(config.method for config in default_speculative_config(entry.name)))


def _row(entry: CatalogueEntry) -> dict[str, str]:
    return {
        "name": entry.name,
        "model": entry.title,
        "licence": f"{entry.licence} ({entry.terms})" if entry.terms else entry.licence,
        "size": f"{entry.size / 1e6:.0f} MB" if entry.size else "",
        "here": "yes" if entry.is_here else "no",
        "drafts": ", ".join(_drafters(entry)),
    }
