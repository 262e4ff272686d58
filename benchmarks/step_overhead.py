"""Host time per step outside the target's forward, per phase, for 1 to 16 requests.

A sample is one step in which every request decodes: the wall time of ``Engine.step`` less the time
inside the target's and the draft model's forwards. It therefore covers every phase, what lies
between the phases, and entering the forward. The model runs on one thread, so that no second one
spins beside the host code, unless ``--threads`` says otherwise. The target is judged on steps that
verify a draft, in the real engine: as they are for the embedded model, and beyond a plain step's
for a larger one (``--model smollm2``), whose forward leaves less in the processor's caches.

Steps in which nobody drafts are compared with those of an engine without speculation, in turns:
where the planner finds nobody worth asking, and where the requests have speculation off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain as chained
from pathlib import Path
from typing import Any

from harness import (
    Report,
    Row,
    Target,
    arguments,
    chosen,
    grid,
    markdown,
    note,
    numbers,
    pick,
    run_sample,
)
from prompt_sets import load_prompts, spread
from proposer_sets import DEFAULT, chain, described, draft_model

from paceline.build.build import build_engine
from paceline.build.default_drafts import default_speculative_config
from paceline.config import EngineConfig, parse_speculative_config
from paceline.engine.engine import Engine
from paceline.loading.checkpoint import Checkpoint, load_checkpoint
from paceline.planner.planner import CostAwarePlanner
from paceline.planner.value import UNPLANNED
from paceline.request.request import Request
from paceline.request.sampling_params import SamplingParams, SpeculativeParams
from paceline.text.detokenizer import TextStream
from paceline.text.tokenizer import Tokenizer

PHASES = ("schedule", "propose", "plan", "pack", "forward", "verify", "commit", "observe")
WARM_UP_STEPS = 10
MAX_MODEL_LEN = 1024


# --- one step -------------------------------------------------------------------------------------


def forward_seconds(engine: Engine) -> tuple[float, float]:
    """Seconds inside the target's forwards and inside those of draft models, so far."""
    runners = [getattr(proposer, "_runner", None) for proposer in engine.drafting.proposers]
    return engine.runner.seconds, sum(runner.seconds for runner in runners if runner)


@dataclass(slots=True)
class Steps:
    """Microseconds of every measured step, and whether it verified a draft."""

    host: list[float] = field(default_factory=list)
    draft_forward: list[float] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def median(self, values: Sequence[float], drafted_only: bool = False) -> float | None:
        """None where there is no such step."""
        kept = [v for v, d in zip(values, self.drafted, strict=True) if d or not drafted_only]
        return round(statistics.median(kept), 1) if kept else None


def endless(
    prompt: Sequence[int], temperature: float, seed: int, drafts: bool = True
) -> SamplingParams:
    """A request that goes on until the model's context ends."""
    return SamplingParams(
        max_tokens=MAX_MODEL_LEN - len(prompt),
        temperature=temperature,
        seed=seed,
        ignore_eos=True,
        speculative=SpeculativeParams(enabled=drafts),
    )


def read_prompts(engine: Engine) -> None:
    while any(request.num_uncomputed != 1 for request in engine.requests.values()):
        engine.step()


@contextmanager
def only_for_now(*engines: Engine) -> Iterator[None]:
    """Leave no request behind."""
    try:
        yield
    finally:
        for engine in engines:
            for request_id in list(engine.requests):
                engine.abort(request_id)
            engine.step()


def measure(engine: Engine, requests: Sequence[Request], steps: int) -> Steps:
    """Step until ``steps`` were measured or a request ended."""
    found = Steps()
    read_prompts(engine)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    while len(found.host) < steps and not any(request.is_finished for request in requests):
        _measure_step(engine, found)
    return found


def _measure_step(engine: Engine, found: Steps) -> None:
    before, (target, drafts) = engine.stats(), forward_seconds(engine)
    began = time.perf_counter()
    engine.step()
    total = time.perf_counter() - began
    after, (target_after, drafts_after) = engine.stats(), forward_seconds(engine)
    target, drafts = target_after - target, drafts_after - drafts
    spent = {
        phase: after.seconds.get(phase, 0.0) - before.seconds.get(phase, 0.0) for phase in PHASES
    }
    rest = total - sum(spent.values())
    spent["propose"] -= drafts
    spent["forward"] -= target  # what is left is entering and leaving it
    for phase, seconds in [*spent.items(), ("rest", rest)]:
        found.phases.setdefault(phase, []).append(seconds * 1e6)
    found.host.append(round((total - target - drafts) * 1e6, 1))
    found.draft_forward.append(drafts * 1e6)
    found.drafted.append(after.speculation.num_draft_tokens > before.speculation.num_draft_tokens)


SKIPS = {"planner asleep": True, "speculation off": False}
"""Whether requests allow speculation, by what keeps them from it."""
NOTHING_FOUND = {"method": "prompt_lookup", "prompt_lookup_min": 32, "prompt_lookup_max": 32}
"""A proposer that is hardly worth asking."""
TEMPERATURE = 1.3
PAIRS_PER_STEP = 6
"""Pairs for each step of other cases: these differences are small."""


def compare(
    plain: Engine, other: Engine, prompts: Sequence[list[int]], name: str, steps: int
) -> dict[str, list[float]]:
    """Let both engines continue the same prompts; only pairs in which nobody planned are kept.

    Returns:
        Microseconds of steps outside the forward, and how many more than the plain engine's.
    """
    engines = (plain, other)
    host_us: list[float] = []
    over_plain_us: list[float] = []
    drawn = random.Random(0)
    with only_for_now(*engines):
        for engine in engines:
            for seed, prompt in enumerate(prompts):
                engine.add_request(prompt, endless(prompt, TEMPERATURE, seed, SKIPS[name]))
            read_prompts(engine)
        for number in range(steps + WARM_UP_STEPS):
            order = drawn.sample(engines, 2)  # in turns would keep step with the probes
            host = {engine: _host_us(engine) for engine in order}
            if not all(len(engine.requests) == len(prompts) for engine in engines):
                break
            if number >= WARM_UP_STEPS and _is_unplanned(other):
                host_us.append(round(host[other], 1))
                over_plain_us.append(round(host[other] - host[plain], 1))
    return {"host_us": host_us, "over_plain_us": over_plain_us}


def _host_us(engine: Engine) -> float:
    forward, began = engine.runner.seconds, time.perf_counter()
    engine.step()
    return (time.perf_counter() - began - (engine.runner.seconds - forward)) * 1e6


def _is_unplanned(engine: Engine) -> bool:
    planner = engine.drafting.planner
    assert isinstance(planner, CostAwarePlanner)
    return planner.planned is UNPLANNED


def run_skips(
    options: argparse.Namespace, checkpoint: Checkpoint, prompts: list[list[int]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A raw sample and a result for each way of not drafting and each number of requests."""
    plain, other = (
        build(Case("", config), options, checkpoint) for config in (None, NOTHING_FOUND)
    )
    for name in SKIPS:
        for count in options.requests:
            label = {"case": name, "requests": count, "forward": "real"}
            steps = PAIRS_PER_STEP * options.steps
            pairs = compare(plain, other, spread(prompts, count), name, steps)
            medians = {key: round(statistics.median(us), 1) for key, us in pairs.items() if us}
            yield {**label, **pairs}, {**label, "steps": len(pairs["host_us"]), **medians}


TARGET_ONE, TARGET_FURTHER = 150.0, 15.0
TARGET_BEYOND_PLAIN = 120.0
"""Of a step that verifies a draft for one request of a model other than the embedded one."""
TARGET_SKIPPED = 10.0
MOST_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """What is decoded, and whether the target applies to it.

    Attributes:
        text: the engine also turns tokens into text, as it does for the Python API.
    """

    name: str
    speculative: Any
    temperature: float = 0.0
    text: bool = False
    has_target: bool = False


PLAIN, DRAFTED = "greedy, plain", f"greedy, {DEFAULT}"
CASES = (
    Case("greedy, prompt_lookup", chain(), has_target=True),
    Case("greedy, prompt_lookup, with text", chain(), text=True),
    Case(PLAIN, []),
    Case("temperature 0.8, prompt_lookup", chain(), temperature=0.8),
    Case("greedy, draft_model", draft_model()),
)
EMBEDDED = "embedded"


def cases_of(model: str) -> Sequence[Case]:
    """What is measured of a model; one that is not embedded has its default drafts."""
    if model == EMBEDDED:
        return CASES
    drafts = default_speculative_config(model)
    return (
        Case(DRAFTED, drafts),
        Case(f"{DRAFTED}, with text", drafts, text=True),
        Case("greedy, prompt_lookup alone", chain()),
        Case(PLAIN, []),
        Case(f"{PLAIN}, with text", [], text=True),
    )


# --- one cell ------------------------------------------------------------------------------------


def build(case: Case, options: argparse.Namespace, checkpoint: Checkpoint) -> Engine:
    config = EngineConfig(
        device=options.device,
        num_threads=options.threads,
        max_num_seqs=max(options.requests),
        max_model_len=MAX_MODEL_LEN,
        speculative=parse_speculative_config(case.speculative or []),
        strict=True,
    )
    return build_engine(checkpoint, config).engine


def run_cell(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[list[int]], case: Case, steps: int
) -> Steps:
    """Measure a batch of requests."""
    requests = []
    with only_for_now(engine):
        for index, prompt in enumerate(prompts):
            streams = [TextStream(tokenizer, prompt)] if case.text else []
            params = endless(prompt, case.temperature, index)
            requests.append(engine.requests[engine.add_request(prompt, params, streams)[0]])
        return measure(engine, requests, steps)


# --- the benchmark --------------------------------------------------------------------------------


def run_case(
    case: Case, options: argparse.Namespace, checkpoint: Checkpoint, prompts: list[list[int]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A raw sample and a result for each number of requests."""
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    engine = build(case, options, checkpoint)
    for count in options.requests:
        label = {"case": case.name, "requests": count, "forward": "real"}
        note(f"{case.name}: {count} requests")
        run = partial(run_cell, engine, tokenizer, spread(prompts, count), case, options.steps)
        sample = run_sample(case.name, count, run, lambda found: {"steps": found})
        if sample.failed:
            yield {**label, "error": sample.error}, {**label, "steps": 0}
            continue
        steps = sample.facts["steps"]
        yield (
            {**label, "host_us": steps.host, "drafted": steps.drafted},
            {**label, **summary(steps)},
        )


def summary(steps: Steps) -> dict[str, Any]:
    """Medians over the steps, in microseconds."""
    return {
        "steps": len(steps.host),
        "steps_with_draft": sum(steps.drafted),
        "host_us": steps.median(steps.host),
        "host_us_with_draft": steps.median(steps.host, drafted_only=True),
        "draft_forward_us": steps.median(steps.draft_forward),
        "phases_us": {phase: steps.median(values) for phase, values in steps.phases.items()},
        "phases_with_draft_us": {
            phase: steps.median(values, drafted_only=True) for phase, values in steps.phases.items()
        },
    }


def targets(results: Sequence[Row]) -> list[Target]:
    judged = {case.name for case in CASES if case.has_target}
    skipped, drafted = [], []
    for row in pick(results, forward="real"):
        name = f"{row['case']}, requests: {row['requests']}"
        if row["case"] in SKIPS:
            name = f"host us per step over the plain engine's, {name}"
            skipped.append(Target(name, row.get("over_plain_us"), TARGET_SKIPPED))
        elif row["case"] in judged:
            most = TARGET_ONE + TARGET_FURTHER * (row["requests"] - 1)
            drafted.append(Target(f"host us per step, {name}", row.get("host_us_with_draft"), most))
    return skipped + drafted + _beyond_plain(results)


def _beyond_plain(results: Sequence[Row]) -> list[Target]:
    """What a step with a draft takes more than a plain one of the same run, for one request."""
    alone = {row["case"]: row for row in pick(results, requests=1)}
    found = []
    for plain in (PLAIN, f"{PLAIN}, with text"):
        name = plain.replace(PLAIN, DRAFTED)
        if name in alone and plain in alone:
            most, least = alone[name].get("host_us_with_draft"), alone[plain].get("host_us")
            value = None if most is None or least is None else round(most - least, 1)
            title = f"host us beyond a plain step, {name}, requests: 1"
            found.append(Target(title, value, TARGET_BEYOND_PLAIN))
    return found


def tables(results: Sequence[Row]) -> list[str]:
    """Medians in microseconds: a line per case and number of requests; with the default drafts also
    those of the steps that verify one."""
    scripted = {
        (row["case"], row["requests"]): row.get("host_us")
        for row in pick(results, forward="scripted")
    }
    columns = (
        ("case", "case"),
        ("requests", "requests"),
        ("host", "host_us", 0),
        ("with draft", "host_us_with_draft", 0),
        ("scripted", lambda row: scripted.get((row["case"], row["requests"])), 0),
        *((part, f"phases_us/{part}", 0) for part in (*PHASES, "rest")),
        ("draft forwards", "draft_forward_us", 0),
    )
    shown = [markdown(*grid(pick(results, forward="real"), *columns))]
    drafted = [row for row in results if row.get("phases_with_draft_us", {}).get("plan")]
    if any(row["case"] == DRAFTED for row in drafted):
        parts = [(part, f"phases_with_draft_us/{part}", 0) for part in (*PHASES, "rest")]
        shown.append(markdown(*grid(drafted, *columns[:2], columns[3], *parts)))
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, prompts=True)
    parser.add_argument("--requests", type=numbers, default=[1, 2, 4, 8, 16])
    parser.sized("--steps", 120, 40, "steps per cell")
    parser.add_argument("--model", default=EMBEDDED, help="a name or a file (default: embedded)")
    parser.add_argument("--threads", type=int, default=1, help="of the model (default: 1)")
    options = parser.parse_args(argv)
    checkpoint, cases = load_checkpoint(options.model), cases_of(options.model)
    assert checkpoint.tokenizer is not None
    source = load_prompts(options.prompts)
    texts = spread(source.kind("code"), 8) + spread(source.kind("edit"), 8)
    prompts = [checkpoint.tokenizer.encode(text)[-MOST_PROMPT_TOKENS:] for text in texts]
    of_model = "" if options.model == EMBEDDED else f"-{Path(options.model).stem}"
    report = Report(
        f"step_overhead{of_model}",
        {
            "model": checkpoint.name,
            "prompts": source.source,
            **chosen(options, "quick", "steps"),
            "warm_up_steps": WARM_UP_STEPS,
            "cases": {case.name: described(case.speculative) for case in cases},
            "threads": options.threads,
        },
    )
    cells = [run_case(case, options, checkpoint, prompts) for case in cases]
    for sample, result in chained(*cells, run_skips(options, checkpoint, prompts)):
        report.samples.append(sample)
        report.results.append(result)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
