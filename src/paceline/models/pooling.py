"""How a model was trained to turn a text's hidden states into one vector, as its files say it.

Reads the metadata of GGUF files and the files that sentence-transformers adds to a model's folder.
Knows no hidden states: :mod:`paceline.engine.prompt_results` pools them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelLoadError
from paceline.core.files import read_json, read_json_list

_MODULES, _USUAL_FOLDER, _KEPT = "modules.json", "1_Pooling", ("Transformer", "Normalize")
_GGUF_TYPES = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_NAMES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean"}  # which has the mean's direction
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
"""Keys of sentence-transformers up to version 5, each true or false."""


def gguf_pooling(metadata: Mapping[str, Any], architecture: str) -> str:
    """The pooling that a GGUF file names, by llama.cpp's numbers (b11549); empty for none."""
    kind = metadata.get(f"{architecture}.pooling_type")
    if kind is None or kind == 0:
        return ""
    named = _GGUF_TYPES.get(kind) if isinstance(kind, int) else None
    return named or f"type {kind!r:.40}"


def folder_pooling(folder: Path) -> str:
    """The pooling that a folder written by sentence-transformers (6.2.0) names; empty for others.

    A name that is none of :data:`paceline.request.sampling_params.POOLINGS` says what the model was
    trained with instead: vectors put one behind another, or layers that read the pooled vector.

    Raises:
        ModelLoadError: a file is damaged, or a folder that it names is not inside this one.
    """
    modules = _modules(folder)
    place = modules.get("Pooling", _USUAL_FOLDER if not modules else "")
    if not place or not (folder / place / "config.json").is_file():
        return ""
    named = _named(read_json(folder / place / "config.json"))
    others = [name for name in modules if name not in (*_KEPT, "Pooling")]
    return ", then ".join([named, *others])


def write_pooling(folder: Path, pooling: str) -> None:
    """Write what :func:`folder_pooling` reads back."""
    (folder / _USUAL_FOLDER).mkdir(exist_ok=True)
    text = json.dumps({"pooling_mode": pooling}, indent=2) + "\n"
    (folder / _USUAL_FOLDER / "config.json").write_text(text, encoding="utf-8")


def _modules(folder: Path) -> dict[str, str]:
    """The steps from a text to its vector: the name of each one's class, and its folder."""
    if not (folder / _MODULES).is_file():
        return {}
    found = dict[str, str]()
    for module in read_json_list(folder / _MODULES):
        match module:
            case {"type": str(kind), "path": str(place)} if Path(place).name == place != "..":
                found[kind.rpartition(".")[2]] = place
            case _:
                raise ModelLoadError(
                    f"{folder / _MODULES} has an entry {module!r:.80}; each must be an object with "
                    "a type, and as path a folder inside this one"
                )
    return found


def _named(config: Mapping[str, Any]) -> str:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [name for key, name in _FLAGS.items() if config.get(key) is True] or ["mean"]
    listed = modes if isinstance(modes, list) else [modes]
    return "+".join(_NAMES.get(str(mode), str(mode)) for mode in listed)
