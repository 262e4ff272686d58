"""The proposers of a model for which no speculation is configured. Imports nothing slow."""

from __future__ import annotations

from paceline.build.bundled_drafts import bundled_drafts
from paceline.config import SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import DEFAULT_METHOD, EMBEDDED_METHOD, DraftModelConfig
from paceline.core.errors import ModelLoadError
from paceline.core.reading import checked_path
from paceline.loading.catalogue import embedded_model, embedded_ngram_model, find_entry

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
