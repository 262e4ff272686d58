"""Drafts what followed the longest matches, in the request and in earlier answers.

Owns an automaton per request, which takes in all of its tokens whoever proposed them, and those of
finished requests. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import SpeculativeConfig
from paceline.models.ops.native import native_module, why_not_native
from paceline.proposers.base import DraftBudget, Drafted, Proposer, TargetInfo, draft_each
from paceline.proposers.suffix import automaton, growth
from paceline.proposers.suffix.shared import SharedTexts
from paceline.request import Request
from paceline.span import DraftTree

NAME = "suffix"


@dataclass(slots=True)
class _Text:
    """One request's text, and where it is in its own automaton and in the shared ones.

    Attributes:
        length: tokens that its own automaton has.
    """

    automaton: Any
    cursors: list[Any]
    shared: list[Any]
    length: int = 0


class SuffixProposer(Proposer):
    """See the module's docstring.

    Args:
        is_native: take the native automaton; None is where it was built.
    """

    name = NAME

    def __init__(self, config: SpeculativeConfig, is_native: bool | None = None) -> None:
        self.config = config
        if is_native is None:
            is_native = why_not_native() is None
        native: Any = native_module() if is_native else None
        self._parts = native or automaton
        self._drafter = (native or growth).SuffixDrafter(
            growth.others_by_length(config.suffix_decoding_max_tree_depth),
            branching=config.max_branching if config.max_tree_nodes else 1,
            min_token_prob=config.suffix_decoding_min_token_prob,
            min_path_prob=config.min_accept_prob,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
        )
        self._texts: dict[int, _Text] = {}
        self._shared = SharedTexts(
            self._new_automaton,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_cached_tokens,
        )

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        return draft_each(self._draft, requests, budget, self.config)

    def finish(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)
        has_ended = request.finish_reason is not None  # otherwise it was preempted and comes back
        if has_ended and request.num_output_tokens:
            start = max(0, request.prompt_len - self.config.suffix_decoding_max_tree_depth)
            self._shared.add(request.cache_salt, request.token_ids[start:])

    def _new_automaton(self) -> Any:
        return self._parts.SuffixAutomaton(self.config.suffix_decoding_max_tree_depth)

    def _draft(self, request: Request, nodes: int, depth: int) -> Drafted:
        cursors = self._cursors(request)
        drafted: Drafted = self._drafter.draft(cursors, request.token_ids, nodes, depth)
        return drafted

    def _cursors(self, request: Request) -> list[Any]:
        """Where a request's text is, in its own automaton, which has all of it, and in others."""
        text = self._texts.get(request.request_id)
        if text is None:
            own = self._new_automaton()
            text = _Text(own, [self._parts.SuffixCursor(own, is_own=True)], [])
            self._texts[request.request_id] = text
        if text.length < (length := len(request.token_ids)):
            text.automaton.extend(request.token_ids, text.length)
            text.length = length
        shared = self._shared.automata(request.cache_salt)
        if text.shared != shared:
            text.cursors[1:] = map(self._parts.SuffixCursor, shared)
            text.shared = shared
        return text.cursors


def build(config: SpeculativeConfig, target: TargetInfo) -> SuffixProposer:
    return SuffixProposer(config)
