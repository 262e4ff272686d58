"""How well estimators of acceptance turn what proposers say into probabilities.

Real proposers draft for the embedded target, everything is verified, and each estimator then goes
through the log in the engine's order: it estimates a draft, is judged, and learns. The priors that
the kept estimator ships with are fitted to every other prompt; the rest is what is judged. Nothing
is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from calibration_log import ARMS, BATCH, MAX_MODEL_LEN, Prompt, counts, half, prompts_of, record
from calibration_priors import fit_priors
from calibration_report import EVERY_ARM, tables, targets
from harness import arguments, note, run_sample
from prompt_sets import SOURCES
from proposer_sets import described
from report import Report
from research.estimators import ALL

from paceline import LLM
from paceline.llm import embedded_model
from paceline.workbench.estimators_log import Log, Outcome
from paceline.workbench.estimators_report import (
    AS_PROPOSED,
    KEPT,
    Scores,
    compare,
    score,
)
from paceline.workbench.plots import check_plot, plot_reliability

LEAST_PROMPTS = 2
"""Of each kind: one to fit to and one that judges."""


def judged(arm: str, log: Log, prompts: Sequence[Prompt]) -> tuple[list[Any], dict[str, Any]]:
    """A row per estimator and, for two of them, per text; and the outcomes by estimator."""
    rows: list[dict[str, Any]] = []
    found = compare(log, ALL)
    for name, outcomes in found.items():
        rows.append(scored(arm, name, score(outcomes)))
        if name in (AS_PROPOSED, KEPT):
            texts: dict[str, list[Outcome]] = {}
            for outcome in outcomes:
                texts.setdefault(prompts[outcome.request_id].label, []).append(outcome)
            for text in sorted(texts):
                rows.append({**scored(arm, name, score(texts[text])), "text": text})
    return rows, found


def scored(arm: str, name: str, scores: Scores) -> dict[str, Any]:
    return {"arm": arm, "estimator": name, **scores.to_dict()}


def run_arms(
    options: argparse.Namespace, llm: LLM, prompts: Sequence[Prompt], report: Report
) -> dict[str, Log]:
    """The log of every arm; one that fails is a failed sample."""
    logs: dict[str, Log] = {}
    for arm, speculative in ARMS.items():
        note(arm)

        def run(speculative: Any = speculative) -> Any:
            found = record(llm, speculative, prompts, options.max_tokens)
            if not any(half(found[0], prompts, is_fitted=False)):
                raise ValueError("nothing was drafted on the prompts that judge")
            return found

        sample = run_sample(arm, "", run, counts)
        kept = {"arm": arm, "error": sample.error}
        if not sample.failed:
            logs[arm] = sample.facts["log"]
            kept["output_tokens"] = sample.facts["output_tokens"]
        report.samples.append(kept)
    return logs


def judge(
    logs: Mapping[str, Log], prompts: Sequence[Prompt], report: Report
) -> dict[str, dict[str, list[Outcome]]]:
    """The fit on one half of the prompts and the scores on the other; outcomes by arm."""
    of_one = [log for arm, log in logs.items() if isinstance(ARMS[arm], dict)]
    for origin, prior in fit_priors([half(log, prompts, True) for log in of_one]).items():
        report.results.append({"origin": origin, "prior": prior})
    everything: dict[str, list[Outcome]] = {}
    found = {}
    for arm, log in logs.items():
        rows, found[arm] = judged(arm, half(log, prompts, False), prompts)
        report.results += rows
        for name, outcomes in found[arm].items():
            everything.setdefault(name, []).extend(outcomes)
    for name, outcomes in everything.items():
        report.results.append(scored(EVERY_ARM, name, score(outcomes)))
    return found


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", choices=SOURCES, default="auto")
    parser.add_argument("--num-prompts", type=int, help="of each kind (default: 20, quick: 3)")
    parser.add_argument("--max-tokens", type=int, help="per prompt (default: 128, quick: 48)")
    parser.add_argument("--plot", help="also draw the reliability diagrams into this file")
    options = parser.parse_args(argv)
    options.num_prompts = options.num_prompts or (3 if options.quick else 20)
    options.max_tokens = options.max_tokens or (48 if options.quick else 128)
    if options.num_prompts < LEAST_PROMPTS:
        parser.error(
            f"--num-prompts is {options.num_prompts}; allowed are {LEAST_PROMPTS} or more: priors "
            "are fitted to every other prompt, and the rest judges"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    if options.plot:
        check_plot(options.plot)
    source, prompts = prompts_of(options)
    with LLM(
        embedded_model("target"),
        speculative_config="[]",
        device=options.device,
        max_num_seqs=BATCH,
        max_model_len=MAX_MODEL_LEN,
    ) as llm:
        config = {
            "model": llm.model,
            "dtype": llm.config.dtype,
            "prompts": source,
            "quick": options.quick,
            "num_prompts": options.num_prompts,
            "max_tokens": options.max_tokens,
            "batch": BATCH,
            "arms": {arm: described(speculative) for arm, speculative in ARMS.items()},
        }
        report = Report("calibration", config)
        logs = run_arms(options, llm, prompts, report)
    found = judge(logs, prompts, report)
    if options.plot:
        plot_reliability(
            {
                arm: {name: score(outcomes[name]) for name in (AS_PROPOSED, KEPT)}
                for arm, outcomes in found.items()
            },
            options.plot,
        )
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
