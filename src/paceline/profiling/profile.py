"""How long a model's steps take on this machine: the measurement behind ``paceline profile``.

Target and draft model are measured in the same rounds, on the process's compute thread, as the
engine builds and runs them. Also says what it costs to check drafts and which of them pay, with
times of the host and without those of drafting.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.resources import files
from operator import mul
from typing import NamedTuple

from paceline.build.build import DRAFT_SHARE, BuiltEngine, build_engine, expert_cost, kv_budget
from paceline.cache.model_runner import ModelRunner
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.speculative import ForwardingConfig, HeadConfig
from paceline.core.errors import ConfigError
from paceline.engine.threads import COMPUTE
from paceline.loading.checkpoint import Checkpoint
from paceline.models.threads import num_threads
from paceline.planner.cost_table import CostPoint, CostTable, ExpertCost, HostTime
from paceline.profiling.machine import ProfileKey, Roofs, Work, measure_roofs, profile_key
from paceline.profiling.profile_host import (
    Make,
    head_maker,
    measure_drafting,
    measure_host_time,
    model_maker,
)
from paceline.profiling.profile_steps import (
    CONTEXTS,
    REQUESTS,
    WIDTHS,
    MeasuredStep,
    StepBench,
    StepTask,
    Timing,
    measure,
    num_fitting,
    num_held,
    plan_steps,
)
from paceline.proposers.draft_model.loading import draft_dtype, draft_runner, open_draft
from paceline.proposers.heads import build_head, open_head

BUDGET_SECONDS = 30.0
BUSY = 0.25
"""A median spread, relative to the time, from which on the machine is called busy."""


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What is measured, and for how long.

    Attributes:
        widths: rows of one request's step.
        contexts: committed tokens; those beyond a model's limit are left out.
        budget_seconds: of the rounds; see :func:`paceline.profiling.profile_steps.measure`.
        proposers: whose calls are measured where they take no forwards.
    """

    widths: Sequence[int] = WIDTHS
    contexts: Sequence[int] = CONTEXTS
    budget_seconds: float = BUDGET_SECONDS
    proposers: Sequence[SpeculativeConfig] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured steps of one model.

    Attributes:
        table: what its steps cost.
        key: of what and where; None for a table that was imported.
        roofs, work: for comparing the steps with the machine; None likewise.
    """

    table: CostTable
    key: ProfileKey | None = None
    roofs: Roofs | None = None
    work: Work | None = None

    @property
    def unrest(self) -> float:
        """The median spread of its steps, relative to their times."""
        return statistics.median(point.spread / point.ms for point in self.table.points)

    @property
    def is_noisy(self) -> bool:
        """Whether it was measured on a busy machine: such a profile is not kept."""
        return self.unrest > BUSY


@dataclass(frozen=True, slots=True)
class _MeasuredModel:
    """A model that is measured, with its resolved precisions."""

    name: str
    runner: ModelRunner
    dtype: str
    kv_dtype: str
    checkpoint: Checkpoint

    @property
    def experts(self) -> ExpertCost | None:
        """Its mixtures, of unmeasured cost."""
        return expert_cost(self.runner.decoder.config)


def measure_profiles(
    model: str,
    config: EngineConfig,
    draft: SpeculativeConfig | None = None,
    settings: ProfileSettings | None = None,
    advance: Callable[[float], None] = lambda share: None,
) -> tuple[list[Profile], list[str]]:
    """Profiles of a target and of its draft model or head, if any, and remarks on what was left.

    Args:
        draft: as a proposer would be configured with it.
        advance: gets the share that is done, on another thread.

    Raises:
        ConfigError, ModelLoadError: a model cannot be loaded, or nothing can be measured.
    """
    wish = settings or ProfileSettings()
    return COMPUTE.call(lambda: _measure(model, config, draft, wish, advance))


def _measure(
    model: str,
    config: EngineConfig,
    draft: SpeculativeConfig | None,
    settings: ProfileSettings,
    advance: Callable[[float], None],
) -> tuple[list[Profile], list[str]]:
    built, limits = _with_room(model, config, len(settings.contexts))
    subjects, make = [_target(built)], None
    if draft is not None:
        assert isinstance(draft, ForwardingConfig)
        drafting, make = (
            _head(draft, built) if isinstance(draft, HeadConfig) else _draft(draft, built)
        )
        subjects.append(drafting)
    tasks: dict[tuple[int, MeasuredStep], StepTask] = {}
    benches: list[StepBench] = []
    notes: list[str] = []
    with ExitStack() as stack:
        for index, subject in enumerate(subjects):
            longest, mixture = subject.runner.decoder.max_len, subject.experts is not None
            steps, remarks = plan_steps(
                settings.widths, settings.contexts, longest, limits, mixture
            )
            notes += [f"{subject.name}: {remark}" for remark in remarks]
            bench = StepBench(subject.runner, text=_text(subject) if mixture else ())
            benches.append(bench)
            stack.callback(bench.close)
            tasks |= {(index, step): task for step, task in bench.tasks(steps).items()}
        timings = measure(tasks, settings.budget_seconds, advance)
    profiles = [
        _profile(
            subject,
            {step: each for (at, step), each in timings.items() if at == index},
            benches[index].experts,
        )
        for index, subject in enumerate(subjects)
    ]
    notes += [
        f"{each.table.name}: times vary by {each.unrest:.0%}: the machine is busy, measure again "
        "when it rests"
        for each in profiles
        if each.is_noisy
    ]
    profiles[0].table.host = measure_host_time(built, settings.proposers)
    if draft is not None and make is not None:
        table = profiles[1].table
        try:
            table.host = HostTime(drafting=measure_drafting(built, draft, make, table))
        except ConfigError as error:
            what = "what drafting takes besides forwards is not measured"
            notes.append(f"{subjects[1].name}: {what}: {error}")
    return profiles, notes


def _with_room(
    model: str, config: EngineConfig, num_contexts: int
) -> tuple[BuiltEngine, EngineConfig]:
    """The engine, with room for the requests of all contexts at once, and the limits of a step."""
    if config.pipeline_parallel_size > 1:
        raise ConfigError("no profile: what steps take in stages is learnt while they run")
    most = min(config.max_num_seqs, max(REQUESTS))
    held = max(config.max_num_seqs, num_held(most, num_contexts))
    built = build_engine(model, replace(config, max_num_seqs=held))
    if built.config.max_num_seqs < held:
        most = min(most, num_fitting(built.config.max_num_seqs, num_contexts))
    return built, replace(built.config, max_num_seqs=most)


def _target(built: BuiltEngine) -> _MeasuredModel:
    config, checkpoint, runner = built.config, built.checkpoint, built.engine.runner
    return _MeasuredModel(checkpoint.name, runner, config.dtype, config.kv_cache_dtype, checkpoint)


def _head(draft: HeadConfig, built: BuiltEngine) -> tuple[_MeasuredModel, Make]:
    head = open_head(draft, built.target)
    proposer = build_head(head, draft, replace(built.target, kv_bytes=_kv_bytes(built)))
    subject = _drafting(head.decoder, proposer.runner, draft, built)
    if draft.model is None:  # it is a part of the target, and not to be taken for it
        subject = replace(subject, name=f"{subject.name}: {draft.method}")
    return subject, head_maker(proposer)


def _draft(draft: ForwardingConfig, built: BuiltEngine) -> tuple[_MeasuredModel, Make]:
    checkpoint = open_draft(draft, built.target)
    # Whatever its vocabulary: what it says is not looked at.
    vocab_size = checkpoint.config.vocab_size
    own = replace(built.target, kv_bytes=_kv_bytes(built), vocab_size=vocab_size)
    runner = draft_runner(checkpoint, draft, own)
    return _drafting(checkpoint, runner, draft, built), model_maker(checkpoint, runner, built)


def _kv_bytes(built: BuiltEngine) -> int:
    return max(built.target.kv_bytes, kv_budget(built.config) // DRAFT_SHARE)


def _drafting(
    checkpoint: Checkpoint, runner: ModelRunner, draft: ForwardingConfig, built: BuiltEngine
) -> _MeasuredModel:
    dtype = draft_dtype(draft, checkpoint, built.target)
    kv_dtype = runner.decoder.ops.default_kv_dtype
    return _MeasuredModel(checkpoint.name, runner, dtype, kv_dtype, checkpoint)


def _text(subject: _MeasuredModel) -> list[int]:
    """Text in the subject's tokens, because which experts rows choose depends on what they say."""
    tokenizer = subject.checkpoint.tokenizer
    if tokenizer is None:
        return []
    lines = (files("paceline") / "embedded" / "prompts.jsonl").read_text(encoding="utf-8")
    texts = [str(json.loads(line)["prompt"]) for line in lines.splitlines()]
    tokens = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    size = subject.runner.decoder.config.vocab_size  # some tokenizers have tokens beyond it
    return [token for token in tokens if token < size]


def ms_per_expert(
    timings: Mapping[MeasuredStep, Timing], read: Mapping[MeasuredStep, int]
) -> float:
    """How much longer a step takes per further expert that it reads, by least squares.

    Steps of different rows are compared with steps of as many rows that are alike.
    """
    pairs = [(step, replace(step, alike=False)) for step in timings if step.alike]
    further = [read[all_kinds] - read[alike] for alike, all_kinds in pairs]
    longer = [timings[all_kinds].ms - timings[alike].ms for alike, all_kinds in pairs]
    squares = sum(n * n for n in further)
    return max(0.0, sum(map(mul, further, longer)) / squares) if squares else 0.0


def _profile(
    subject: _MeasuredModel,
    timings: Mapping[MeasuredStep, Timing],
    read: Mapping[MeasuredStep, int],
) -> Profile:
    decoder, experts = subject.runner.decoder, subject.experts
    points = [
        CostPoint(
            step.requests,
            step.context,
            step.width,
            step.samples,
            timing.ms,
            timing.spread,
            read[step],
        )
        for step, timing in timings.items()
        if not step.alike
    ]
    if experts is not None:
        experts = experts._replace(ms=ms_per_expert(timings, read))
    return Profile(
        table=CostTable(subject.name, points, experts=experts),
        key=profile_key(
            subject.name,
            decoder.config,
            decoder.ops,
            subject.dtype,
            subject.kv_dtype,
            num_threads(),
            decoder.placement,
        ),
        roofs=measure_roofs(decoder.ops),
        work=Work.of(decoder.config, subject.dtype, subject.kv_dtype, subject.checkpoint.num_bytes),
    )


MOST_TOKENS = 32
"""Of a draft: no proposer drafts longer paths by default."""
EXAMPLE_TOKENS = 4
"""Of the draft whose cost :func:`draft_sentences` states."""


class PayingDrafts(NamedTuple):
    """Tokens of the longest draft that pays for being checked, and how many must be right."""

    longest: int
    needed: int


def checking_cost(table: CostTable, num_tokens: int) -> float:
    """Time of a step that checks a draft of ``num_tokens``, in plain steps, at the least context.

    A plain step decodes one token.
    """
    context, host = table.contexts[0], table.host
    plain = table.milliseconds(1, context) + host.of(1, 0)
    drafted = table.milliseconds(1 + num_tokens, context)
    return (drafted + host.of(1, 1, num_tokens, asked=True)) / plain


def paying_drafts(table: CostTable) -> PayingDrafts | None:
    """The longest drafts that pay with as few right tokens as possible; None where none does.

    A step that checks a draft brings a token more than are right of it.
    """
    costs = [checking_cost(table, count) for count in range(1, _most(table) + 1)]
    for needed in range(1, len(costs) + 1):
        paying = 0
        for cost in costs[needed - 1 :]:
            if cost >= 1 + needed:
                break
            paying += 1
        if paying:
            return PayingDrafts(needed - 1 + paying, needed)
    return None


def draft_sentences(table: CostTable) -> list[str]:
    """What checking a draft costs, and which drafts pay; nothing of a table of plain steps only."""
    count = min(EXAMPLE_TOKENS, _most(table))
    if not count:
        return []
    paying, cost = paying_drafts(table), checking_cost(table, count)
    what = "1 token" if count == 1 else f"{count} tokens"
    first = f"Checking {what} costs {cost:.2f} plain steps here."
    if paying is None:
        return [first, "No draft pays here, even if all of it is right."]
    if paying.longest == 1:
        return [first, "A draft of 1 token pays when it is right."]
    right = "1 of them is right" if paying.needed == 1 else f"{paying.needed} of them are right"
    return [first, f"Drafts of up to {paying.longest} tokens pay when {right}."]


def _most(table: CostTable) -> int:
    """Tokens of the longest draft whose check was measured, up to :data:`MOST_TOKENS`."""
    return min(MOST_TOKENS, table.base_points(table.contexts[0])[-1].width - 1)
