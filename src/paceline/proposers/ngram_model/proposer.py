"""Drafts by a trained n-gram model and by the text of the request at hand. Knows no model's text.

The tables are mapped from the file that ``paceline train ngram`` writes. Where the extension is
built, look-ups and trees are made by ``csrc/ngram.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.models.ops.native import native_module, why_not_native
from paceline.proposers.base import DraftBudget, Drafted, Proposer, TargetInfo, draft_each
from paceline.proposers.ngram_model.file import read_tables
from paceline.proposers.ngram_model.lookup import LONGEST_CONTEXT, NgramLookup, TextCache
from paceline.proposers.ngram_model.tables import NgramTables
from paceline.request import Request, VerifyResult
from paceline.span import DraftTree

NAME = "ngram_model"


class NgramModelProposer(Proposer):
    """See the module's docstring.

    A request's own text is indexed as far back as its last ``ngram_window`` to twice as many
    tokens; the index is made anew when it holds twice as many.
    """

    name = NAME

    def __init__(
        self, config: SpeculativeConfig, tables: NgramTables, *, is_native: bool | None = None
    ) -> None:
        self.config = config
        self._lookup, self._make_cache = _parts(tables, is_native)
        self._branching = config.max_branching if config.max_tree_nodes else 1
        self._window = config.ngram_window
        self._caches: dict[int, tuple[int, Any]] = {}
        """By request: where its text begins in the cache, and the cache."""

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        return draft_each(self._draft, requests, budget, self.config)

    def observe(self, request: Request, result: VerifyResult) -> None:
        if request.request_id in self._caches:  # else it was never asked for this request
            self._cache_of(request)

    def finish(self, request: Request) -> None:
        self._caches.pop(request.request_id, None)

    def _draft(self, request: Request, nodes: int, depth: int) -> Drafted:
        drafted: Drafted = self._lookup.draft(
            self._cache_of(request),
            request.token_ids[-LONGEST_CONTEXT:],
            nodes,
            depth,
            self._branching,
            self.config.min_accept_prob,
        )
        return drafted

    def _cache_of(self, request: Request) -> Any:
        if not self._window:
            return None
        tokens = request.token_ids
        base, cache = self._caches.get(request.request_id, (0, None))
        if cache is None or len(tokens) - base > 2 * self._window:
            base, cache = max(0, len(tokens) - self._window), self._make_cache()
            self._caches[request.request_id] = base, cache
        if base + len(cache) < len(tokens):
            cache.extend(tokens, base + len(cache))
        return cache


def _parts(tables: NgramTables, is_native: bool | None) -> tuple[Any, Any]:
    """Look-ups in the tables, and what makes a cache for them; natively where that is possible."""
    if is_native is None:
        is_native = why_not_native() is None
    if not is_native:
        return NgramLookup(tables), TextCache
    native = native_module()
    return native.NgramLookup(tables.levels, tables.unigrams, tables.is_backoff), native.TextCache


def build(config: SpeculativeConfig, target: TargetInfo) -> NgramModelProposer:
    """Raises ModelLoadError for an unusable file, ConfigError for another vocabulary's."""
    assert config.model is not None
    tables = read_tables(config.model)
    tables.check_fits(config.model, target.vocab_size, target.fingerprint)
    return NgramModelProposer(config, tables)
