"""Which proposers there are: the built-in ones, and plugins by their entry points.

An entry point of the group ``paceline.proposers`` is named as the proposer's method; it leads to a
class, or a function, that takes a configuration and what the proposer has to fit to. Imports none
of them.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from paceline.core.errors import ConfigError, PacelineError

ENTRY_POINTS = "paceline.proposers"
BUILT_IN = {
    "prompt_lookup": "paceline.proposers.prompt_lookup:build",
    "suffix": "paceline.proposers.suffix:build",
    "ngram_model": "paceline.proposers.ngram_model:build",
    "draft_model": "paceline.proposers.draft_model:build",
    "parallel_draft": "paceline.proposers.draft_model.parallel:build",
    "self": "paceline.proposers.draft_model.self_draft:build",
    "eagle3": "paceline.proposers.heads:build",
    "peagle": "paceline.proposers.heads:build",
    "mtp": "paceline.proposers.heads:build",
    "dflash": "paceline.proposers.heads:build",
    "dspark": "paceline.proposers.heads:build",
    "grammar": "paceline.proposers.grammar:build",
}
"""The package's own entry points, as pyproject.toml has them.

They are here too so that no plugin takes the place of one of them, and so that they work from a
source tree whose metadata is missing or of another version.
"""
METHODS = tuple(BUILT_IN)
HEAD_METHODS = ("eagle3", "peagle", "mtp", "dflash", "dspark")
"""Those whose model reads hidden states of the target, which no trace holds."""
MODEL_METHODS = ("draft_model", "parallel_draft", "self", *HEAD_METHODS)
"""Those that draft by forwards of a model."""
METHOD_ALIASES = {"ngram": "prompt_lookup"}
DEFAULT_METHOD, EMBEDDED_METHOD = "suffix", "ngram_model"
"""Who drafts for any model, and who for the embedded one as well, where nothing was said."""


def plugins() -> dict[str, EntryPoint]:
    """The proposers of other packages that are installed, by their methods."""
    return _plugins(tuple(sys.path))


@lru_cache(maxsize=4)
def _plugins(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Of one search path: reading the metadata of all packages takes milliseconds."""
    found: dict[str, EntryPoint] = {}
    for each in entry_points(group=ENTRY_POINTS):
        if each.name not in BUILT_IN:
            found.setdefault(each.name, each)
    return found


def check_method(
    name: object, key: str = "method", error: type[PacelineError] = ConfigError
) -> str:
    """The method of this name or alias.

    Raises:
        PacelineError: of type ``error``: it is neither built in nor an installed plugin's.
    """
    method = METHOD_ALIASES.get(name, name) if isinstance(name, str) else None
    if method is not None and (method in BUILT_IN or method in plugins()):
        return method
    others = ", ".join(sorted(plugins())) or "none"
    raise error(
        f"{key} is {str(name)[:60]!r}; allowed: {', '.join(METHODS)}, and installed plugins "
        f"(entry points {ENTRY_POINTS}): {others}"
    )


def find_entry_point(method: str) -> EntryPoint:
    """Where the proposers of a method come from; ``ConfigError`` if nowhere."""
    if check_method(method) in BUILT_IN:
        return EntryPoint(method, BUILT_IN[method], ENTRY_POINTS)
    return plugins()[method]
