"""The proposers of a model for which no speculation is configured, and the drafts that it brings.

A model brings an MTP layer among its tensors, and what lies in folders of its: ``speculators/``
inside the model's folder, and one beside it that is called like the model, with ``.speculators`` in
place of ``.gguf`` or at its end. Beside a GGUF file may lie ``mtp-NAME.gguf`` and others that
llama.cpp's tools name so. The catalogue may name others for a model that has a name there.
Owns where drafts are looked for and which of them can run: heads, draft models, parallel drafts and
files of n-grams.

A ``config.json`` may carry what the `speculators` library writes (``speculators_model_type``,
``speculators_config``), as vLLM reads it. Imports nothing slow.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import (
    DEFAULT_METHOD,
    EMBEDDED_METHOD,
    HEAD_METHODS,
    DraftModelConfig,
)
from paceline.core.errors import ConfigError, ModelLoadError, PacelineError
from paceline.core.files import checked_path
from paceline.loading.catalogue import embedded_model, embedded_ngram_model, find_entry, find_model
from paceline.loading.gguf.choice import (
    MTP_PREFIX,
    drafts_beside,
    is_later_shard,
    sibling_shards,
)
from paceline.loading.gguf.names import HEADS, head_of
from paceline.models.config import MASK_TOKEN_KEYS
from paceline.models.heads import LINEAR_ATTENTION, MTP, head_kind, mtp_part

EVERY_MODEL = parse_speculative_config({"method": DEFAULT_METHOD})
"""Who drafts for any model, wherever it comes from."""


def is_embedded(model: str) -> bool:
    """Whether the model is the embedded one, named by its folder or by a name."""
    place, is_there = checked_path(model, ModelLoadError)
    entry = None if is_there else find_entry(model)
    if entry is not None and entry.is_here:
        place, is_there = entry.place, True
    return is_there and place.samefile(embedded_model("target"))


def default_speculative_config(model: str) -> tuple[SpeculativeConfig, ...]:
    """:data:`EVERY_MODEL`, and the drafts that a model brings."""
    drafts = drafts_of(model)
    if is_embedded(model):
        # Its draft model's forward takes a quarter of its own: n-grams alone bring more per second.
        drafts = tuple(config for config in drafts if config.method == EMBEDDED_METHOD)
    return (*EVERY_MODEL, *drafts)


def drafts_of(model: str) -> tuple[SpeculativeConfig, ...]:
    """The drafts that a model brings; the embedded one's are an n-gram model and a draft model."""
    if not is_embedded(model):
        return bundled_drafts(model)
    ngram = parse_speculative_config({"method": "ngram_model", "model": embedded_ngram_model()})
    # One level with several candidates: a forward per level is slow compared with this target.
    draft = DraftModelConfig(
        model=embedded_model("draft"),
        num_speculative_tokens=1,
        max_branching=4,
        max_tree_nodes=4,
    )
    return (*ngram, draft)


log = logging.getLogger(__name__)

FOLDER = "speculators"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 25
_GGUF_MTP = b".nextn."
"""Is in the names of a GGUF file's tensors where one is of an MTP layer."""
_FIRST_LAYER = "model.layers.0."
_NGRAM_SUFFIX, _GGUF_SUFFIX = ".ngram", ".gguf"
_FOREIGN_NGRAMS = "model.bin"
_PLAIN_TYPES = (None, "independent")
"""Drafts that are language models of their own."""


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft that a model brings.

    Attributes:
        place: its file, or the one that shows that there is one; the model itself for its layer.
        config: of the proposer that drafts with it; None where none can.
        problem: why not; empty where one can.
    """

    place: Path
    config: SpeculativeConfig | None
    problem: str = ""


def bundled_drafts(model: str) -> tuple[SpeculativeConfig, ...]:
    """The drafts of a model's folder or GGUF file, or of a name; empty for a hub id.

    A draft that cannot be used is left out, and the log says why.
    """
    found = found_drafts(model)
    for draft in found:
        if draft.problem:
            is_layer = draft.place == _place_of(model)[0]
            level = logging.INFO if is_layer else logging.WARNING
            is_named = is_layer or draft.place.suffix == _GGUF_SUFFIX
            where = draft.place if is_named else draft.place.parent
            log.log(level, "the draft in %s is not used: %s", where, draft.problem)
    return tuple(draft.config for draft in found if draft.config is not None)


def found_drafts(model: str) -> list[FoundDraft]:
    """What of a model, and beside it, is a draft, usable or not."""
    path, named = _place_of(model)
    is_there = os.path.exists(path)  # no for what no file can be called, or nobody may look at
    layer = _mtp_layer(path) if is_there else None
    places = [*(_places(path) if is_there else ()), *named]
    files = [file for place in places for file in _draft_files(place)]
    is_own = layer is not None and layer.config is not None
    beside = [file for file in _beside(path) if not (is_own and _is_called_mtp(file))]
    files += [file for file in beside if file not in files]
    return [*([] if layer is None else [layer]), *map(_found, files)]


def _place_of(model: str) -> tuple[Path, list[Path]]:
    """Where a model lies, and the drafts that the catalogue names for it."""
    path = Path(os.path.expanduser(model))
    entry = None if os.path.exists(path) else find_model(model)
    return (path, []) if entry is None else (entry.place, [Path(draft) for draft in entry.drafts])


def _mtp_layer(model: Path) -> FoundDraft | None:
    """The MTP layer among a model's tensors.

    None also for a model that cannot be read, of which its loader says what is wrong.
    """
    from paceline.loading.safetensors_files import stored_names  # reads GGUF files with numpy

    try:
        files = sibling_shards(model) if model.is_file() else []
        if files and not any(_mentions(file, _GGUF_MTP) for file in files):
            return None  # without parsing its vocabulary, which takes as long as loading it
        part = mtp_part(stored_names(model))
    except (OSError, ValueError, RecursionError, PacelineError):
        return None
    if part is None:
        return None
    foreign = part.tensor_of(LINEAR_ATTENTION)
    if foreign is not None:
        return FoundDraft(
            model, None, f"the MTP layer has {foreign}, a kind that does not draft yet"
        )
    return FoundDraft(model, _parsed(method=MTP))


def _is_mtp_layer(file: Path) -> bool:
    """Whether a GGUF file has a model's MTP layer and none of the layers before it."""
    from paceline.loading.safetensors_files import stored_names  # reads GGUF files with numpy

    if not _mentions(file, _GGUF_MTP):
        return False
    names = stored_names(file)
    return mtp_part(names) is not None and not any(n.startswith(_FIRST_LAYER) for n in names)


def _mentions(file: Path, word: bytes) -> bool:
    with file.open("rb") as opened:
        size = min(_MAX_HEADER_BYTES, file.stat().st_size)
        with mmap(opened.fileno(), size, access=ACCESS_READ) as data:
            return data.find(word) >= 0


def _places(model: Path) -> list[Path]:
    """The folders that drafts of a model may lie in."""
    name = model.resolve().name.removesuffix(".gguf")
    folders = [model / FOLDER, model.resolve().parent / f"{name}.{FOLDER}"]
    return [
        place
        for folder in folders
        if folder.is_dir()
        for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
    ]


def _beside(model: Path) -> list[Path]:
    """Drafts that lie beside a GGUF file, as llama.cpp's tools name them."""
    if not (model.name.lower().endswith(_GGUF_SUFFIX) and model.is_file()):
        return []
    names = [path.name for path in model.parent.iterdir() if path.is_file()]
    return [model.parent / name for name in drafts_beside(model.name, names)]


def _is_called_mtp(file: Path) -> bool:
    return file.name.lower().startswith(MTP_PREFIX)


def _draft_files(place: Path) -> list[Path]:
    """Files that are a draft, or show that there is one: a configuration, n-grams, GGUF."""
    ngrams = sorted(place.glob(f"*{_NGRAM_SUFFIX}")) or [place / _FOREIGN_NGRAMS]
    found = (place / "config.json", *ngrams, *sorted(place.glob(f"*{_GGUF_SUFFIX}")))
    return [path for path in found if path.is_file() and not is_later_shard(path)]


def _found(path: Path) -> FoundDraft:
    try:
        if path.suffix == _NGRAM_SUFFIX:
            return FoundDraft(path, _parsed(method="ngram_model", model=str(path)))
        if path.name == _FOREIGN_NGRAMS:
            raise ConfigError(
                "n-grams of another program have to be converted: paceline train ngram "
                f"--target MODEL --import-uzu {path} -o {path.with_suffix(_NGRAM_SUFFIX)}"
            )
        return FoundDraft(path, draft_at(path if path.suffix == _GGUF_SUFFIX else path.parent))
    except (OSError, ValueError, PacelineError) as error:
        return FoundDraft(path, None, str(error))


def _parsed(**said: object) -> SpeculativeConfig:
    (config,) = parse_speculative_config(said)
    return config


def draft_at(place: Path) -> SpeculativeConfig:
    """The head, draft model or parallel draft of a folder, by its ``config.json``, or of a file.

    A file may be the MTP layer of a model alone, as llama.cpp's converter writes it for drafting.

    Raises:
        OSError, ValueError, PacelineError: the configuration is unreadable, or of a kind that does
            not run here.
    """
    if place.is_file():
        return _parsed(method=_method_of_file(place), model=str(place))
    path = place / "config.json"
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"its config.json has more than {_MAX_CONFIG_BYTES} bytes")
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise ValueError("its config.json is not an object")
    kind = config.get("speculators_model_type")
    head = head_kind(config)
    if head is None and kind not in _PLAIN_TYPES:
        raise ConfigError(
            f"it is of type {kind!r}; language models and heads of type {', '.join(HEAD_METHODS)} "
            "run here"
        )
    is_parallel = any(config.get(key) not in (None, []) for key in MASK_TOKEN_KEYS)
    method = head or ("parallel_draft" if is_parallel else "draft_model")
    wanted = _proposed_tokens(config)
    count = {} if wanted is None else {"num_speculative_tokens": wanted}
    return _parsed(method=method, model=str(place), **count)


def _method_of_file(path: Path) -> str:
    from paceline.loading.gguf.container import read_architecture, read_container  # slow by numpy

    kind = read_architecture(path)
    if kind in HEADS:
        return head_of(str(kind), read_container(path).tensors)
    return MTP if _is_mtp_layer(path) else "draft_model"


def _proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """How many tokens the draft was trained to propose, if its configuration says so."""
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return count if isinstance(count, int) else None
