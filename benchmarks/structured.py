"""Wall time of structured output, plain and speculative, on the embedded models.

Both arms decode under the same grammars: nine JSON schemas, a regular expression and a choice. The
plain arm is an engine in which speculation was never configured; a second one is the control. The
arms take turns, outputs are compared token by token, and a speed-up is plain seconds over
speculative seconds. Compiling a grammar takes part in neither: it is cached after the warm-up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness import Sample, arguments, names, note, take_turns
from proposer_sets import DEFAULT, described
from report import Report, Target, number, speed_cells, table
from speedup import CONTROL, PLAIN, TEMPERATURES, count, raw, summary
from structured_sets import SHAPES, prompts

from paceline import LLM, SamplingParams
from paceline.commands.resolve import without_memory
from paceline.engine.default_drafts import default_speculative_config
from paceline.llm import embedded_model
from paceline.models.checkpoint import load_checkpoint

MAX_MODEL_LEN = 1024
WANTED = 1.5
CONFIGS: Mapping[str, Any] = {
    "grammar": {"method": "grammar"},
    # The grammar joins by itself. Prompts come again: nothing is drafted from earlier answers.
    DEFAULT: without_memory(default_speculative_config(None)),
}
ALL = "all shapes"


def open_arms(options: argparse.Namespace, stack: ExitStack) -> dict[str, LLM]:
    """One engine per arm, all on one checkpoint."""
    checkpoint = load_checkpoint(options.model or embedded_model("target"))
    configs = {PLAIN: [], **CONFIGS, CONTROL: []}
    return {
        name: stack.enter_context(
            LLM(
                checkpoint,
                speculative_config=config,
                device=options.device,
                max_model_len=MAX_MODEL_LEN,
                enable_prefix_caching=False,
                strict=True,
            )
        )
        for name, config in configs.items()
    }


def run_cell(
    arms: Mapping[str, LLM], shape: str, temperature: float, options: argparse.Namespace
) -> list[Sample]:
    """All arms on all prompts of one shape, in turns, one request at a time."""
    texts = prompts(shape, options.num_prompts)

    def generate(llm: LLM, item: int) -> Any:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=temperature,
            seed=item,
            structured_outputs=SHAPES[shape],
        )
        return [llm.generate(texts[item], params)]

    for llm in arms.values():
        generate(llm, 0)
    runs: dict[str, Callable[[Any], Any]] = {
        name: partial(generate, llm) for name, llm in arms.items()
    }
    samples = take_turns(runs, range(len(texts)), options.repeat, count)
    return [Sample(s.arm, (shape, s.item), s.repeat, s.seconds, s.facts, s.error) for s in samples]


def rows_of(samples: Sequence[Sample], label: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per arm, with its steps against plain ones beside its time."""
    rows = []
    for arm in (*CONFIGS, CONTROL):
        row = {**label, **summary(samples, arm)}
        own = [sample for sample in samples if sample.arm == arm and not sample.failed]
        steps = sum(sample.facts["num_steps"] for sample in own)
        if steps:
            row["steps_ratio"] = row["output_tokens"] / steps
        rows.append(row)
    return rows


def run_all(arms: Mapping[str, LLM], options: argparse.Namespace, report: Report) -> None:
    for temperature in TEMPERATURES:
        together: list[Sample] = []
        for shape in options.shapes:
            label = {"shape": shape, "temperature": temperature}
            note(f"{shape}, temperature {temperature}")
            samples = run_cell(arms, shape, temperature, options)
            together += samples
            report.samples += [raw(sample, label) for sample in samples]
            report.results += rows_of(samples, label)
        report.results += rows_of(together, {"shape": ALL, "temperature": temperature})


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    done = bool(results) and all("error" not in row for row in results)
    identical = sum(bool(row.get("identical")) for row in results)
    found = [
        Target(
            f"speed-up over all shapes, temperature {row['temperature']}",
            row.get("speedup", {}).get("value"),
            WANTED,
            "at least",
        )
        for row in results
        if row["shape"] == ALL and row["arm"] == DEFAULT
    ]
    share = identical / len(results) if done else None
    return [*found, Target("share of rows with identical output", share, 1.0, "at least")]


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["shape", "temperature", "arm", "plain tok/s", "tok/s", "speed-up"]
    headers += ["95 % interval", "tokens per step", "identical"]
    rows = []
    for row in results:
        rows.append(
            [
                *(row[key] for key in ("shape", "temperature", "arm")),
                *speed_cells(row),
                number(row.get("steps_ratio")),
                row.get("error") or ("yes" if row["identical"] else "NO"),
            ]
        )
    return [table(headers, rows)]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="folder of the target (default: the embedded one)")
    parser.add_argument("--shapes", type=names, default=list(SHAPES), help="only these")
    parser.add_argument("--num-prompts", type=int, help="of each shape (default: 6, quick: 2)")
    parser.add_argument("--max-tokens", type=int, default=160, help="per prompt (default: 160)")
    parser.add_argument("--repeat", type=int, help="of every run (default: 2, quick: 1)")
    options = parser.parse_args(argv)
    options.num_prompts = options.num_prompts or (2 if options.quick else 6)
    options.repeat = options.repeat or (1 if options.quick else 2)
    for shape in options.shapes:
        if shape not in SHAPES:
            parser.error(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    with ExitStack() as stack:
        arms = open_arms(options, stack)
        config = {
            "model": arms[PLAIN].model,
            "dtype": arms[PLAIN].config.dtype,
            "prefix_caching": False,
            **{name: getattr(options, name) for name in ("quick", *_SETTINGS)},
            "proposers": {name: described(config) for name, config in CONFIGS.items()},
        }
        report = Report("structured", config)
        run_all(arms, options, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


_SETTINGS = ("shapes", "num_prompts", "max_tokens", "repeat")

if __name__ == "__main__":
    sys.exit(main())
