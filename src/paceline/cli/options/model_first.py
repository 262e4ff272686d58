"""Arguments of commands that take a model and a file or folder: MODEL first, and only if wanted."""

from __future__ import annotations

import os

from paceline.build.default_drafts import is_embedded
from paceline.loading.catalogue import EMBEDDED


def model_and_file(
    first: str | None, second: str | None, option: str | None
) -> tuple[str | None, str | None]:
    """The model and the file out of ``[MODEL] FILE``; None for what is not named.

    Args:
        first, second: the arguments; a single one is the file.
        option: the model as ``--model`` says it, which the argument precedes.
    """
    model, file = (first, second) if second is not None else (None, first)
    return model if model is not None else option, file


def lasting_name(model: str) -> str:
    """A model's name or hub id as it is, the embedded one's, or its path from the root."""
    if is_embedded(model):
        return EMBEDDED
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model
