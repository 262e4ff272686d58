"""Profiles on disk: one JSON file each in the user's cache directory, found by their key.

Files are untrusted: what does not carry the format's version, the key that was asked for and a
valid table is refused. Writing replaces a file as a whole, so readers never see half of one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from paceline.core.errors import ProfileError
from paceline.core.folders import cache_folder
from paceline.core.writing import write_json
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.threads import num_threads
from paceline.planner.cost_table import CostTable
from paceline.profiling.profile import Profile
from paceline.profiling.profile_machine import ProfileKey, Roofs, Work, profile_key
from paceline.tensors.placement import Placement

log = logging.getLogger(__name__)
FORMAT = "paceline-profile"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 16 << 20
_KEYS = ("format", "format_version", "key", "table", "roofs", "work")
MOST = float(1 << 60)
"""Numbers of a record are below this, which leaves out those that are none."""
Record = TypeVar("Record", ProfileKey, Roofs, Work)


def profiles_folder() -> Path:
    """Where profiles are kept."""
    return cache_folder("profiles")


def find_profile(key: ProfileKey) -> Profile | None:
    """The profile with exactly this key, or None. A file that cannot be used is a warning."""
    return _find(_path(key, ""), key, "")


def find_imported(name: str) -> Profile | None:
    """The imported table of this name, or None. A file that cannot be used is a warning."""
    return _find(_path(None, name), None, name)


def stored_table(
    name: str,
    config: ModelConfig,
    ops: Ops,
    dtype: str,
    kv_dtype: str,
    placement: Placement | None = None,
) -> CostTable | None:
    """What the steps of a model that runs like this here cost, if it was measured."""
    key = profile_key(name, config, ops, dtype, kv_dtype, num_threads(), placement)
    profile = find_profile(key)
    return profile.table if profile else None


def _find(path: Path, key: ProfileKey | None, name: str) -> Profile | None:
    if not path.exists():
        return None
    try:
        profile = read_profile(path)
        if profile.key != key or (name and profile.table.name != name):
            raise ProfileError(f"{path} is the profile of something else")
    except ProfileError as error:
        log.warning("a stored profile is ignored; measure it again: %s", error)
        return None
    return profile


def _path(key: ProfileKey | None, name: str) -> Path:
    digest = key.digest if key else "imported-" + xxhash.xxh3_128(name.encode()).hexdigest()
    return profiles_folder() / f"{digest}.json"


def store_profile(profile: Profile) -> Path:
    """Keep a profile for :func:`find_profile` or :func:`find_imported`; returns where.

    A model is measured as a target or as a draft: the host's time as the other stays as it was.

    Raises:
        ProfileError: it cannot be written.
    """
    path = _path(profile.key, profile.table.name)
    document = to_document(profile)
    before = None if profile.key is None else find_profile(profile.key)
    if before is not None:
        host = profile.table.host.completed_by(before.table.host)
        document["table"]["host"] = asdict(host)
    write_json(path, document, ProfileError, make_folder=True)
    return path


def keep_profiles(profiles: Iterable[Profile]) -> tuple[list[Path], list[str]]:
    """Store those that are not noisy; returns where, and a remark on each of the others.

    Raises:
        ProfileError: one cannot be written.
    """
    kept, remarks = [], []
    for profile in profiles:
        if profile.is_noisy:
            remarks.append(
                f"the profile of {profile.table.name} is not kept, because its times vary too "
                "much; one that was kept before remains"
            )
        else:
            kept.append(store_profile(profile))
    return kept, remarks


def read_profile(path: Path) -> Profile:
    """The profile in a file; ``ProfileError`` where that is damaged, or of another version."""
    try:
        document = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error
    try:
        return from_document(document)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def read_small(path: Path) -> str:
    """The text of a file; ``ProfileError`` where it is larger than any that is meant for us."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ProfileError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return text


# --- documents -----------------------------------------------------------------------------------


def to_document(profile: Profile) -> dict[str, Any]:
    """What a file holds."""
    parts = {name: getattr(profile, name) for name in ("key", "roofs", "work")}
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "table": profile.table.to_dict(),
        **{name: None if part is None else asdict(part) for name, part in parts.items()},
    }


def from_document(document: object) -> Profile:
    """The profile that a document describes; of several in one, the first, which is the target's.

    Raises:
        ProfileError: it is none, or of another version.
    """
    if isinstance(document, dict) and isinstance(document.get("profiles"), list):
        document = next(iter(document["profiles"]), None)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProfileError("this is not a profile")
    if document.get("format_version") != FORMAT_VERSION:
        raise ProfileError(
            f"the format's version is {document.get('format_version')!r}; known: {FORMAT_VERSION}"
        )
    if set(document) != set(_KEYS):
        raise ProfileError(f"a profile must have {', '.join(_KEYS)}")
    return Profile(
        table=CostTable.from_dict(document["table"]),
        key=_record(ProfileKey, document["key"]),
        roofs=_record(Roofs, document["roofs"]),
        work=_record(Work, document["work"]),
    )


def _record(kind: type[Record], data: object) -> Record | None:
    """A dataclass of texts and numbers out of its fields; those with defaults may be missing."""
    if data is None:
        return None
    kinds = {field.name: str(field.type) for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if not isinstance(data, dict) or not needed <= set(data) <= set(kinds):
        raise ProfileError(f"{kind.__name__} must have {', '.join(kinds)}")
    for name, value in data.items():
        expected = kinds[name]
        if type(value).__name__ != expected or not (expected == "str" or 0 <= value < MOST):
            raise ProfileError(f"{name} of {kind.__name__} is {value!r}; it must be {expected}")
    return kind(**data)
