"""Drafts what followed the longest matches, in the request and in earlier answers.

Owns an automaton per request, which takes in all of its tokens whoever proposed them, and those of
finished requests. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from paceline.config.speculative import SuffixConfig
from paceline.planner.drafts import TextDrafter
from paceline.proposers.base import TargetInfo, TextProposer
from paceline.proposers.suffix.automaton import SuffixAutomaton
from paceline.proposers.suffix.growth import SuffixRules, SuffixText, others_by_length
from paceline.proposers.suffix.shared import SharedTexts
from paceline.request.request import Request

NAME = "suffix"


class SuffixProposer(TextProposer):
    """See the module's docstring."""

    name = NAME
    config: SuffixConfig
    sees_matches = True

    def __init__(self, config: SuffixConfig, is_native: bool | None = None) -> None:
        super().__init__(config, is_native)
        native = self._native
        self._make_automaton: Any = native.SuffixAutomaton if native else SuffixAutomaton
        self._make_text: Any = native.SuffixText if native else SuffixText
        self._drafter = (native.SuffixRules if native else SuffixRules)(
            others_by_length(config.suffix_decoding_max_tree_depth),
            branching=self._branching,
            min_token_prob=config.suffix_decoding_min_token_prob,
            min_path_prob=config.min_accept_prob,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
        )
        self._shared = SharedTexts(
            self._new_automaton,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_cached_tokens,
        )

        self._known: dict[int, list[Any]] = {}
        """By request: the automata that its text shares with others."""

    def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
        drafters = super().drafters(requests)
        for request, text in zip(requests, drafters, strict=True):
            shared = self._shared.automata(request.cache_salt)
            if shared != self._known[request.request_id]:
                self._known[request.request_id] = shared
                cast(Any, text).share(shared)
        return drafters

    def matched(self, request: Request) -> int:
        text = self._texts.get(request.request_id) or self.drafters([request])[0]
        return int(cast(Any, text).matched(request.token_ids))

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._known.pop(request.request_id, None)
        has_ended = request.finish_reason is not None  # otherwise it was preempted and comes back
        if has_ended and request.num_output_tokens:
            start = max(0, request.prompt_len - self.config.suffix_decoding_max_tree_depth)
            self._shared.add(request.cache_salt, request.token_ids[start:])

    def _new_automaton(self) -> Any:
        return self._make_automaton(self.config.suffix_decoding_max_tree_depth)

    def _open(self, request: Request) -> TextDrafter:
        self._known[request.request_id] = []
        text: TextDrafter = self._make_text(
            self._drafter, self.config.suffix_decoding_max_tree_depth
        )
        return text


def build(config: SuffixConfig, target: TargetInfo) -> SuffixProposer:
    return SuffixProposer(config)
