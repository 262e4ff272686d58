"""What an engine tells of itself: its facts, and counters of it and of each request.

Definitions: a *draft token* is a draft node that was verified; acceptance rate is accepted over
draft tokens; mean acceptance length is emitted tokens over verify steps, with the bonus token and
plain steps counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from paceline.request.sampling_params import AS_LLAMA_CPP, SamplingDefaults


@dataclass(slots=True)
class ProposerCounters:
    """What became of one proposer's nodes. A node that several drafted is the surest one's.

    Attributes:
        num_drafts: verified drafts with at least one node of this proposer.
        num_draft_tokens: nodes of this proposer that were verified.
        num_accepted_tokens_per_pos: accepted nodes of this proposer at each depth, from 1 up.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_pos)

    def add(self, other: ProposerCounters, times: int = 1) -> None:
        """Count what another has counted, so many times; -1 takes it back."""
        self.num_drafts += times * other.num_drafts
        self.num_draft_tokens += times * other.num_draft_tokens
        both = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        summed = [mine + times * theirs for mine, theirs in zip_longest(*both, fillvalue=0)]
        self.num_accepted_tokens_per_pos = summed


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
    by_proposer: dict[str, ProposerCounters] = field(default_factory=dict)

    def record(
        self,
        num_emitted: int,
        draft_origins: Sequence[str],
        accepted_origins: Sequence[str],
        draft_depth: int,
    ) -> None:
        """Count one verify step of one request.

        Args:
            num_emitted: tokens that were emitted, bonus token included, after any cut.
            draft_origins: who drafted each node that was verified.
            accepted_origins: who drafted each accepted token.
            draft_depth: depth of the draft, 0 when there was none.
        """
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        if not draft_origins:
            return
        accepted = len(accepted_origins)
        self.num_drafts += 1
        self.num_draft_tokens += len(draft_origins)
        self.num_accepted_tokens += accepted
        self.drafts_by_depth[draft_depth] = self.drafts_by_depth.get(draft_depth, 0) + 1
        self.drafts_by_accepted[accepted] = self.drafts_by_accepted.get(accepted, 0) + 1
        for origin in dict.fromkeys(draft_origins):
            own = self.by_proposer.get(origin)
            if own is None:
                own = self.by_proposer[origin] = ProposerCounters()
            own.num_drafts += 1
            own.num_draft_tokens += draft_origins.count(origin)
        latest, counts = "", list[int]()
        for position, origin in enumerate(accepted_origins):
            if origin != latest:
                latest, counts = origin, self.by_proposer[origin].num_accepted_tokens_per_pos
            if len(counts) <= position:
                counts += [0] * (position + 1 - len(counts))
            counts[position] += 1

    def add(self, other: SpeculationCounters, times: int = 1) -> None:
        """Count what another has counted, so many times; -1 takes it back."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for mine, theirs in (
            (self.drafts_by_depth, other.drafts_by_depth),
            (self.drafts_by_accepted, other.drafts_by_accepted),
        ):
            for value, count in theirs.items():
                mine[value] = mine.get(value, 0) + times * count
        for origin, counters in other.by_proposer.items():
            self.by_proposer.setdefault(origin, ProposerCounters()).add(counters, times)

    @property
    def num_accepted_by_origin(self) -> dict[str, int]:
        """Accepted tokens of each proposer that drafted."""
        return {name: own.num_accepted_tokens for name, own in self.by_proposer.items()}

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


_COUNTS = [each.name for each in fields(SpeculationCounters) if each.name.startswith("num_")]


def _at_least(counts: Mapping[int, int], highest: int) -> list[int]:
    """For each value from 1 to ``highest``, how many were that or more."""
    return [
        sum(count for value, count in counts.items() if value >= floor)
        for floor in range(1, highest + 1)
    ]


@dataclass(slots=True)
class EngineStats:
    """A snapshot of what an engine has done since it started or was last reset.

    Attributes:
        num_queried_tokens: tokens that were looked for in the prefix cache.
        num_cached_tokens: tokens that it had.
        num_experts_read: pairs of a layer and an expert that the target's forwards read, each pair
            counted once per forward.
        num_experts_fetched: of these, those that were not in memory and came from disk.
        num_weight_bytes_read: from disk, of weights that do not stay in memory; as the reads end.
        weight_wait_seconds: that forwards waited for them.
        expected_accepted_tokens: the planner's estimate for all drafts that were verified.
        decode_steps_by_rows: forwards in which all requests decoded, by their rows: the width that
            the planner chose.
        seconds: by phase of the step.
    """

    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)
    num_requests: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_target_forwards: int = 0
    num_draft_forwards: int = 0
    num_rows: int = 0
    num_experts_read: int = 0
    num_experts_fetched: int = 0
    num_weight_bytes_read: int = 0
    weight_wait_seconds: float = 0.0
    num_preemptions: int = 0
    num_failed_requests: int = 0
    num_proposer_failures: int = 0
    num_clamped_estimates: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    expected_accepted_tokens: float = 0.0
    decode_steps_by_rows: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        """Set everything to zero."""
        EngineStats.__init__(self)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives.

    Attributes:
        model: its name, for people.
        max_model_len: most tokens of a prompt and its answer together: the context, or what the
            KV cache holds where that is less.
        promises_identity: plain and speculative answers are equal by construction.
        dtype: how it computes, for people: a GGUF file's own format by its name.
        proposers: who drafts, as the engine was started.
        kv_blocks_total: blocks of ``block_size`` tokens.
        cost_curve: predicted step of one request: (rows, milliseconds). Without a profile the
            second are multiples of the plain step.
        sampling: how a request that says nothing is sampled.
        architecture: the model's family.
        num_bytes: of its weights as they are stored.
        kv_bytes: of the whole KV cache.
        num_weights: of its embeddings, head and layers.
        longest_token: characters of the longest token; 0 without a tokenizer. To tell it takes a
            look at the whole vocabulary.
        pooling: how it was trained to make one vector of a text; empty where no file says it.
    """

    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    backend: str
    promises_identity: bool
    proposers: tuple[str, ...]
    max_num_seqs: int
    kv_blocks_total: int
    block_size: int
    cost_curve: tuple[tuple[int, float], ...] = ()
    has_profile: bool = False
    sampling: SamplingDefaults = AS_LLAMA_CPP
    architecture: str = ""
    hidden_size: int = 0
    num_layers: int = 0
    num_bytes: int = 0
    kv_bytes: int = 0
    num_weights: int = 0
    longest_token: int = 0
    pooling: str = ""
