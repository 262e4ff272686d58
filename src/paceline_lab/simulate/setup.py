"""From a folder of traces and a model to a simulator: whose traces, which costs, which drafts.

No weights of the target are read. A draft model is run once per set of traces.

A model drafts well where it has learnt the answer itself, which tells nothing of other prompts: so
it is counted which prompts an n-gram model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.backends.resolve import resolve_ops
from paceline.build.build import DRAFT_SHARE, expert_cost, kv_budget, resolve_config, target_info
from paceline.build.weight_memory import placement_for
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.speculative import ForwardingConfig, HeadConfig
from paceline.core.errors import ConfigError, ProfileError, TraceError
from paceline.engine.threads import COMPUTE
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.models.backend import Ops
from paceline.models.config import ModelConfig
from paceline.models.threads import num_threads, set_num_threads
from paceline.planner.cost import prior_table
from paceline.planner.cost_table import (
    MAX_MS,
    NO_DRAFTING_HOST_TIME,
    NO_HOST_TIME,
    CostPoint,
    CostTable,
    ExpertCost,
)
from paceline.profiling.machine import Work, profile_key
from paceline.profiling.profile import Profile
from paceline.profiling.profile_store import find_imported, read_profile, stored_table
from paceline.proposers.base import TargetInfo
from paceline.proposers.draft_model.loading import draft_dtype
from paceline.proposers.ngram_model import context_key, read_tables
from paceline.request.traces import META, Trace, read_meta, read_traces
from paceline.tensors.placement import Placement
from paceline_lab.simulate.recorded_drafts import (
    HeadTarget,
    RecordedDrafts,
    check_vocabulary,
    draft_source,
)
from paceline_lab.simulate.recording import cached_drafts, record_all
from paceline_lab.simulate.simulator import Simulator, draft_name
from paceline_lab.trace.requests import answer_notes, check_model

Advance = Callable[[float], None]
MARK = " *"
"""Stands after the name of a row whose drafts come from such a model."""
HINT = "paceline trace MODEL --prompts FILE -o FOLDER makes one"
FOOTNOTE = "* with n-grams learnt from answers to these very prompts: other prompts will gain less"


def table_named(source: str) -> CostTable:
    """The cost table in the file of a profile, or the imported curve of a name."""
    path = Path(source)
    if path.is_file():
        try:
            return read_profile(path).table
        except ProfileError as error:
            raise ProfileError(
                f"{error}; paceline profile MODEL -o FILE writes a profile, and paceline profile "
                "--import FILE keeps published curves by their names"
            ) from error
    profile = find_imported(source)
    if profile is None:
        raise ProfileError(
            f"{source!r} is neither the file of a profile nor the name of an imported curve; "
            "paceline profile --import FILE keeps curves by their names"
        )
    return profile.table


class Opened(NamedTuple):
    """A simulator, and remarks on what it rests on.

    Attributes:
        answers: on how surely the model would have given the answers.
        learnt: on which n-gram models learnt from them.
        assumed: on costs that nobody measured.
    """

    simulator: Simulator
    answers: list[str]
    learnt: list[str]
    assumed: list[str]


def open_simulator(
    folder: str | Path,
    model: str,
    config: EngineConfig,
    wanted: Sequence[SpeculativeConfig],
    *,
    table: CostTable | None = None,
    draft_table: CostTable | float | None = None,
    measured: Sequence[Profile] = (),
    advance: Advance = lambda share: None,
) -> Opened:
    """A simulator of traces.

    Args:
        config: how the engine would be built.
        wanted: every configuration that is going to be replayed.
        table: of the target; None takes its profile on this machine, else what is assumed.
        draft_table: of every draft model, or the time of each of its steps in the target's unit;
            None takes its profile beside the target's, else goes by its size.
        measured: profiles that go before those that are kept on this machine, the last one first.
        advance: told the share of the traces that a draft model has been run on, on another thread.

    Raises:
        TraceError: there are no traces, or they are of another model.
        ConfigError, ModelLoadError: a model cannot be used.
        ProfileError: tables that do not go together.
    """
    meta, traces = _answers_in(Path(folder))
    checkpoint = load_checkpoint(model, load_format=config.load_format)
    if config.num_threads is not None:
        set_num_threads(config.num_threads)
    config, ops = COMPUTE.call(partial(resolve_config, config, checkpoint))
    target = target_info(checkpoint, config, kv_budget(config) // DRAFT_SHARE)
    check_vocabulary(traces, meta, target)
    check_model(meta, checkpoint)
    costs = _Costs(checkpoint, config, ops, is_elsewhere=table is not None, measured=measured)
    table, unpriced = _priced(table or costs.of_target(), traces, expert_cost(checkpoint.config))
    draft_tables = costs.of_drafts(wanted, target, table, draft_table)
    count = sum(len(trace.output_token_ids) for trace in traces)

    def record(each: ForwardingConfig) -> RecordedDrafts:
        told = lambda done: advance(done / count)  # noqa: E731
        running = HeadTarget(target, config, ops) if isinstance(each, HeadConfig) else None
        return cached_drafts(folder, traces, meta, each, target, told, running)

    drafts = record_all(wanted, record)
    learnt = learnt_prompts(wanted, traces)
    simulator = Simulator(traces, meta, table, draft_tables, drafts, config, target, learnt)
    notes = answer_notes(meta, checkpoint.name, config.dtype) + unpriced
    return Opened(simulator, notes, learnt_notes(learnt, len(traces)), costs.notes)


def _priced(
    table: CostTable, traces: Sequence[Trace], experts: ExpertCost | None
) -> tuple[CostTable, list[str]]:
    """The table, with prices of experts only if they are the model's; what a mixture lacks."""
    if table.experts and (not experts or table.experts[:3] != experts[:3]):
        table = table.without_experts()
    lacks = []
    if experts and not table.experts:
        lacks.append(f"the costs of {table.name} do not say what an expert of this model takes")
    if experts and any(trace.experts_read is None for trace in traces):
        lacks.append("the traces do not say how many experts were read; paceline trace records it")
    return table, [f"{each}: steps read what those of the costs read" for each in lacks]


def meta_in(folder: str | Path) -> dict[str, Any]:
    """What is said of the traces in a folder.

    Raises:
        TraceError: it is not a folder of traces.
    """
    if not Path(folder).is_dir():
        raise TraceError(f"there is no folder of traces at {folder}; {HINT}")
    if not (Path(folder) / META).exists():
        raise TraceError(f"{folder} is not a folder of traces: it has no {META}; {HINT}")
    return read_meta(folder)


def _answers_in(folder: Path) -> tuple[dict[str, Any], list[Trace]]:
    """What is said of the traces in a folder, and one or more traces."""
    meta, traces = meta_in(folder), list(read_traces(folder))
    if not traces:
        raise TraceError(f"{folder} holds no traces; {HINT}")
    return meta, traces


@dataclass(slots=True)
class _Costs:
    """Looks for cost tables, and says where one is missing.

    Attributes:
        is_elsewhere: the target's table was named: this machine's times may not go with it.
        measured: profiles that go before those that are kept, the last one first.
    """

    checkpoint: Checkpoint
    config: EngineConfig
    ops: Ops
    is_elsewhere: bool
    measured: Sequence[Profile] = ()
    notes: list[str] = field(default_factory=list)

    def of_target(self) -> CostTable:
        name, shape, config = self.checkpoint.name, self.checkpoint.config, self.config
        placement = placement_for(self.checkpoint, config, self.ops)
        kept_as = name, shape, self.ops, config.dtype, config.kv_cache_dtype, placement
        table = self._measured(*kept_as) or stored_table(*kept_as)
        if table is None:
            self.notes.append(
                f"there is no profile of {name} on this machine: what wide steps cost is assumed; "
                "measure it with paceline profile, or name one with --cost"
            )
        streamed = placement.share_streamed if placement else 0.0
        return table or prior_table(self.ops.name, expert_cost(shape), streamed)

    def _measured(
        self,
        name: str,
        shape: ModelConfig,
        ops: Ops,
        dtype: str,
        kv_dtype: str,
        placement: Placement | None = None,
    ) -> CostTable | None:
        if not self.measured:
            return None
        key = profile_key(name, shape, ops, dtype, kv_dtype, num_threads(), placement)
        tables = [profile.table for profile in self.measured if profile.key == key]
        return tables[-1] if tables else None

    def of_drafts(
        self,
        wanted: Sequence[SpeculativeConfig],
        target: TargetInfo,
        table: CostTable,
        given: CostTable | float | None,
    ) -> dict[str, CostTable]:
        """By the name of every draft model that is wanted; ``given`` is that of all of them."""
        if isinstance(given, float):
            given = CostTable("as given", [CostPoint(1, 0, 1, 1, given)], table.is_relative)
        models = {draft_name(each): each for each in wanted if isinstance(each, ForwardingConfig)}
        return {name: given or self.of_draft(each, target, table) for name, each in models.items()}

    def of_draft(self, draft: ForwardingConfig, target: TargetInfo, table: CostTable) -> CostTable:
        source = draft_source(draft, target)
        checkpoint = source.checkpoint
        dtype = draft_dtype(draft, checkpoint, target)
        ops = COMPUTE.call(
            lambda: resolve_ops(dtype, target.device, draft.deterministic, target.backend)
        )
        kv_dtype, shape = ops.default_kv_dtype, checkpoint.config
        kept_name = checkpoint.name
        if source.head is not None:  # as it runs, and as it is told from its target
            shape = replace(shape, vocab_size=target.vocab_size)
            kept_name += "" if draft.model else f": {draft.method}"
        kept_as = kept_name, shape, ops, dtype, kv_dtype
        measured = self._measured(*kept_as) or stored_table(*kept_as)
        if measured and not self.is_elsewhere and measured.is_relative == table.is_relative:
            return measured
        own = Work.of(
            self.checkpoint.config,
            self.config.dtype,
            self.config.kv_cache_dtype,
            self.checkpoint.num_bytes,
        )
        work = Work.of(shape, dtype, kv_dtype, checkpoint.num_bytes)
        share = work.weight_bytes / own.weight_bytes
        name = checkpoint.name if draft.model else draft_name(draft)
        self.notes.append(
            f"what {name} costs is assumed by its size, {share:.0%} of the target's; "
            "name its costs with --draft-cost"
        )
        points = [replace(point, ms=point.ms * share) for point in table.points]
        return CostTable(name, points, table.is_relative)


def learnt_prompts(
    configs: Iterable[SpeculativeConfig], traces: Sequence[Trace]
) -> dict[str, frozenset[int]]:
    """Numbers of the traces whose prompts a model learnt the answers of, by its file.

    Models without any are left out, as are files that do not say what was learnt.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    keys = np.array(
        [context_key(trace.token_ids[: trace.prompt_len].tolist()) for trace in traces], np.uint64
    )
    files = {each.model for each in configs if each.method == "ngram_model" and each.model}
    numbers_by_file = {
        file: frozenset(np.flatnonzero(np.isin(keys, read_tables(file).prompts)).tolist())
        for file in sorted(files)
    }
    return {file: numbers for file, numbers in numbers_by_file.items() if numbers}


def num_learnt(configs: Iterable[SpeculativeConfig], learnt: Mapping[str, frozenset[int]]) -> int:
    """Traces of :func:`learnt_prompts` that flatter the drafts of these proposers."""
    return max((len(learnt.get(each.model or "", ())) for each in configs), default=0)


def learnt_notes(learnt: Mapping[str, frozenset[int]], num_traces: int) -> list[str]:
    """A remark on each model that learnt answers to prompts that are replayed."""
    return [
        f"{Path(file).name} was trained on answers to {len(numbers)} of these {num_traces} "
        "prompts, which flatters its drafts: replay prompts that it was not trained on"
        for file, numbers in learnt.items()
    ]


NARROW = 32
"""Drafts make steps of so many rows; from one measured width below it to the next is a gap where
they are more than twice as many."""
FURTHER = 2
"""Traces longer than so many times the longest measured context are said to go beyond it."""


def costs_of(
    cost: str | None, draft_cost: str | None
) -> tuple[CostTable | None, CostTable | float | None]:
    """What the options say of the target's costs and of a draft model's; None is nothing.

    Raises:
        ConfigError: the time of a draft model's step is not above 0.
        ProfileError: there is no such table, or it cannot be read.
    """
    table = None if cost is None else table_named(cost)
    if draft_cost is None:
        # The draft model's own curve was imported together with the target's.
        own = None if cost is None or Path(cost).is_file() else find_imported(f"{cost}: draft")
        return table, own.table if own else None
    try:
        time = float(draft_cost)
    except ValueError:
        return table, table_named(draft_cost)
    if not 0.0 < time <= MAX_MS:
        raise ConfigError(
            f"--draft-cost is {draft_cost}; allowed: the milliseconds of a step, above "
            "0, the file of a profile, and the name of an imported curve"
        )
    return table, time


def cost_notes(simulator: Simulator) -> list[str]:
    """Where a step may cost what nobody measured, one remark each; not of an assumed table."""
    table, config = simulator.table, simulator.config
    longest = max(len(trace.token_ids) for trace in simulator.traces)
    drafts, assumed = simulator.draft_tables.values(), prior_table().name
    said = [(table, _beyond(table, longest, config.max_num_seqs))]
    said += [(each, _gaps(each)) for each in (table, *drafts)]
    if table.host != NO_HOST_TIME:
        said += [(each, _host(each)) for each in drafts]
    return [f"{each.name}: {note}" for each, ns in said if each.name != assumed for note in ns]


def _host(draft: CostTable) -> Iterator[str]:
    if draft.host.drafting == NO_DRAFTING_HOST_TIME:
        yield (
            "what the host takes for its drafts was not measured and counts as nothing; paceline "
            "profile measures it"
        )


def _gaps(table: CostTable) -> Iterator[str]:
    """Between which widths times are lines between far points."""
    gaps = {
        gap
        for context in table.contexts
        for gap in pairwise(point.width for point in table.base_points(context))
        if gap[0] < NARROW and gap[1] > 2 * gap[0]
    }
    if gaps:
        shown = ", ".join(f"{low} and {high}" for low, high in sorted(gaps))
        yield f"no step between these widths was measured, its cost is interpolated: {shown}"


def _beyond(table: CostTable, longest: int, most_requests: int) -> Iterator[str]:
    """Which steps lie beyond all that were measured."""
    widest = min(table.base_points(context)[-1].width for context in table.contexts)
    if 1 < widest < NARROW:
        yield f"nothing wider than {widest} rows was measured; the cost of wider steps is a guess"
    if most_requests > 1 and all(point.requests == 1 for point in table.points):
        yield (
            "no step of several requests was measured; it is taken to cost what one request with "
            "as many rows does"
        )
    last = table.contexts[-1]
    if longest > FURTHER * last:
        yield f"the longest context measured is {last}, that of the traces {longest}"
