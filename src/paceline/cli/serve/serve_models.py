"""Which models ``paceline serve`` may load: where they lie, under which names, and how large.

Imports nothing slow, and opens no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.build.default_drafts import is_embedded
from paceline.core.checks import memory_bytes
from paceline.core.errors import ConfigError, ModelLoadError
from paceline.core.memory import memory
from paceline.core.reading import checked_path
from paceline.loading.catalogue import EMBEDDED, LM_STUDIO, OLLAMA, all_models, find_model
from paceline.loading.fetching import is_hub_id
from paceline.loading.gguf.choice import sibling_shards

DEFAULT_BUDGET = "80%"
"""Of the memory of this machine, for the models of a server that has several."""
_WEIGHTS = ("*.safetensors", "*.gguf")


def default_names(model: str) -> tuple[str, ...]:
    """A model is asked for as it was named here, and by its folder's or file's name alone."""
    if is_embedded(model):
        return (EMBEDDED,)
    path = Path(model)
    # A folder may be called ".", and a file may be a link to one that has a hash for a name.
    named = path if path.is_file() else path.resolve()
    name = named.name if path.exists() else model.removeprefix(OLLAMA).removeprefix(LM_STUDIO)
    return tuple(dict.fromkeys((name, model)))


def models_on_disk(named: Iterable[str]) -> list[str]:
    """Names of models that are on this machine, besides those that are named already."""
    places = {place for model in named if (place := _place(model)) is not None}
    return [entry.name for entry in all_models() if entry.is_here and entry.place not in places]


def served_names(models: Sequence[str], given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names of each model, by what ``--served-model-name`` says.

    Raises:
        ConfigError: a model is named twice, or one of several models is not said to be meant.
    """
    if twice := [model for model in models if models.count(model) > 1]:
        raise ConfigError(f"model {twice[0]} is named twice")
    names = {model: default_names(model) for model in models}
    if len(models) == 1:
        return {model: tuple(given) or own for model, own in names.items()}
    chosen = dict.fromkeys(names, tuple[str, ...]())
    for each in given:
        name, sign, wanted = each.partition("=")
        found = [model for model, own in names.items() if wanted in own]
        if not (name and sign and found):
            known = ", ".join(own[0] for own in names.values())
            raise ConfigError(
                f"--served-model-name is {each!r}; with several models it is NAME=MODEL, and the "
                f"models are {known}"
            )
        chosen[found[0]] += (name,)
    return {model: chosen[model] or own for model, own in names.items()}


def check_is_there(model: str) -> None:
    """Raises ModelLoadError: nothing is there, so that loading it later would fail."""
    if _place(model) is None and not is_hub_id(model):
        raise ModelLoadError(f"there is no model {model}; `paceline models` lists names")


def stored_bytes(model: str) -> int:
    """Bytes of a model's weights on disk; 0 where they cannot be found without opening it."""
    place = _place(model)
    if place is None:
        return 0
    if place.is_file():
        files = [shard for shard in sibling_shards(place) if shard.is_file()]
    else:
        files = [f for p in _WEIGHTS for f in place.glob(p)]
    return sum(file.stat().st_size for file in files)


def _place(model: str) -> Path | None:
    path, is_there = checked_path(model, ModelLoadError)
    if is_there:
        return path
    entry = find_model(model)
    return entry.place if entry is not None and entry.is_here else None


def memory_budget(text: str | None, is_shared: bool) -> float:
    """Bytes that loaded models may take: ``8GiB``, or ``50%`` of this machine's memory.

    Args:
        is_shared: there are several models; one by itself may take all there is.

    Raises:
        ConfigError: it is neither.
    """
    text = text or (DEFAULT_BUDGET if is_shared else None)
    if text is None:
        return math.inf
    if not text.strip().endswith("%"):
        return memory_bytes(text)
    share, (total, _) = text.strip()[:-1], memory()
    if not share.replace(".", "", 1).isdecimal() or not 0 < float(share) <= 100:
        raise ConfigError(f"{text!r} is not a share of memory; write 1% to 100%, or 8GiB")
    return math.inf if total is None else total * float(share) / 100
