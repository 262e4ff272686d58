"""Drafts by a trained n-gram model and by the text of the request at hand. Knows no model's text.

The tables are mapped from the file that ``paceline train ngram`` writes. Where the extension is
built, look-ups and trees are made by ``csrc/drafts/ngram.cpp``.
"""

from __future__ import annotations

from typing import Any

from paceline.config.speculative import NgramModelConfig
from paceline.planner.drafts import TextDrafter
from paceline.proposers.base import TargetInfo, TextProposer
from paceline.proposers.ngram_model.file import read_tables
from paceline.proposers.ngram_model.lookup import NgramLookup, NgramText
from paceline.proposers.ngram_model.tables import NgramTables
from paceline.request.request import Request

NAME = "ngram_model"


class NgramModelProposer(TextProposer):
    """See the module's docstring.

    A request's own text is indexed as far back as its last ``ngram_window`` to twice as many
    tokens; the index is made anew when it holds twice as many.
    """

    name = NAME
    config: NgramModelConfig

    def __init__(
        self, config: NgramModelConfig, tables: NgramTables, *, is_native: bool | None = None
    ) -> None:
        super().__init__(config, is_native)
        native = self._native
        self._make_text: Any = native.NgramText if native else NgramText
        self._lookup: Any = (
            native.NgramLookup(tables.levels, tables.unigrams, tables.is_backoff)
            if native
            else NgramLookup(tables)
        )

    def _open(self, request: Request) -> TextDrafter:
        config = self.config
        text: TextDrafter = self._make_text(
            self._lookup, config.ngram_window, self._branching, config.min_accept_prob
        )
        return text


def build(config: NgramModelConfig, target: TargetInfo) -> NgramModelProposer:
    """Raises ModelLoadError for an unusable file, ConfigError for another vocabulary's."""
    assert config.model is not None
    tables = read_tables(config.model)
    tables.check_fits(config.model, target.vocab_size, target.fingerprint)
    return NgramModelProposer(config, tables)
