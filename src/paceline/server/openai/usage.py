"""What a request cost, as answers tell it. Knows no endpoint."""

from __future__ import annotations

from typing import Any

from paceline.request.metrics import SpeculationCounters
from paceline.server.chat.thought_tokens import ThoughtCount
from paceline.server.engine_process.messages import Piece
from paceline.server.protocol.common import GenerationFields


class Usage:
    """Sums over all samples of all prompts of a request."""

    def __init__(self, num_prompt_tokens: int, body: GenerationFields) -> None:
        self._is_told_early = body.wants_usage_so_far
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._thoughts = ThoughtCount()
        self._counters = SpeculationCounters() if body.include_metrics else None

    def take(self, piece: Piece) -> None:
        self._num_output_tokens += len(piece.token_ids)
        self._num_cached_tokens += piece.num_cached_tokens
        if piece.counters is not None and self._counters is not None:
            self._counters.add(piece.counters)

    def take_thoughts(self, more: ThoughtCount) -> None:
        """Tokens of those that were taken are thoughts."""
        inside, marked = self._thoughts
        self._thoughts = ThoughtCount(inside + more.inside, marked + more.marked)

    @property
    def num_thinking_tokens(self) -> int:
        """Of thoughts with their marks, which Anthropic counts and OpenAI does not."""
        return self._thoughts.marked

    def so_far(self) -> dict[str, Any] | None:
        """The usage for an event of a stream that goes on; None where only the end is to say it."""
        return self.document() if self._is_told_early else None

    def document(self) -> dict[str, Any]:
        """As OpenAI has it; ``metrics`` is ours."""
        document: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._thoughts.inside},
        }
        if self._counters is not None:
            document["metrics"] = {"speculative_decoding": speculation_document(self._counters)}
        return document


def speculation_document(counters: SpeculationCounters) -> dict[str, Any]:
    """Counters and ratios of one request, as :mod:`paceline.request.metrics` defines them."""
    return {
        "mean_acceptance_length": counters.mean_acceptance_length,
        "acceptance_rate": counters.acceptance_rate,
        "num_steps": counters.num_steps,
        "num_drafts": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "drafts_per_position": counters.num_drafts_per_pos,
        "accepted_per_position": counters.num_accepted_tokens_per_pos,
        "num_accepted_by_origin": counters.num_accepted_by_origin,
    }
