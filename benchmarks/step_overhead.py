"""Host time per step outside the target's forward, per phase, for 1 to 16 requests.

A sample is one step in which every request decodes: the wall time of ``Engine.step`` less the time
inside the target's and the draft model's forwards. It therefore covers every phase, what lies
between the phases, and entering the forward. The model runs on one thread, so that no second one
spins beside the host code. The target is judged on steps that verify a draft, in the real engine.

The scripted rows are a cross-check. There a forward returns prepared logits which repeat what the
real target said: what the difference shows is the cost of caches that a real forward has emptied.

Steps in which nobody drafts are compared with those of an engine without speculation, in turns:
where the planner finds nobody worth asking, and where the requests have speculation off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import arguments, note, numbers, run_sample
from host_time import PHASES, WARM_UP_STEPS, ScriptedRunner, Steps, measure
from prompt_sets import SOURCES, load_prompts, spread
from proposer_sets import chain, described, draft_model
from report import Report, Target, number, table
from skipped_steps import SKIPS, run_skips

from paceline.config import EngineConfig, parse_speculative_config
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.llm import embedded_model
from paceline.models.checkpoint import Checkpoint, load_checkpoint
from paceline.models.detokenizer import TextStream
from paceline.models.tokenizer import Tokenizer
from paceline.sampling_params import SamplingParams

TARGET_ONE, TARGET_FURTHER = 150.0, 15.0
TARGET_SKIPPED = 10.0
TIMES = ("host_us", "host_us_with_draft", "over_plain_us")
MOST_PROMPT_TOKENS = 256
MAX_MODEL_LEN = 1024


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


CASES = (
    Case("greedy, prompt_lookup", chain(), has_target=True),
    Case("greedy, prompt_lookup, with text", chain(), text=True),
    Case("greedy, plain", []),
    Case("temperature 0.8, prompt_lookup", chain(), temperature=0.8),
    Case("greedy, draft_model", draft_model()),
)


# --- one cell ------------------------------------------------------------------------------------


def build(case: Case, checkpoint: Checkpoint, device: str, most: int) -> Engine:
    config = EngineConfig(
        device=device,
        num_threads=1,
        max_num_seqs=most,
        max_model_len=MAX_MODEL_LEN,
        speculative=parse_speculative_config(case.speculative),
        strict=True,
    )
    return build_engine(checkpoint, config).engine


def run_cell(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    case: Case,
    steps: int,
    scripts: Sequence[list[int]] | None = None,
) -> tuple[Steps, list[list[int]]]:
    """Measure a batch of requests; also returns their tokens, which can be a script."""
    requests = []
    try:
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=MAX_MODEL_LEN - len(prompt),
                temperature=case.temperature,
                seed=index,
                ignore_eos=True,
            )
            streams = [TextStream(tokenizer, prompt)] if case.text else []
            request_id = engine.add_request(prompt, params, streams)[0]
            requests.append(engine.requests[request_id])
            if scripts is not None:
                assert isinstance(engine.runner, ScriptedRunner)
                engine.runner.scripts[request_id] = scripts[index]
        return measure(engine, requests, steps), [list(r.token_ids) for r in requests]
    finally:
        for request in requests:
            engine.abort(request.request_id)
        engine.step()


# --- the benchmark --------------------------------------------------------------------------------


def run_case(
    case: Case, options: argparse.Namespace, checkpoint: Checkpoint, prompts: list[list[int]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A raw sample and a result for each number of requests, real and scripted."""
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    most = max(options.requests)
    real, scripted = (build(case, checkpoint, options.device, most) for _ in range(2))
    scripted.runner = ScriptedRunner(scripted.runner)
    for count in options.requests:
        scripts: list[list[int]] | None = None
        for forward, engine in (("real", real), ("scripted", scripted)):
            label = {"case": case.name, "requests": count, "forward": forward}
            note(f"{case.name}: {count} requests, {forward} forward")

            cell = partial(run_cell, engine, tokenizer, spread(prompts, count), case)
            run = partial(cell, options.steps, scripts)
            sample = run_sample(case.name, count, run, lambda found: {"cell": found})
            if sample.failed:
                yield {**label, "error": sample.error}, {**label, "steps": 0}
                break
            steps, scripts = sample.facts["cell"]
            yield (
                {**label, "host_us": steps.host, "drafted": steps.drafted},
                {
                    **label,
                    **summary(steps),
                },
            )


def summary(steps: Steps) -> dict[str, Any]:
    """Medians over the steps, in microseconds."""
    return {
        "steps": len(steps.host),
        "steps_with_draft": sum(steps.drafted),
        "rows": steps.median(steps.rows),
        "context": steps.median(steps.context),
        "host_us": steps.median(steps.host),
        "host_us_with_draft": steps.median(steps.host, drafted_only=True),
        "draft_forward_us": steps.median(steps.draft_forward),
        "phases_us": {phase: steps.median(values) for phase, values in steps.phases.items()},
    }


def targets(results: Sequence[dict[str, Any]]) -> list[Target]:
    judged = {case.name for case in CASES if case.has_target}
    skipped = [
        Target(
            f"host us per step over the plain engine's, {row['case']}, requests: {row['requests']}",
            row.get("over_plain_us"),
            TARGET_SKIPPED,
        )
        for row in results
        if row["case"] in SKIPS
    ]
    return skipped + [
        Target(
            f"host us per step, {row['case']}, requests: {row['requests']}",
            row.get("host_us_with_draft"),
            TARGET_ONE + TARGET_FURTHER * (row["requests"] - 1),
        )
        for row in results
        if row["case"] in judged and row["forward"] == "real"
    ]


def tables(results: Sequence[dict[str, Any]]) -> list[str]:
    parts = [*PHASES, "rest"]
    headers = ["case", "requests", "forward", "steps", "host", "with draft", "over plain"]
    headers += [*parts, "drafting"]
    rows = [
        [
            *(row[key] for key in ("case", "requests", "forward", "steps")),
            *(number(row.get(key), 0) for key in TIMES),
            *(number(row.get("phases_us", {}).get(part), 0) for part in parts),
            number(row.get("draft_forward_us"), 0),
        ]
        for row in results
    ]
    return [table(headers, rows) + "\n(medians, microseconds)"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, help="steps per cell (default: 120, quick: 40)")
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    options = parser.parse_args(argv)
    options.steps = options.steps or (40 if options.quick else 120)
    checkpoint = load_checkpoint(embedded_model("target"))
    assert checkpoint.tokenizer is not None
    source = load_prompts(options.prompts)
    texts = spread(source.kind("code"), 8) + spread(source.kind("edit"), 8)
    prompts = [checkpoint.tokenizer.encode(text)[-MOST_PROMPT_TOKENS:] for text in texts]
    report = Report(
        "step_overhead",
        {
            "model": checkpoint.name,
            "prompts": source.source,
            "quick": options.quick,
            "steps": options.steps,
            "warm_up_steps": WARM_UP_STEPS,
            "cases": {case.name: described(case.speculative) for case in CASES},
            "threads": 1,
        },
    )
    for case in CASES:
        for sample, result in run_case(case, options, checkpoint, prompts):
            report.samples.append(sample)
            report.results.append(result)
    most = max(options.requests)
    for sample, result in run_skips(
        lambda config: build(Case("", config), checkpoint, options.device, most),
        lambda count: spread(prompts, count),
        options,
    ):
        report.samples.append(sample)
        report.results.append(result)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
