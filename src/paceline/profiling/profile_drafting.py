"""Measures what a model that drafts takes beyond its forwards, while a target decodes.

Batches are built, logits ranked, trees grown, and KV is kept or rolled back. A forward itself takes
longer, too, where target and host have come between than where it follows on itself, as it does
when its time is measured. Both are in what a call takes beyond the times of its forwards. Where
these were measured while the machine was busier than it is here, the former is all that is told.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.build.build import BuiltEngine
from paceline.cache.model_runner import ModelRunner
from paceline.config.speculative import ForwardingConfig
from paceline.core.errors import ConfigError
from paceline.loading.checkpoint import Checkpoint
from paceline.planner.cost_table import NO_DRAFTING_HOST_TIME, CostTable, DraftingHostTime
from paceline.profiling.profile_host import FEW, MANY, STEPS, Silent, decode, has_room
from paceline.proposers.base import DraftBudget, Proposer, TargetInfo
from paceline.proposers.draft_model.build import vocabulary_pair
from paceline.proposers.draft_model.heterogeneous import HeterogeneousProposer, shadow_config
from paceline.proposers.draft_model.loading import PaddedRunner
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.draft_model.self_draft import SelfDraftProposer
from paceline.proposers.draft_model.shadows import ShadowDrafter
from paceline.proposers.heads.drafter import FeatureDrafter
from paceline.request.request import Request, VerifyResult
from paceline.request.span import DraftTree

LEVELS, BRANCHING = 4, 4
"""Of the drafts; those of one level and of one node per level are the others."""

Make = Callable[[ForwardingConfig], tuple[Proposer, ModelRunner]]
"""A proposer and what it runs."""


class Run(NamedTuple):
    """Medians over calls: milliseconds, those inside forwards, and how many forwards these were."""

    ms: float
    inside_ms: float
    forwards: float


class _Timed(Silent):
    """A silent draft model, and what each call took, the observing that follows included."""

    def __init__(self, proposer: Proposer, runner: ModelRunner) -> None:
        super().__init__(proposer)
        self._runner = runner
        self.calls: list[Run] = []

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        runner, began = self._runner, time.perf_counter()
        inside, forwards = runner.seconds, runner.num_forwards
        silence = super().propose(requests, budget)
        ms, inside_ms = (time.perf_counter() - began) * 1e3, (runner.seconds - inside) * 1e3
        self.calls.append(Run(ms, inside_ms, runner.num_forwards - forwards))
        return silence

    def observe(self, request: Request, result: VerifyResult) -> None:
        began = time.perf_counter()
        self._proposer.observe(request, result)
        if self.calls:
            call = self.calls[-1]
            self.calls[-1] = call._replace(ms=call.ms + (time.perf_counter() - began) * 1e3)


def measure_drafting(
    built: BuiltEngine, draft: ForwardingConfig, make: Make, table: CostTable
) -> DraftingHostTime:
    """What drafting for an engine without requests takes, on whose compute thread this is called.

    Nothing is measured where a context is too short for it.

    Args:
        make: of the draft; its KV cache is empty.
        table: what its forwards take.

    Raises:
        ConfigError: its vocabulary and the target's do not go together.
    """
    chain = replace(
        draft,
        num_speculative_tokens=LEVELS,
        max_tree_nodes=0,
        max_branching=1,
        min_accept_prob=0.0,
    )
    tree = replace(chain, max_tree_nodes=LEVELS * BRANCHING, max_branching=BRANCHING)
    longest = make(chain)[1].decoder.max_len
    if not has_room(min(built.config.max_model_len or 0, longest)):
        return NO_DRAFTING_HOST_TIME
    many, before = min(MANY, built.config.max_num_seqs), built.engine.drafting.proposers
    try:
        one = run(built, make(chain), FEW, 1)
        several = run(built, make(chain), FEW, LEVELS)
        wide = run(built, make(tree), FEW, LEVELS)
        together = run(built, make(chain), many, LEVELS)
    finally:
        built.engine.set_speculation(before)
    runs = one, several, wide, together
    if any(run.forwards < 1 for run in runs):
        return NO_DRAFTING_HOST_TIME
    return host_time(table, many, *runs)


def host_time(
    table: CostTable, many: int, one: Run, several: Run, wide: Run, together: Run
) -> DraftingHostTime:
    """Out of drafts of one level and of several, the latter with wide levels or many requests."""

    def beyond(run: Run, requests: int = FEW, nodes: int = 1) -> float:
        context = table.contexts[0]
        first = table.milliseconds(requests, context, requests=requests)
        level = table.milliseconds(requests * nodes, context, requests=requests)
        return run.ms - min(run.inside_ms, first + (run.forwards - 1) * level)

    further = several.forwards - one.forwards
    level = max(0.0, (beyond(several) - beyond(one)) / further) if further > 0 else 0.0
    call = max(0.0, beyond(one) - (one.forwards - 1) * level)

    def more(run: Run, beyond_ms: float) -> float:
        """What each further node or request of its levels adds, all of them together."""
        return max(0.0, beyond_ms - call - (run.forwards - 1) * level)

    wide_levels, further_requests = max(1.0, wide.forwards - 1), max(1, many - FEW)
    node = more(wide, beyond(wide, nodes=BRANCHING)) / (wide_levels * (BRANCHING - 1))
    request = more(together, beyond(together, many)) / (together.forwards * further_requests)
    # Where no two requests run together, nobody asks for what a further one adds.
    return DraftingHostTime(call, level, request if many > FEW else 0.0, node)


def run(built: BuiltEngine, made: tuple[Proposer, ModelRunner], requests: int, levels: int) -> Run:
    timed = _Timed(*made)
    built.engine.set_speculation([timed])
    decode(built.engine, requests, levels)
    calls = timed.calls[-STEPS:]
    if not calls:
        return Run(0.0, 0.0, 0.0)
    return Run(*(statistics.median(each) for each in zip(*calls, strict=True)))


def head_maker(proposer: FeatureDrafter) -> Make:
    """Makes one head draft as each configuration says, between requests."""

    def make(config: ForwardingConfig) -> tuple[Proposer, ModelRunner]:
        proposer.config = config
        return proposer, proposer.runner

    return make


def model_maker(checkpoint: Checkpoint, runner: ModelRunner, built: BuiltEngine) -> Make:
    """Makes proposers that draft with a loaded model, as they do in an engine."""
    target = built.target

    def make(config: ForwardingConfig) -> tuple[Proposer, ModelRunner]:
        if config.method == "self":
            own = ModelRunner(runner.decoder, built.engine.runner.kv)
            return SelfDraftProposer(config, own), own
        both = target.tokenizer is not None and checkpoint.tokenizer is not None
        pair = vocabulary_pair(checkpoint, config, target) if both else None
        if pair is None:
            wide = _as_wide(runner, target)
            return DraftModelProposer(config, wide), wide
        drafter = ShadowDrafter(shadow_config(config), runner, pair, config.tree_branching)
        return HeterogeneousProposer(config, drafter, pair), runner

    return make


def _as_wide(runner: ModelRunner, target: TargetInfo) -> ModelRunner:
    """A draft whose logits are as wide as the target's."""
    if runner.decoder.config.vocab_size == target.vocab_size:
        return runner
    if runner.decoder.pruned_head is not None:
        raise ConfigError("a draft with a pruned head must be as wide as the target")
    return PaddedRunner(runner.decoder, runner.kv, target.vocab_size)
