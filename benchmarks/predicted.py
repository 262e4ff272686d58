"""What ``paceline simulate`` predicts of a speed-up, beside the speed-up that is measured.

The machine's steps are measured first, host time included, as ``paceline profile`` does. Then plain
decoding and speculation take turns on the same prompts, one request at a time, greedy, end to end;
the plain answers are the traces that are replayed. A replay begins with a planner that has seen
nothing, and so does every repeat. Only the ratio of the two speed-ups is judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from harness import (
    CONTROL,
    PLAIN,
    Report,
    Row,
    Sample,
    Target,
    arguments,
    grid,
    interval,
    note,
    pair_up,
    paired_ratio,
    table,
    take_turns,
)
from never_slower_arms import Served, count, serve
from prompt_sets import load_prompts, spread
from trace_sets import bare_trace

from paceline.api.llm import embedded_model
from paceline.build.build import BuiltEngine, build_engine
from paceline.build.default_drafts import default_speculative_config
from paceline.config import EngineConfig, SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import without_memory
from paceline.engine.compute_thread import COMPUTE
from paceline.engine.engine import Engine
from paceline.planner.cost import CostModel
from paceline.planner.cost_table import CostTable
from paceline.planner.planners import PLANNERS
from paceline.profiling.profile import ProfileSettings, measure_profiles
from paceline.request.sampling_params import SamplingParams
from paceline.request.traces import Trace
from paceline.workbench.simulate import Simulator

KINDS = ("code", "prose", "edit")
LONGEST = 400
"""Tokens of a prompt; of a longer one the end is taken."""
TOLERANCE = 0.07
Configs = tuple[SpeculativeConfig, ...]
WISH = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Arm:
    """Who drafts, and the planner that decides about it."""

    configs: Configs
    planner: str


def arms() -> dict[str, Arm]:
    suffix = without_memory(parse_speculative_config({"method": "suffix"}))
    default = without_memory(default_speculative_config("embedded"))
    return {
        "suffix, all verified": Arm(suffix, "fixed"),
        "suffix, planned": Arm(suffix, "auto"),
        "default": Arm(default, "auto"),
    }


def engine_of(built: BuiltEngine, arm: Arm, costs: CostTable) -> Engine:
    """Another engine on the same model."""
    cost = CostModel(costs)
    planner = PLANNERS[arm.planner](cost, built.config.objective)
    proposers = built.proposers_for(arm.configs)
    return Engine(built.engine.runner, built.config, proposers, (), planner, cost)


def traces_of(prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> list[Trace]:
    """The plain answers."""
    answers = {s.item: s.facts["token_ids"][0] for s in samples if s.arm == PLAIN}
    return [bare_trace(i, prompt, answers[i]) for i, prompt in enumerate(prompts)]


def run(options: argparse.Namespace, report: Report, source: Any) -> None:
    config = EngineConfig(max_num_seqs=1, max_model_len=1024, enable_prefix_caching=False)
    every = [config for arm in arms().values() for config in arm.configs]
    settings = ProfileSettings(budget_seconds=options.profile_seconds, proposers=every)
    (profile,), notes = measure_profiles(embedded_model("target"), config, settings=settings)
    for each in notes:
        note(each)
    report.config |= {"host_ms": asdict(profile.table.host), "notes": notes}
    built = build_engine(embedded_model("target"), config)
    encode = built.checkpoint.tokenizer.encode
    everyone = {PLAIN: Arm((), "fixed"), **arms(), CONTROL: Arm((), "fixed")}
    params = SamplingParams(max_tokens=options.max_tokens, **WISH)

    def generate(engine: Engine, prompts: Sequence[Sequence[int]], item: int) -> Served:
        return serve(engine, [prompts[item]], [params])

    for kind in KINDS:
        note(kind)
        texts = spread(source.kind(kind), options.num_prompts)
        prompts = [encode(text)[-LONGEST:] for text in texts]

        samples: list[Sample] = []
        for repeat in range(-1, options.repeat):  # the first is to warm up
            engines = {name: engine_of(built, arm, profile.table) for name, arm in everyone.items()}
            runs = {name: partial(generate, engine, prompts) for name, engine in engines.items()}
            found = take_turns(runs, range(len(prompts)) if repeat >= 0 else [0], 1, count)
            samples += [replace(each, repeat=repeat) for each in found if repeat >= 0]
        report.samples += [
            {"kind": kind, "arm": s.arm, "item": s.item, "repeat": s.repeat, "seconds": s.seconds}
            for s in samples
        ]
        report.results += rows(kind, prompts, samples, built.config, profile.table)


def rows(
    kind: str,
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    config: EngineConfig,
    costs: CostTable,
) -> list[dict[str, Any]]:
    """Measured and predicted speed-up of every arm, on the prompts of one kind."""
    traces = traces_of(prompts, samples)
    said = {"max_tokens": len(traces[0].output_token_ids), "seed": 0, **WISH}
    meta = {"params": {**said, "max_model_len": config.max_model_len}}
    simulator = Simulator(traces, meta, costs, {}, _no_drafts, config)
    plain_ms, found = simulator.plain().ms, []
    for name, arm in {**arms(), CONTROL: Arm((), "fixed")}.items():
        measured = paired_ratio(pair_up(samples, PLAIN, name))
        replayed = simulator.run(arm.configs, PLANNERS[arm.planner])
        predicted = plain_ms / replayed.ms
        steps = sum(s.facts["num_steps"] for s in samples if s.arm == name)
        tokens = sum(s.facts["output_tokens"] for s in samples if s.arm == name)
        found.append(
            {
                "kind": kind,
                "arm": name,
                "measured": asdict(measured),
                "predicted": predicted,
                "ratio": predicted / measured.value,
                "length": tokens / steps,
                "predicted_length": replayed.total("num_emitted_tokens")
                / replayed.total("num_steps"),
            }
        )
    return found


def _no_drafts(config: SpeculativeConfig) -> Any:
    raise AssertionError("nobody here drafts by forwards")


def targets(results: Sequence[Row]) -> list[Target]:
    found = []
    for name in arms():
        off = [abs(row["ratio"] - 1.0) for row in results if row["arm"] == name]
        text = f"predicted over measured speed-up, {name}: most that it is off"
        found.append(Target(text, max(off), TOLERANCE))
    return found


def tables(results: Sequence[Row]) -> list[str]:
    columns = (
        ("text", "kind"),
        ("arm", "arm"),
        ("measured", "measured/value", 2),
        ("95 %", lambda row: interval(row["measured"])),
        ("predicted", "predicted", 2),
        ("ratio", "ratio", 2),
        ("length", "length", 2),
        ("predicted", "predicted_length", 2),
    )
    return [table(*grid(results, *columns))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, prompts=True)
    parser.sized("--num-prompts", 8, 2, "of each kind")
    parser.sized("--max-tokens", 128, 48)
    parser.sized("--repeat", 5, 2, "of every run")
    parser.sized("--profile-seconds", 30.0, 4.0)
    options = parser.parse_args(argv)
    source = load_prompts(options.prompts)
    report = Report("predicted", {"prompts": source.source, "quick": options.quick})
    COMPUTE.call(lambda: run(options, report, source))
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
