"""Measures what the host takes in a step and in drafting, with the engine as it decodes.

Two numbers of requests decode a text that repeats itself: plainly, with proposers that are asked
but keep what they draft to themselves, and with drafts of two lengths that take no time to make. A
step's host time is its wall time less that inside forwards.

At the end the planner drafts as it will for users, in some steps: then code and data of the host
leave the processor's caches between drafts, and the same work takes longer. For this the target is
made to say a text that repeats itself.

Of a draft model it measures what a call takes beyond the times of its forwards in a profile: the
work of its host, and that a forward takes longer where target and host have run in between. If the
machine was busier when the profile was made, only the work of the host counts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple, cast

from paceline.build.build import BuiltEngine
from paceline.cache.model_runner import ForwardResult, ModelRunner
from paceline.config import SpeculativeConfig
from paceline.config.speculative import ForwardingConfig, PromptLookupConfig, SuffixConfig
from paceline.core.errors import ConfigError
from paceline.engine.engine import Engine
from paceline.loading.checkpoint import Checkpoint
from paceline.models.backend import PackedBatch
from paceline.planner.cost_table import (
    NO_DRAFTING_HOST_TIME,
    NO_HOST_TIME,
    CostTable,
    DraftingHostTime,
    HostTime,
)
from paceline.planner.planner import CostAwarePlanner, new_drafts
from paceline.planner.value import Source
from paceline.proposers.base import DraftBudget, Proposer, TargetInfo
from paceline.proposers.draft_model import vocabulary_pair
from paceline.proposers.draft_model.heterogeneous import (
    HeterogeneousProposer,
    ShadowDrafter,
    shadow_config,
)
from paceline.proposers.draft_model.loading import PaddedRunner
from paceline.proposers.draft_model.proposer import DraftModelProposer
from paceline.proposers.draft_model.self_draft import SelfDraftProposer
from paceline.proposers.heads.proposer import HeadDrafter
from paceline.request.request import NO_DRAFT, Request, VerifyResult
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.request.span import DraftTree, Span

NEW, REPEATED = 32, 16
"""Tokens that no draft can know, and how many of these come again after them."""
PROMPT_LENGTH = 64
DRAFTED_STEPS = 400
"""Most steps that are measured."""
FEW, MANY = 1, 4
"""Requests of the runs; fewer where the engine allows no more."""
SHORT, LONG = 4, 16
"""Lengths of the drafts."""
PERIOD, PERIODS = 16, 4
"""Tokens that a prompt repeats, and how often."""
WARM_UP_STEPS, STEPS = 8, 64
MAX_SECONDS = 3.0
"""Of each run, however slow the model is."""
WARM_UP_SECONDS = 0.3
LEAST_SELDOM = 8
"""Drafted steps among others that tell more than those of a run in which all steps are."""
SLOWEST = 0.1
"""Part of them that is left out: what else a machine does is no time of the host's."""
_CHAIN = SuffixConfig(
    num_speculative_tokens=LONG,
    max_tree_nodes=0,
    max_branching=1,
    suffix_decoding_max_cached_requests=0,
)
CALLED = (_CHAIN, PromptLookupConfig())
"""Whose calls are measured in any case: they need no model."""


class DraftedStep(NamedTuple):
    """A step with a draft: milliseconds outside of forwards, those of planning, and nodes."""

    ms: float
    planning_ms: float
    nodes: int


class _Scripted:
    """A model runner whose target says what a script says; forwards are run all the same."""

    def __init__(self, runner: ModelRunner, script: Sequence[int]) -> None:
        self._runner, self._script = runner, script
        self._spans: Sequence[Span] = ()
        self._own_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def seconds(self) -> float:
        """Inside forwards, reading the script included."""
        return self._runner.seconds + self._own_seconds

    @property
    def num_nodes(self) -> int:
        """Draft nodes of the latest step."""
        return sum(max(0, len(span.sample_rows) - 1) for span in self._spans)

    def pack(self, spans: Sequence[Span], adapters: Sequence[Any] = ()) -> PackedBatch:
        self._spans = spans
        return self._runner.pack(spans, adapters)

    def forward(self, batch: PackedBatch, greedy: bool = False) -> ForwardResult:
        result = self._runner.forward(batch, greedy)
        began = time.perf_counter()
        said = [token for span in self._spans for token in following(self._script, span)]
        self._own_seconds += time.perf_counter() - began
        return replace(result, argmax=said)


def following(script: Sequence[int], span: Span) -> list[int]:
    """The token of a script that follows each sampled row of a span; the last one without end."""
    depths: list[int] = []
    for parent in span.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    last = len(script) - 1
    return [script[min(span.start + depths[row] + 1, last)] for row in span.sample_rows]


def drafted_steps(engine: Engine, most_seconds: float) -> list[DraftedStep]:
    """Steps with drafts while an idle engine, with its proposers, answers such a text.

    There are none where another planner than the cost-aware one decides about them.
    """
    planner = engine.drafting.planner
    if not isinstance(planner, CostAwarePlanner):
        return []
    assert engine.config.max_model_len is not None
    script = _text(engine.vocab_size, engine.config.max_model_len)
    runner, drafted = engine.runner, list[DraftedStep]()
    scripted = _Scripted(runner, script)
    engine.runner = cast(ModelRunner, scripted)
    params = SamplingParams(
        temperature=0.0, max_tokens=len(script) - PROMPT_LENGTH, ignore_eos=True
    )
    (request_id,) = engine.add_request(script[:PROMPT_LENGTH], params)
    end = time.perf_counter() + most_seconds
    try:
        for _ in range(DRAFTED_STEPS):
            if request_id not in engine.requests or time.perf_counter() > end:
                break
            planned_ms = _planning_ms(engine)
            forwards, began = scripted.seconds, time.perf_counter()
            engine.step()
            passed = time.perf_counter() - began - (scripted.seconds - forwards)
            if scripted.num_nodes:
                planning_ms = _planning_ms(engine) - planned_ms - planner.planned.draft_ms
                drafted.append(DraftedStep(passed * 1e3, planning_ms, scripted.num_nodes))
    finally:
        engine.abort(request_id)
        engine.step()
        engine.runner = runner
    return drafted


def _planning_ms(engine: Engine) -> float:
    """Milliseconds that the engine has spent on proposing and planning."""
    seconds = engine.stats().seconds
    return (seconds.get("propose", 0.0) + seconds.get("plan", 0.0)) * 1e3


def _text(vocab_size: int, length: int) -> list[int]:
    rng, text = random.Random(0), list[int]()
    while len(text) < length:
        new = rng.choices(range(vocab_size), k=NEW)
        text += [*new, *new[:REPEATED]]
    return text[:length]


class Silent:
    """A proposer that drafts as ever and then says nothing."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        self._proposer.propose(requests, budget)
        return [NO_DRAFT] * len(requests)


class _Echo(Proposer):
    """A proposer that drafts a request's latest tokens once more, whatever that is worth."""

    name = "echo"
    config = _CHAIN

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        limits = zip(requests, budget.max_depth, strict=True)
        return [self._chain(request.token_ids[-depth:]) for request, depth in limits]

    def _chain(self, token_ids: Sequence[int]) -> DraftTree:
        return DraftTree.chain(token_ids, [0.5] * len(token_ids), self.name)


class _Merging(_Echo):
    """An echo of two trees, which are made one and then kept back, and how long that took."""

    def __init__(self) -> None:
        self.ms: list[float] = []

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        for request, tree in zip(requests, super().propose(requests, budget), strict=True):
            drafts = new_drafts()
            drafts.begin([request.request_id])
            drafts.add(0, self.name, tree)
            drafts.add(0, self.name, self._chain(request.token_ids[: len(tree)]))
            began = time.perf_counter()
            drafts.sizes()
            self.ms.append((time.perf_counter() - began) * 1e3)
        return [NO_DRAFT] * len(requests)


class DecodingRun(NamedTuple):
    """Medians over steps: the host's milliseconds, and draft nodes."""

    ms: float
    nodes: float


def measure_host_time(built: BuiltEngine, further: Sequence[SpeculativeConfig] = ()) -> HostTime:
    """The host time of an idle engine, measured on its compute thread.

    Nothing is measured where the context is too short.

    Args:
        further: proposers whose calls are measured too, unless they need forwards.
    """
    if not has_room(built.config.max_model_len or 0):
        return NO_HOST_TIME
    before = built.engine.drafting.proposers
    called = {each.method: each for each in (*further, *CALLED) if not each.needs_forwards}
    try:
        return _measured(built, called.values())
    finally:
        built.engine.set_speculation(before)


def has_room(context: int) -> bool:
    """Whether a request of this length can take part in a whole run."""
    return context >= PERIOD * PERIODS + (WARM_UP_STEPS + STEPS) * (1 + SHORT)


def _measured(built: BuiltEngine, called: Iterable[SpeculativeConfig]) -> HostTime:
    engine, many = built.engine, min(MANY, built.config.max_num_seqs)
    further = max(1, many - FEW)
    engine.set_speculation([])
    plain, plain_many = decode(engine, FEW), decode(engine, many)
    echo, calls = Silent(_Echo()), {}
    engine.set_speculation([echo])  # asked in vain
    asked = decode(engine, FEW)
    for config in called:
        engine.set_speculation(built.proposers_for((config,)))
        calls[config.method] = _drafting_ms(engine)
    merging = _Merging()
    engine.set_speculation([merging])
    decode(engine, FEW)
    engine.set_speculation([_Echo()])  # each step has a draft, which takes no time to make
    short, short_many, long = decode(engine, FEW), decode(engine, many), decode(engine, FEW, LONG)
    node = max(0.0, (long.ms - short.ms) / max(1.0, long.nodes - short.nodes))
    one = short.ms - plain.ms - node * short.nodes
    all_of_them = short_many.ms - plain_many.ms - node * short_many.nodes
    ask, draft = _seldom(built, plain.ms, node, calls) or (
        asked.ms - plain.ms,
        short.ms - asked.ms - node * short.nodes,
    )
    return HostTime(
        step=plain.ms,
        request=max(0.0, plain_many.ms - plain.ms) / further,
        draft=max(0.0, draft),
        further_draft=max(0.0, all_of_them - one) / further,
        ask=max(0.0, ask),
        node=node,
        calls=calls,
        merge=statistics.median(merging.ms or [0.0]),
    )


def _drafting_ms(engine: Engine) -> float:
    """Milliseconds in which the proposers of an engine draft for one request."""
    planner, times = engine.drafting.planner, list[float]()
    drafted = planner.drafted

    def timed(source: Source, chosen: Sequence[int], milliseconds: float) -> None:
        times.append(milliseconds)
        drafted(source, chosen, milliseconds)

    # The engine looks the method up on the object, and so finds this one.
    vars(planner)["drafted"] = timed
    try:
        decode(engine, FEW)
    finally:
        del vars(planner)["drafted"]
    return statistics.median(times or [0.0])


def _seldom(
    built: BuiltEngine, plain_ms: float, node_ms: float, calls: Mapping[str, float]
) -> tuple[float, float] | None:
    """What planning takes, and what a draft adds, where the planner drafts in some steps."""
    built.engine.set_speculation(built.proposers_for(CALLED[:1]))
    drafted_steps(built.engine, WARM_UP_SECONDS)
    steps = drafted_steps(built.engine, MAX_SECONDS)
    if len(steps) < LEAST_SELDOM:
        return None
    ask = _usual([step.planning_ms for step in steps])
    whole = _usual([step.ms - node_ms * step.nodes for step in steps])
    return ask, whole - plain_ms - calls[CALLED[0].method] - ask


def _usual(times: Sequence[float]) -> float:
    """The mean without the slowest."""
    return statistics.fmean(sorted(times)[: ceil((1.0 - SLOWEST) * len(times))])


def decode(engine: Engine, requests: int, draft_length: int = SHORT) -> DecodingRun:
    """Steps in which ``requests`` decode together, with drafts if there are proposers."""
    rng, vocab = random.Random(0), engine.vocab_size
    wish = SpeculativeParams(num_speculative_tokens=draft_length)
    assert engine.config.max_model_len is not None
    room = engine.config.max_model_len - PERIOD * PERIODS
    most = min(room, (WARM_UP_STEPS + STEPS) * (1 + draft_length))
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, speculative=wish)
    ids: list[int] = []
    try:
        for _ in range(requests):
            ids += engine.add_request(rng.choices(range(vocab), k=PERIOD) * PERIODS, params)
        while any(engine.requests[i].num_uncomputed != 1 for i in ids):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        return _medians(engine, lambda: all(i in engine.requests for i in ids))
    finally:
        for request_id in ids:
            engine.abort(request_id)
        engine.step()


def _medians(engine: Engine, goes_on: Callable[[], bool]) -> DecodingRun:
    times: list[float] = []
    nodes: list[int] = []
    end = time.perf_counter() + MAX_SECONDS
    while goes_on() and len(times) < STEPS and (not times or time.perf_counter() < end):
        forwards, rows = engine.runner.seconds, engine.stats().num_rows
        live, began = len(engine.requests), time.perf_counter()
        engine.step()
        passed = time.perf_counter() - began
        times.append((passed - (engine.runner.seconds - forwards)) * 1e3)
        nodes.append(engine.stats().num_rows - rows - live)
    return DecodingRun(statistics.median(times), statistics.median(nodes))


LEVELS, BRANCHING = 4, 4
"""Of the drafts; those of one level and of one node per level are the others."""

Make = Callable[[ForwardingConfig], tuple[Proposer, ModelRunner]]
"""A proposer and what it runs."""


class DraftingRun(NamedTuple):
    """Medians over calls: milliseconds, those inside forwards, and how many forwards these were."""

    ms: float
    inside_ms: float
    forwards: float


class _Timed(Silent):
    """A silent draft model, and what each call took, the observing that follows included."""

    def __init__(self, proposer: Proposer, runner: ModelRunner) -> None:
        super().__init__(proposer)
        self._runner = runner
        self.calls: list[DraftingRun] = []

    def propose(self, requests: Sequence[Request], budget: DraftBudget) -> list[DraftTree]:
        runner, began = self._runner, time.perf_counter()
        inside, forwards = runner.seconds, runner.num_forwards
        silence = super().propose(requests, budget)
        ms, inside_ms = (time.perf_counter() - began) * 1e3, (runner.seconds - inside) * 1e3
        self.calls.append(DraftingRun(ms, inside_ms, runner.num_forwards - forwards))
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
    """What drafting for an idle engine takes, measured on its compute thread.

    Nothing is measured where a context is too short.

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
    table: CostTable,
    many: int,
    one: DraftingRun,
    several: DraftingRun,
    wide: DraftingRun,
    together: DraftingRun,
) -> DraftingHostTime:
    """Out of drafts of one level and of several, the latter with wide levels or many requests."""

    def beyond(run: DraftingRun, requests: int = FEW, nodes: int = 1) -> float:
        context = table.contexts[0]
        first = table.milliseconds(requests, context, requests=requests)
        level = table.milliseconds(requests * nodes, context, requests=requests)
        return run.ms - min(run.inside_ms, first + (run.forwards - 1) * level)

    further = several.forwards - one.forwards
    level = max(0.0, (beyond(several) - beyond(one)) / further) if further > 0 else 0.0
    call = max(0.0, beyond(one) - (one.forwards - 1) * level)

    def more(run: DraftingRun, beyond_ms: float) -> float:
        """What each further node or request of its levels adds, all of them together."""
        return max(0.0, beyond_ms - call - (run.forwards - 1) * level)

    wide_levels, further_requests = max(1.0, wide.forwards - 1), max(1, many - FEW)
    node = more(wide, beyond(wide, nodes=BRANCHING)) / (wide_levels * (BRANCHING - 1))
    request = more(together, beyond(together, many)) / (together.forwards * further_requests)
    # Where no two requests run together, what a further one adds is never needed.
    return DraftingHostTime(call, level, request if many > FEW else 0.0, node)


def run(
    built: BuiltEngine, made: tuple[Proposer, ModelRunner], requests: int, levels: int
) -> DraftingRun:
    timed = _Timed(*made)
    built.engine.set_speculation([timed])
    decode(built.engine, requests, levels)
    calls = timed.calls[-STEPS:]
    if not calls:
        return DraftingRun(0.0, 0.0, 0.0)
    return DraftingRun(*(statistics.median(each) for each in zip(*calls, strict=True)))


def head_maker(proposer: HeadDrafter) -> Make:
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
