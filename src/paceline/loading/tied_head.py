"""Which matrix is the head where the configuration says that it is the embedding.

A file may hold that one matrix under either name, or under both. Where it holds two that differ,
the model has a head of its own whatever its configuration says, as in transformers 5.24. Such are
the folders of NemotronH that it writes, whose class there does not heed ``tie_word_embeddings``.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from paceline.loading.safetensors_files import SafetensorsFolder
from paceline.models.families.config_json import with_tied_embeddings
from paceline.models.families.layout import Layout
from paceline.tensors.arrays import floats
from paceline.tensors.stored import StoredTensors

log = logging.getLogger(__name__)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 1024  # at once


def name_embedding(files: SafetensorsFolder, layout: Layout) -> None:
    """Call a tied matrix that is stored as the head alone by the embedding's name."""
    stored = {layout.plain(name): name for name in files}
    if EMBEDDING not in stored and HEAD in stored:
        files.rename(stored[HEAD], EMBEDDING)


def with_stored_head(raw: dict[str, Any], tensors: StoredTensors) -> dict[str, Any]:
    """A configuration that ties the head, or the same without that where the head differs."""
    if EMBEDDING not in tensors or HEAD not in tensors or _is_embedding(tensors):
        return raw
    log.warning(
        "the configuration says tie_word_embeddings, but lm_head.weight is not "
        "model.embed_tokens.weight: both are used, as transformers does"
    )
    return with_tied_embeddings(raw, tied=False)


def _is_embedding(tensors: StoredTensors) -> bool:
    embedding, head = tensors[EMBEDDING], tensors[HEAD]
    starts = range(0, len(embedding), _COMPARED_ROWS)
    is_equal = embedding.shape == head.shape and all(
        np.array_equal(floats(embedding[at:stop]), floats(head[at:stop]))
        for at, stop in zip(starts, (*starts[1:], None), strict=True)
    )
    for name in (EMBEDDING, HEAD):
        tensors.release(name)
    return is_equal
