"""Models that Ollama and LM Studio have downloaded, as entries that have names.

``ollama:NAME:TAG`` is what ``ollama list`` calls NAME:TAG, ``lmstudio:PUBLISHER/REPOSITORY:Q4_K_M``
a GGUF file of LM Studio's. Owns where these programs keep models and what their files say. Nothing
outside their folders is opened, whatever a manifest or a link says. Imports nothing slow.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelLoadError
from paceline.core.json_file import parsed_json, read_json_list, read_text
from paceline.loading.catalogue import CatalogueEntry
from paceline.loading.gguf.choice import files_of, tagged_files
from paceline.request import sampling_defaults

log = logging.getLogger(__name__)
OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
_PART = re.compile(r"[A-Za-z0-9][\w.-]*")
_NAME = re.compile(rf"(?:{_PART.pattern}/){{0,3}}{_PART.pattern}(?::{_PART.pattern})?")
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
    if not _NAME.fullmatch(name):
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
    told = sampling_defaults.usable_sampling(
        parsed_json(read_text(blob, _MAX_MANIFEST_BYTES), blob)
    )
    return {**sampling_defaults.OLLAMA, **told} if told else {}


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


# Both


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
