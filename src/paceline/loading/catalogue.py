"""Names of models: the catalogue's, the user's own, and those that Ollama and LM Studio downloaded.

The user's file is ``models.toml`` in :func:`~paceline.core.folders.config_folder`; its entries
replace ours of the same name. ``ollama:NAME:TAG`` is what ``ollama list`` calls NAME:TAG,
``lmstudio:PUBLISHER/REPOSITORY:Q4_K_M`` a GGUF file of LM Studio's. Nothing outside these programs'
folders is opened, whatever a manifest or a link says.

Owns the format of the two files, where a fetched model lies, and where other programs keep theirs.
Fetches nothing, and imports nothing slow.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from paceline.core.checks import did_you_mean
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.files import parsed_json, read_json_list, read_text
from paceline.core.folders import cache_folder, config_folder
from paceline.loading.gguf.choice import files_of, tagged_files
from paceline.request import sampling_params
from paceline.request.sampling_params import NEUTRAL, usable_sampling

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


def similar_name(name: str) -> str:
    """The name of the catalogue that a person may have meant, as the end of a sentence."""
    name = name.lower()
    return did_you_mean(name, catalogue()) if _NAME.fullmatch(name) else ""


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


EMBEDDED = "embedded"
"""The target's name in the catalogue."""


def embedded_model(name: str) -> str:
    """Folder of an embedded model: ``target`` or ``draft``."""
    return str(files("paceline") / "embedded" / name)


def embedded_ngram_model() -> str:
    """The file of the n-gram model that drafts for the embedded target."""
    return str(files("paceline") / "embedded" / "ngram" / "model.ngram")


log = logging.getLogger(__name__)
OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
_PART = re.compile(r"[A-Za-z0-9][\w.-]*")
_DOWNLOADED_NAME = re.compile(rf"(?:{_PART.pattern}/){{0,3}}{_PART.pattern}(?::{_PART.pattern})?")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL_LAYER = "application/vnd.ollama.image.model"
_PARAMETERS_LAYER = "application/vnd.ollama.image.params"
_SYSTEM_LAYER = "application/vnd.ollama.image.system"
_MESSAGES_LAYER = "application/vnd.ollama.image.messages"
_ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
_HOST, _OWNER, _LATEST = "registry.ollama.ai", "library", "latest"
_SERVICE = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama's installer for Linux lets its service keep them."""
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_ENTRIES = 4096  # of one folder, and of a level of folders


def downloaded_models() -> list[CatalogueEntry]:
    """Those that can be opened, by their full names; the log tells of the others."""
    found = []
    for name in (*_ollama_manifests(), *_lm_studio_files()):
        try:
            entry = find_downloaded(name)
        except ModelLoadError as error:
            log.warning("%s is not listed: %s", name, error)
        else:
            found += [entry] if entry is not None else []
    return found


def find_downloaded(name: str) -> CatalogueEntry | None:
    """The model of a full name, or of a name without ``ollama:`` or ``lmstudio:``.

    None for a name without these that neither program has.

    Raises:
        ModelLoadError: a program has no model of the full name, or its files cannot be used; or
            both programs have one of a short name.
    """
    if name.startswith(OLLAMA):
        return _ollama_entry(name)
    if name.startswith(LM_STUDIO):
        return _lm_studio_entry(name)
    if not _DOWNLOADED_NAME.fullmatch(name):
        return None
    inside = [OLLAMA + name] if _ollama_name(name) in _ollama_manifests() else []
    repository, _, tag = name.partition(":")
    kept = [name for folder in _repositories(repository) for name in _gguf_names(folder)]
    if any(tag.upper() in own for own, _ in tagged_files(kept)):
        inside.append(LM_STUDIO + name)
    if len(inside) > 1:
        raise ModelLoadError(f"{name} may be {' or '.join(inside)}: give the full name")
    return find_downloaded(inside[0]) if inside else None


# Ollama


def _ollama_folders() -> list[Path]:
    configured = os.environ.get("OLLAMA_MODELS", "")
    if configured:
        return [Path(configured)]
    return [Path.home() / ".ollama" / "models", _SERVICE]


def _ollama_manifests() -> dict[str, tuple[Path, Path]]:
    """Full names -> the folder of all models, and the manifest in it."""
    found: dict[str, tuple[Path, Path]] = {}
    for folder in _ollama_folders():
        level = [folder / "manifests"]
        for _ in ("host", "owner", "model", "tag"):
            below = (path for each in level for path in _inside(each))
            level = list(islice(below, _MAX_ENTRIES))
        for manifest in level:
            found.setdefault(_full_name(manifest.parts[-4:]), (folder, manifest))
    return found


def _full_name(parts: tuple[str, ...]) -> str:
    """As ``ollama list`` has it, which leaves out its own host and its own models' owner."""
    host, owner, model, tag = parts
    before = [] if host == _HOST else [host]
    before += [] if (host, owner) == (_HOST, _OWNER) else [owner]
    return f"{OLLAMA}{'/'.join([*before, model])}:{tag}"


def _ollama_name(name: str) -> str:
    return f"{OLLAMA}{name if ':' in name else f'{name}:{_LATEST}'}"


def _ollama_entry(name: str) -> CatalogueEntry:
    there = _ollama_manifests()
    place = there.get(_ollama_name(name.removeprefix(OLLAMA)))
    if place is None:
        raise _unknown(name, "Ollama", _ollama_folders(), there)
    folder, manifest = place
    if not _is_below(manifest, folder / "manifests"):
        raise ModelLoadError(f"{manifest} leads out of Ollama's folder, and is not read")
    layers = _layers(manifest)
    blob = _blob(manifest, folder / "blobs", _model_layer(manifest, layers))
    said = {
        str(layer["mediaType"]): _blob(manifest, folder / "blobs", layer)
        for layer in layers
        if layer.get("mediaType") in (_PARAMETERS_LAYER, _SYSTEM_LAYER, _MESSAGES_LAYER)
    }
    return CatalogueEntry(
        name,
        title="downloaded by Ollama",
        size=blob.stat().st_size,
        path=str(blob),
        sampling=_sampling(said.get(_PARAMETERS_LAYER)),
        chat_opening=(*_system(said.get(_SYSTEM_LAYER)), *_messages(said.get(_MESSAGES_LAYER))),
    )


def _blob(manifest: Path, blobs: Path, layer: Mapping[str, Any]) -> Path:
    """The file of a layer, which is there as a whole."""
    match = _DIGEST.fullmatch(str(layer.get("digest")))
    if match is None:
        raise ModelLoadError(f"{manifest} names a layer without a SHA-256: it is damaged")
    both = (blobs / f"sha256-{match[1]}", blobs / f"sha256:{match[1]}")  # the latter is older
    blob = next((path for path in both if path.is_file()), None)
    if blob is None or not _is_below(blob, blobs):
        raise ModelLoadError(f"{both[0]}, which {manifest} names, is not there: ollama pull again")
    size = blob.stat().st_size
    if size != layer.get("size", size):
        raise ModelLoadError(f"{blob} has {size} bytes, not {layer['size']}: ollama pull again")
    return blob


def _sampling(blob: Path | None) -> dict[str, float]:
    """What the model's ``PARAMETER`` lines say, above Ollama's defaults; empty if nothing.

    A ``repeat_penalty`` counts the last 64 tokens there, and would count all of them here.
    """
    if blob is None:
        return {}
    told = sampling_params.usable_sampling(parsed_json(read_text(blob, _MAX_MANIFEST_BYTES), blob))
    return {**sampling_params.OLLAMA, **told} if told else {}


def _system(blob: Path | None) -> list[dict[str, str]]:
    """The message that the model's ``SYSTEM`` line makes; none where it is empty."""
    text = "" if blob is None else read_text(blob, _MAX_MANIFEST_BYTES)
    return [{"role": "system", "content": text}] if text else []


def _messages(blob: Path | None) -> list[dict[str, str]]:
    """Those of the model's ``MESSAGE`` lines."""
    told = [] if blob is None else read_json_list(blob)
    if not all(isinstance(each, dict) for each in told):
        raise ModelLoadError(f"{blob} must hold messages: ollama pull again")
    return [{key: str(each.get(key) or "") for key in ("role", "content")} for each in told]


def _layers(manifest: Path) -> list[dict[str, Any]]:
    document = parsed_json(read_text(manifest, _MAX_MANIFEST_BYTES), manifest)
    said = document.get("layers")
    return [each for each in said if isinstance(each, dict)] if isinstance(said, list) else []


def _model_layer(manifest: Path, layers: list[dict[str, Any]]) -> dict[str, Any]:
    models = [layer for layer in layers if layer.get("mediaType") == _MODEL_LAYER]
    if len(models) != 1:
        raise ModelLoadError(f"{manifest} has {len(models)} models; one GGUF file can be read")
    if any(layer.get("mediaType") == _ADAPTER_LAYER for layer in layers):
        raise ModelLoadError(f"{manifest} has an adapter, without which it is another model")
    return models[0]


# LM Studio


def _lm_studio_folders() -> list[Path]:
    return [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]


def _repositories(name: str) -> list[Path]:
    """The folders of a repository, ``publisher/name``."""
    parts = name.split("/")
    if len(parts) != 2 or not all(map(_PART.fullmatch, parts)):
        return []
    return [folder for root in _lm_studio_folders() if (folder := root.joinpath(*parts)).is_dir()]


def _gguf_names(folder: Path) -> list[str]:
    root = folder.parent.parent
    return [p.name for p in _inside(folder) if p.is_file() and _is_below(p, root)]


def _lm_studio_files() -> list[str]:
    """Full names, each with the quantisation, or the file's name where it has none of its own."""
    found: dict[str, None] = {}
    for root in _lm_studio_folders():
        for publisher in _inside(root):
            for folder in _inside(publisher):
                tags = [own for own, _ in tagged_files(_gguf_names(folder))]
                first = [own[0] for own in tags]
                for own in tags:
                    tag = own[0] if first.count(own[0]) == 1 else own[-1]
                    found[f"{LM_STUDIO}{publisher.name}/{folder.name}:{tag}"] = None
    return list(found)


def _lm_studio_entry(name: str) -> CatalogueEntry:
    repository, _, tag = name.removeprefix(LM_STUDIO).partition(":")
    folders = [folder for folder in _repositories(repository) if _gguf_names(folder)]
    if not folders:
        raise _unknown(name, "LM Studio", _lm_studio_folders(), _lm_studio_files())
    names = _gguf_names(folders[0])
    if not tag:
        tags = [own[-1] for own, _ in tagged_files(names)]
        if len(tags) != 1:
            raise ModelLoadError(f"{name} has {len(tags)} models; add one: {', '.join(tags)}")
        tag = tags[0]
    paths = [folders[0] / each for each in files_of(names, tag, str(folders[0]))]
    size = sum(path.stat().st_size for path in paths)
    return CatalogueEntry(name, title="downloaded by LM Studio", size=size, path=str(paths[0]))


# Folders of either


def _inside(folder: Path) -> Iterator[Path]:
    """What lies in a folder under names that a model can have; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in islice(entries, _MAX_ENTRIES))
    except OSError:
        return
    yield from (folder / name for name in names if _PART.fullmatch(name))


def _is_below(path: Path, folder: Path) -> bool:
    """Whether a file is inside a folder, links followed."""
    return path.resolve().is_relative_to(folder.resolve())


def _unknown(
    name: str, program: str, folders: Iterable[Path], there: Iterable[str]
) -> ModelLoadError:
    names = ", ".join(islice(there, 20))
    has = f"there are {names}" if names else f"nothing is in {', '.join(map(str, folders))}"
    return ModelLoadError(f"{program} has no model {name[:80]!r}; {has}")


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
