"""Counters of the engine and of each request. Owns counts and the ratios derived from them.

Definitions: a *draft token* is a draft node that was verified; acceptance rate is accepted over
draft tokens; mean acceptance length is emitted tokens over verify steps, with the bonus token and
plain steps counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationCounters:
    """Counts from which every speculation figure follows."""

    num_steps: int = 0
    num_emitted_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_pruned_tokens: int = 0
    drafts_by_depth: dict[int, int] = field(default_factory=dict)
    drafts_by_accepted: dict[int, int] = field(default_factory=dict)
    num_accepted_by_origin: dict[str, int] = field(default_factory=dict)

    def record(
        self, num_emitted: int, num_draft: int, accepted_origins: Sequence[str], draft_depth: int
    ) -> None:
        """Count one verify step of one request.

        Args:
            num_emitted: tokens that were emitted, bonus token included, after any cut.
            num_draft: draft nodes that were verified.
            accepted_origins: who drafted each accepted token.
            draft_depth: depth of the draft, 0 when there was none.
        """
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        if not num_draft:
            return
        accepted = len(accepted_origins)
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += accepted
        self.drafts_by_depth[draft_depth] = self.drafts_by_depth.get(draft_depth, 0) + 1
        self.drafts_by_accepted[accepted] = self.drafts_by_accepted.get(accepted, 0) + 1
        by_origin = self.num_accepted_by_origin
        for origin in accepted_origins:
            by_origin[origin] = by_origin.get(origin, 0) + 1

    @property
    def num_drafts_per_pos(self) -> list[int]:
        """How many drafts reached each depth, from 1 up."""
        return _at_least(self.drafts_by_depth, max(self.drafts_by_depth, default=0))

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """How many drafts were accepted to each depth, from 1 up."""
        return _at_least(self.drafts_by_accepted, max(self.drafts_by_depth, default=0))

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return self.num_emitted_tokens / self.num_steps if self.num_steps else 0.0


def _at_least(counts: Mapping[int, int], highest: int) -> list[int]:
    """For each value from 1 to ``highest``, how many were that or more."""
    return [
        sum(count for value, count in counts.items() if value >= floor)
        for floor in range(1, highest + 1)
    ]


@dataclass(slots=True)
class EngineStats:
    """A snapshot of what an engine has done since it started or was last reset."""

    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)
    num_requests: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_target_forwards: int = 0
    num_draft_forwards: int = 0
    num_rows: int = 0
    num_preemptions: int = 0
    num_failed_requests: int = 0
    num_proposer_failures: int = 0
    num_clamped_estimates: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_seconds(self, phase: str, began: float) -> float:
        """Charge the time since ``began`` to a phase and return the time it is."""
        ended = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + ended - began
        return ended
