"""``paceline rm``: delete models that Paceline fetched, and what it packed of any.

Owns who has to delete what else: models belong to the program that downloaded them. Imports nothing
slow.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from paceline.build.default_drafts import is_embedded
from paceline.cli.options.options import argument, option
from paceline.cli.terminal.display import Screen, printable
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.folders import PACKED, cache_folder
from paceline.core.reading import checked_path
from paceline.disk.packed_room import copies_of, packed_copies, remove_copy
from paceline.loading.catalogue import (
    LM_STUDIO,
    OLLAMA,
    CatalogueEntry,
    catalogue,
    find_model,
    users_catalogue,
)
from paceline.loading.fetching import is_hub_id


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RemoveOptions:
    """Options of ``paceline rm``."""

    name: list[str] = argument(..., "Names that paceline models lists, of models or packed copies.")
    yes: bool = option(False, "Delete without asking.", "-y")


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes of a model.

    Attributes:
        paths: files that were fetched, and folders of packed copies.
        remark: how its owner deletes the rest; empty where nothing is left.
    """

    paths: tuple[Path, ...]
    remark: str = ""


def remove_command(options: RemoveOptions) -> int:
    """The work of ``paceline rm``: all names are looked at before anything is deleted."""
    screen, removals = Screen(), [removal_of(name) for name in options.name]
    paths = list(dict.fromkeys(path for each in removals for path in each.paths))
    if not options.yes and not _confirmed(paths):
        screen.note("nothing was deleted")
        return 1
    for path in paths:
        _remove(path)
        screen.say(printable(f"deleted {path}"))
    for each in removals:
        if each.remark:
            screen.note(printable(each.remark))
    return 0


def removal_of(name: str) -> Removal:
    """What Paceline may delete of a model.

    Raises:
        ConfigError: nothing, since it is not here, or another's; the message says whose.
        ModelLoadError: another program's model cannot be read.
    """
    path, is_there = checked_path(name, ModelLoadError)
    if is_there:
        place, remark = path, f"{name} is a file or folder of yours: {_shell('rm -r', path)}"
        is_ours = _is_ours(path)
    else:
        entry = _entry(name)
        place, remark, is_ours = entry.place, _owner(entry), bool(entry.packages)
        if is_ours and not entry.is_here:
            raise ConfigError(f"{name} is not here: `paceline pull {name}` has not fetched it")
    own = (place,) if is_ours else ()
    paths = (*own, *copies_of(place, cache_folder(PACKED)))
    if not paths:
        raise ConfigError(remark)
    return Removal(paths, "" if is_ours else remark)


def _is_ours(path: Path) -> bool:
    """Whether it is a fetched model or a packed copy, named by its path."""
    fetched = {entry.place.resolve() for entry in catalogue().values() if entry.packages}
    copies = {copy.resolve() for copy in packed_copies(cache_folder(PACKED))}
    return path.resolve() in fetched | copies


def _entry(name: str) -> CatalogueEntry:
    if (entry := find_model(name)) is not None:
        return entry
    if is_hub_id(name):
        repository = name.removeprefix("hf.co/").partition(":")[0]
        command = _shell("hf cache rm", f"model/{repository}")
        raise ConfigError(f"the hub's own program deletes what it has of {name}: {command}")
    raise ConfigError(f"there is no model named {name}; `paceline models` lists those that are")


def _owner(entry: CatalogueEntry) -> str:
    """Who deletes a model that was not fetched, and how."""
    if entry.name.startswith(OLLAMA):
        return f"{entry.name} is Ollama's: {_shell('ollama rm', entry.name.removeprefix(OLLAMA))}"
    if entry.name.startswith(LM_STUDIO):  # whose own program, lms 0.0.47, deletes none
        return (
            f"{entry.name} is LM Studio's, which deletes it from its list of models; without "
            f"its window: {_shell('rm', entry.place)}"
        )
    if is_embedded(entry.name):
        return f"{entry.name} comes with Paceline, and goes with it"
    return (
        f"{entry.name} is {entry.place}, as {users_catalogue()} says: delete its entry there, and "
        f"if you like the model: {_shell('rm -r', entry.place)}"
    )


def _shell(command: str, *words: object) -> str:
    return f"{command} {shlex.join(map(str, words))}"


def _confirmed(paths: list[Path]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"this would delete {', '.join(map(str, paths))}; there is no terminal to "
            "ask on, so confirm with --yes"
        )
    for path in paths:
        typer.echo(printable(str(path)), err=True)
    return typer.confirm("Delete this?", err=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not remove_copy(path):
        raise ConfigError(f"{path} is in use: end the process that runs the model, and try again")
    path.unlink(missing_ok=True)
