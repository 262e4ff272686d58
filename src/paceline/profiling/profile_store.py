"""Profiles on disk, and cost tables out of other people's measurements.

A profile is one JSON file in the user's cache directory, found by its key. Writing replaces a file
as a whole, so readers never see half of one.

Two formats are imported. ``llama-batched-bench --output-format jsonl`` (llama.cpp,
tools/batched-bench): a line per run, in which ``pl`` sequences with ``pp`` tokens each generate
``tg`` tokens each in ``t_tg`` seconds, one row per sequence and forward. So T(width = pl) =
t_tg / tg, over a context of pp + tg / 2 on average. And JSON with ``curves``: costs of widths 1, 2,
3, ... relative to width 1.

All files are untrusted: what does not carry the format's version, the key that was asked for and a
valid table is refused, by a :class:`ProfileError` that names the line, or the curve.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from paceline.core.errors import ProfileError
from paceline.core.files import write_json
from paceline.core.folders import cache_folder
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.threads import num_threads
from paceline.planner.cost_table import CostPoint, CostTable
from paceline.profiling.machine import ProfileKey, Roofs, Work, profile_key
from paceline.profiling.profile import Profile
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

    A model is measured as a target or as a draft; the host's time in the other role is kept.
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
    """Store those that are not noisy; returns where, and a remark on each of the others."""
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
    with _within(f"{path}: "):
        return from_document(document)


@contextmanager
def _within(place: str) -> Iterator[None]:
    """Let errors begin with where they are."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{place}{error}") from error


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
    """The profile in a document, the target's if there are several; or ``ProfileError``."""
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


MAX_WIDTHS = 4096
MOST_IMPORTED = 1e9
_COUNTS = {"pp": 0, "tg": 1, "pl": 1}
"""Whole numbers of a run that matter, with their least values."""


def import_tables(path: str | Path) -> list[CostTable]:
    """The cost tables in a file; a curve with a draft model makes a second one, ``NAME: draft``."""
    file = Path(path)
    text = read_small(file)
    with _within(f"{file}, "):
        # No run of a benchmark has a key of this name.
        return _curves(text) if '"curves"' in text else [_batched_bench(text, file.stem)]


# --- llama-batched-bench -------------------------------------------------------------------------


def _batched_bench(text: str, name: str) -> CostTable:
    """Runs of the same width and context are summed up by their median."""
    times: dict[tuple[int, int], list[float]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            with _within(f"line {number}: "):
                width, context, ms = _run(line)
            times.setdefault((context, width), []).append(ms)
    contexts = {context for context, _ in times}
    lacking = sorted(context for context in contexts if (context, 1) not in times)
    if lacking or not times:
        at = f" at context {lacking[0]}" if lacking else ""
        raise ProfileError(f"line 1: no run with pl 1{at}; measure with -npl 1,2,3,4 and so on")
    points = [CostPoint(1, c, w, w, statistics.median(ms)) for (c, w), ms in times.items()]
    return CostTable(name, points)


def _run(line: str) -> tuple[int, int, float]:
    """Width, context and milliseconds of a step, from one line."""
    run = _json(line)
    if not isinstance(run, Mapping):
        raise ProfileError("a run must be a JSON object, as llama-batched-bench writes it")
    missing = [name for name in (*_COUNTS, "t_tg") if name not in run]
    if missing:
        raise ProfileError(f"{', '.join(missing)} is missing from what llama-batched-bench writes")
    for name, least in _COUNTS.items():
        if type(run[name]) is not int or not least <= run[name] <= MOST_IMPORTED:
            raise ProfileError(f"{name} is {run[name]!r}; it must be a whole number from {least}")
    if run.get("is_tg_separate"):
        raise ProfileError("is_tg_separate is set: no forward had more than one row")
    seconds = _positive("t_tg", run["t_tg"])
    return run["pl"], run["pp"] + run["tg"] // 2, seconds / run["tg"] * 1e3


# --- curves --------------------------------------------------------------------------------------


def _curves(text: str) -> list[CostTable]:
    document, tables = _json(text), dict[str, CostTable]()
    curves = document.get("curves") if isinstance(document, Mapping) else None
    if not isinstance(curves, list) or not curves:
        raise ProfileError("there is no curve")
    for number, curve in enumerate(curves, start=1):
        with _within(f"curve {number}: "):
            if not isinstance(curve, Mapping):
                raise ProfileError("a curve must be an object")
            for table in _curve_tables(curve):
                if table.name in tables:
                    raise ProfileError(f"there is a curve {table.name!r} before; names are keys")
                tables[table.name] = table
    return list(tables.values())


def _curve_tables(curve: Mapping[str, Any]) -> list[CostTable]:
    name = curve.get("name")
    if not isinstance(name, str) or not name:
        raise ProfileError("the curve has no name")
    speed = curve.get("tokens_per_second_at_1")
    plain = 1.0 if speed is None else 1e3 / _positive("tokens_per_second_at_1", speed)
    tables = [CostTable(name, _points(curve, "cost_ratio", plain), speed is None)]
    if curve.get("draft_step_ratio") is not None:
        step = plain * _positive("draft_step_ratio", curve["draft_step_ratio"])
        has_curve = curve.get("draft_cost_ratio") is not None
        points = (
            _points(curve, "draft_cost_ratio", step) if has_curve else [CostPoint(1, 0, 1, 1, step)]
        )
        tables.append(CostTable(f"{name}: draft", points, speed is None))
    return tables


def _points(curve: Mapping[str, Any], key: str, plain: float) -> list[CostPoint]:
    """Points of context 0: the curves do not tell theirs."""
    ratios = curve.get(key)
    if not isinstance(ratios, list) or not 1 <= len(ratios) <= MAX_WIDTHS:
        raise ProfileError(f"{key} must be a list of 1 to {MAX_WIDTHS} numbers, for widths 1, 2, …")
    if ratios[0] != 1:
        raise ProfileError(f"{key} of width 1 is {ratios[0]!r}; it must be 1: ratios are to it")
    return [
        CostPoint(1, 0, width, width, _positive(f"{key} of width {width}", ratio) * plain)
        for width, ratio in enumerate(ratios, start=1)
    ]


def _positive(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= MOST_IMPORTED:  # type: ignore[operator]
        raise ProfileError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)  # type: ignore[arg-type]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        within = f"line {error.lineno}: " if "\n" in text else ""
        raise ProfileError(f"{within}not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"not readable JSON: {error}") from error
