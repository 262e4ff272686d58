"""The arms of ``never_slower.py``: engines that differ in who drafts and in who decides about it.

All engines share one target model and one KV memory; they take turns and never have requests at the
same time. Each has a cost model of its own, which starts from the same table as the others and
learns from its own steps only, and a planner that keeps what it learned between its runs. The plain
ones are engines to which no proposer was ever given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from harness import CONTROL, COUNTED, PLAIN, note
from peers_client import hugging_face
from proposer_sets import chain
from rivals import ARMS

from paceline.api.llm import embedded_model
from paceline.build.build import BuiltEngine, FindTable, build_engine
from paceline.build.default_drafts import default_speculative_config
from paceline.cli.prompts import Encoder
from paceline.config import EngineConfig, SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import NgramModelConfig, without_memory
from paceline.engine.engine import Engine
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import CostTable, StepShape
from paceline.planner.planner import Planner
from paceline.profiling.profile import measure_profiles
from paceline.profiling.profile_store import stored_table
from paceline.proposers.base import Proposer
from paceline.request.engine_stats import EngineStats
from paceline.request.request import StepOutput
from paceline.request.sampling_params import SamplingParams

OURS = "ours"
REAL = "smollm2"
"""The pair that is a chat model and the n-gram model that comes with its name."""
LONGEST = 8
"""Tokens along a path of the drafts whose length a rule decides."""


# --- who drafts -----------------------------------------------------------------------------------


def chains(draft: str, method: str = "draft_model") -> tuple[SpeculativeConfig, ...]:
    """Prompt lookup and a model that drafts, each with one continuation."""
    model = {"method": method, "model": draft, "num_speculative_tokens": LONGEST}
    return parse_speculative_config([chain(LONGEST), model])


def default(draft: str) -> tuple[SpeculativeConfig, ...]:
    """What the command line takes for the embedded model when nothing is said.

    The same for a model that comes with an n-gram model, which is its draft here. For another pair
    ``suffix`` and the draft model, as they are where they are only named. The memory of earlier
    answers is off: the same prompts are run again and again.
    """
    if draft == embedded_model("draft"):
        return without_memory(default_speculative_config("embedded"))
    if draft == ngram_model_of(REAL):
        return without_memory(default_speculative_config(REAL))
    methods = [{"method": "suffix"}, {"method": "draft_model", "model": draft}]
    return without_memory(parse_speculative_config(methods))


def ngram_model_of(name: str) -> str:
    """The n-gram model that comes with a model's name."""
    drafts = default_speculative_config(name)
    return next(draft.model for draft in drafts if isinstance(draft, NgramModelConfig))


# --- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arms:
    """The engines by arm, in the order in which they take turns, and what they are made of.

    Attributes:
        cost: where the table of the cost models comes from.
    """

    engines: dict[str, Engine]
    built: BuiltEngine
    cost: str
    ours: tuple[SpeculativeConfig, ...]

    def encode(self, text: str) -> list[int]:
        """A model with a chat template is asked; another one goes on with the text."""
        return Encoder(self.built.checkpoint.tokenizer).encode(text)


def pair_folders(pair: str) -> tuple[str, str]:
    """Target and draft: embedded, a real one with its n-grams, or as large as a real pair."""
    if pair == "embedded":
        return embedded_model("target"), embedded_model("draft")
    if pair == REAL:
        return REAL, ngram_model_of(REAL)
    return str(hugging_face("0.5b", "target")), str(hugging_face("0.5b", "draft"))


def open_arms(pair: str, config: EngineConfig, profile: bool) -> Arms:
    """Build every engine. Call it on the compute thread.

    Args:
        profile: measure the costs of the model's steps before; otherwise they are what a user
            has: the profile that is stored, or the prior.
    """
    target, draft = pair_folders(pair)
    find_table: FindTable = stored_table
    if profile:
        profiles, remarks = measure_profiles(target, config)
        for remark in remarks:
            note(remark)

        def find_table(*_: object) -> CostTable:
            return profiles[0].table

    configs = default(draft)
    built = build_engine(target, replace(config, speculative=configs), find_table)
    ours = built.engine
    source = "measured before the run" if profile else "a stored profile"
    cost = source if ours.cost.has_profile else "the prior"
    method = "ngram_model" if pair == REAL else "draft_model"
    rivals = _rival_engines(built, chains(draft, method))
    plain, control = _engine(built), _engine(built)
    engines = {PLAIN: plain, **rivals, OURS: ours, CONTROL: control}
    return Arms(engines, built, cost, configs)


def _rival_engines(built: BuiltEngine, drafts: Sequence[SpeculativeConfig]) -> dict[str, Engine]:
    proposers = built.proposers_for(drafts)
    return {name: _engine(built, proposers, make) for name, make in ARMS.items()}


def _engine(
    built: BuiltEngine,
    proposers: Sequence[Proposer] = (),
    planner: Callable[[CostModel], Planner] | None = None,
) -> Engine:
    """Another engine on the same model."""
    known = built.engine.cost
    cost = CostModel(known.table if known.has_profile else None)
    ends = built.checkpoint.config.eos_token_ids
    chosen = planner(cost) if planner else None
    return Engine(built.engine.runner, built.config, proposers, ends, chosen, cost)


# --- one run --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Served:
    """What an engine did for one batch: when each step ended, and what it gave out."""

    engine: Engine
    ids: list[int]
    steps: list[tuple[float, list[StepOutput]]]


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> Served:
    """Run a batch from its arrival to its last token."""
    engine.reset_stats()
    ids = [engine.add_request(*each)[0] for each in zip(prompts, params, strict=True)]
    served = Served(engine, ids, [])
    try:
        while engine.has_work:
            outputs = engine.step()
            served.steps.append((time.perf_counter(), outputs))
    except BaseException:
        for request_id in ids:
            engine.abort(request_id)
        engine.step()
        raise
    return served


def count(served: Served, prose: Sequence[int] = ()) -> dict[str, Any]:
    """Tokens and counters of a run; the same code for every arm.

    Args:
        prose: places in the batch of the requests whose pace beside the others is wanted.
    """
    tokens: dict[int, list[int]] = {request_id: [] for request_id in served.ids}
    for _, outputs in served.steps:
        for output in outputs:
            if output.error is not None:
                raise output.error
            tokens[output.request_id] += output.token_ids
    stats = served.engine.stats()
    return {
        "token_ids": [tokens[request_id] for request_id in served.ids],
        "output_tokens": stats.num_output_tokens,
        **{name: getattr(stats.speculation, name) for name in COUNTED},
        "num_forwards": stats.num_target_forwards,
        "phases": dict(stats.seconds),
        "verification": verification_seconds(served.engine, stats),
        "seconds_per_prose_token": pace_beside(served, [served.ids[i] for i in prose]),
    }


def pace_beside(served: Served, prose: Sequence[int]) -> float | None:
    """Seconds per token of these requests while all the others have not ended.

    It begins when every request has its first token, so that no prompt is read meanwhile.
    """
    if not prose:
        return None
    waiting, wanted = set(served.ids), set(prose)
    began, tokens = None, 0
    for now, outputs in served.steps:
        if began is not None:
            tokens += sum(len(o.token_ids) for o in outputs if o.request_id in wanted)
        if any(o.finish_reason is not None and o.request_id not in wanted for o in outputs):
            return (now - began) / tokens if began is not None and tokens else None
        waiting -= {o.request_id for o in outputs if o.token_ids}
        if began is None and not waiting:
            began = now
    return None


def verification_seconds(engine: Engine, stats: EngineStats) -> float:
    """What the draft nodes added to the forwards of a single request, as its cost model has it."""
    counters = stats.speculation
    if not counters.num_drafts:
        return 0.0
    context = stats.num_prompt_tokens + stats.num_output_tokens // 2
    nodes = ceil(counters.num_draft_tokens / counters.num_drafts)
    growth = engine.cost.growth(StepShape(1, context, context, 1, 1), nodes)
    return counters.num_drafts * (growth[nodes] - growth[0]) / 1e3
