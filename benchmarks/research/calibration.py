"""How well estimators of acceptance turn what proposers say into probabilities.

Real proposers draft for the embedded target, everything is verified, and each estimator then goes
through the log in the engine's order: it estimates a draft, is judged, and learns. The priors that
the kept estimator ships with are fitted to every other prompt; the rest is what is judged. Nothing
is timed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from harness import arguments, note, run_sample
from prompt_sets import load_prompts, spread
from proposer_sets import chain, described, draft_model
from report import Report, Target, number, table
from research.estimators import ALL, AS_PROPOSED, KEPT, Node, NodeEstimator
from research.scores import Log, Outcome, Recorder, Scores, compare, replay, score

from paceline import LLM, SamplingParams
from paceline.api.llm import embedded_model
from paceline.planner.priors import AS_ESTIMATED, LEAST_DEPTHS


def tree(config: Mapping[str, Any], nodes: int, branching: int) -> dict[str, Any]:
    """The same proposer with alternatives."""
    return {**config, "max_tree_nodes": nodes, "max_branching": branching}


MAX_CALIBRATION_ERROR = 0.05
"""Expected calibration error that is aimed at."""
TEMPERATURES = (0.0, 0.8)
HOSTILE = 1.3
"""Prose at this temperature is hardly predictable."""
BATCH = 8
MAX_MODEL_LEN = 1024
ARMS = {
    "prompt_lookup": chain(8),
    "prompt_lookup, tree of 16": tree(chain(8), 16, 4),
    "draft_model": draft_model(),
    "draft_model, tree of 16": tree(draft_model(6), 16, 4),
    "both, trees of 8": [tree(draft_model(), 8, 3), tree(chain(8), 8, 3)],
}
"""What drafts; the estimates of both are calibrated before their trees are merged."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and how it is gone on with.

    Attributes:
        kind: of text.
        is_fitted: priors are fitted to it, so it judges nothing.
    """

    kind: str
    temperature: float
    text: str
    is_fitted: bool

    @property
    def label(self) -> str:
        return f"{self.kind}, temperature {self.temperature:g}"


def prompts_of(options: argparse.Namespace) -> tuple[str, list[Prompt]]:
    """Which prompts they are, and the prompts, all kinds mixed as on a server."""
    source = load_prompts(options.prompts)
    kinds = {kind: source.kind(kind) for kind in ("code", "prose", "edit")}
    if source.source != "embedded":
        ours = load_prompts("embedded").sets
        kinds["embedded"] = [text for texts in ours.values() for text in texts]
    found = [
        Prompt(kind, temperature, text, is_fitted=index % 2 == 0)
        for kind, texts in kinds.items()
        for temperature in (*TEMPERATURES, *([HOSTILE] if kind == "prose" else []))
        for index, text in enumerate(spread(texts, options.num_prompts))
    ]
    random.Random(0).shuffle(found)
    return source.source, found


class ByPrompt(Recorder):
    """Knows, too, which prompt each request is of: its seed is the prompt's place."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, int] = {}

    def finish(self, request: Any) -> None:
        self.places[request.request_id] = request.seed

    def placed(self) -> Log:
        """The log with prompts' places for request ids."""
        return [
            [replace(draft, request_id=self.places[draft.request_id]) for draft in step]
            for step in self.log
        ]


def record(llm: LLM, speculative: Any, prompts: Sequence[Prompt], max_tokens: int) -> Any:
    """Generate, and return the log and the outputs."""
    llm.set_speculation(speculative)
    recorder = ByPrompt()

    def install(engine: Any) -> None:
        engine.drafting.planner = recorder

    llm.call(install)
    room = MAX_MODEL_LEN - max_tokens
    outputs = llm.generate(
        [llm.encode(prompt.text)[-room:] for prompt in prompts],
        [
            SamplingParams(max_tokens=max_tokens, temperature=prompt.temperature, seed=place)
            for place, prompt in enumerate(prompts)
        ],
    )
    for output in outputs:
        if output.error is not None:
            raise output.error
    return recorder.placed(), outputs


def counts(result: Any) -> dict[str, Any]:
    log, outputs = result
    return {"log": log, "output_tokens": [len(output.token_ids) for output in outputs]}


def half(log: Log, prompts: Sequence[Prompt], is_fitted: bool) -> Log:
    """The part of the log that priors are fitted to, or the part that judges."""
    return [
        [draft for draft in step if prompts[draft.request_id].is_fitted == is_fitted]
        for step in log
    ]


RIDGE = 3.0
"""How many labels the assumption is worth that a proposer's estimates are right as they are."""
NEWTON_STEPS = 30


class _Labels(NodeEstimator):
    """Collects log-odds and outcomes by origin and range of depths."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, int], list[tuple[float, bool]]] = {}

    def learn(self, node: Node, estimate: float, accepted: bool) -> None:
        self.found.setdefault(node.place, []).append((node.logit, accepted))


def fit_priors(logs: Sequence[Log]) -> dict[str, list[tuple[float, float]]]:
    """Slope and intercept per origin and range of depths, as :mod:`paceline.planner.priors` has.

    Args:
        logs: of one proposer each. A range of depths without labels goes by the one before it.
    """
    labels = _Labels()
    for drafts in logs:
        replay(drafts, labels)
    priors: dict[str, list[tuple[float, float]]] = {}
    for origin in sorted({origin for origin, _ in labels.found}):
        line, priors[origin] = AS_ESTIMATED[0], []
        for place in range(len(LEAST_DEPTHS)):
            found = labels.found.get((origin, place))
            line = _fit_line(found) if found else line
            priors[origin].append(line)
    return priors


def _fit_line(labels: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Logistic regression by Newton's method, with a ridge towards the proposer's estimate."""
    x = np.asarray([(logit, 1.0) for logit, _ in labels])  # [n, 2]
    accepted = np.asarray([accepted for _, accepted in labels], dtype=float)
    prior = line = np.asarray(AS_ESTIMATED[0])
    for _ in range(NEWTON_STEPS):
        probs = 1.0 / (1.0 + np.exp(-x @ line))
        gradient = x.T @ (accepted - probs) - RIDGE * (line - prior)
        curvature = (x * (probs * (1.0 - probs))[:, None]).T @ x + RIDGE * np.eye(2)
        line = line + np.linalg.solve(curvature, gradient)
    slope, intercept = line.tolist()
    return slope, intercept


EVERY_ARM = "all"


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    whole = [row for row in results if "estimator" in row and "text" not in row]
    found = [
        Target(
            f"calibration error of {KEPT}: {row['arm']}",
            row["calibration_error"],
            MAX_CALIBRATION_ERROR,
        )
        for row in whole
        if row["estimator"] == KEPT and row["arm"] != EVERY_ARM
    ]
    losses = {row["estimator"]: row["log_loss"] for row in whole if row["arm"] == EVERY_ARM}
    kept = losses.pop(KEPT, None)
    ratio = kept / min(losses.values()) if kept is not None else None
    return [*found, Target(f"log-loss of {KEPT} over that of the next best", ratio, 1.0)]


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    texts = table(["text", "labels", "proposed", "estimate", "accepted"], text_lines(results))
    *others, priors = page_tables(results)
    return [*others, texts, priors]


def page_tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The scores, the reliability diagrams and the fit, without a line for every kind of text."""
    whole = [row for row in results if "estimator" in row and "text" not in row]
    arms = list(dict.fromkeys(row["arm"] for row in whole))
    least = {arm: min(row["log_loss"] for row in whole if row["arm"] == arm) for arm in arms}
    lines = []
    for name in ALL:
        cells = {row["arm"]: row for row in whole if row["estimator"] == name}
        lines.append([name, *(cell(cells.get(arm), least[arm]) for arm in arms)])
    kept = [row for row in whole if row["estimator"] == KEPT]
    bins = [
        [row["arm"], *(f"{estimate:.2f} {share:.2f}" for _, estimate, share in row["bins"])]
        for row in kept
    ]
    width = max((len(line) for line in bins), default=1)
    padded = [line + [""] * (width - len(line)) for line in bins]
    return [
        table(["log-loss (* best) / Brier / ECE", *arms], lines),
        table([f"{KEPT}: estimate, accepted", *map(str, range(1, width))], padded),
        table(["prior", "slope and intercept per range of depths"], prior_lines(results)),
    ]


def cell(row: Mapping[str, Any] | None, least: float) -> str:
    """An estimator's scores in one arm, marked where its log-loss is the least."""
    if row is None:
        return "-"
    mark = "* " if row["log_loss"] == least else ""
    return f"{mark}{row['log_loss']:.4f} {row['brier']:.4f} {row['calibration_error']:.3f}"


def text_lines(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Per arm and text: what proposers and the kept estimator expect, and what came."""
    means: dict[tuple[str, str], dict[str, tuple[int, float, float]]] = {}
    for row in results:
        if "text" in row:
            count = row["count"]
            estimate = sum(number * mean for number, mean, _ in row["bins"]) / count
            accepted = sum(number * share for number, _, share in row["bins"]) / count
            at = means.setdefault((row["arm"], row["text"]), {})
            at[row["estimator"]] = count, estimate, accepted
    return [
        [
            f"{arm}: {text}",
            str(found[KEPT][0]),
            number(found[AS_PROPOSED][1]),
            number(found[KEPT][1]),
            number(found[KEPT][2]),
        ]
        for (arm, text), found in means.items()
    ]


def prior_lines(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [row["origin"], "  ".join(f"{slope:.2f} {shift:+.2f}" for slope, shift in row["prior"])]
        for row in results
        if "prior" in row
    ]


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


def judge(logs: Mapping[str, Log], prompts: Sequence[Prompt], report: Report) -> None:
    """The fit on one half of the prompts and the scores on the other."""
    of_one = [log for arm, log in logs.items() if isinstance(ARMS[arm], dict)]
    for origin, prior in fit_priors([half(log, prompts, True) for log in of_one]).items():
        report.results.append({"origin": origin, "prior": prior})
    everything: dict[str, list[Outcome]] = {}
    for arm, log in logs.items():
        rows, found = judged(arm, half(log, prompts, False), prompts)
        report.results += rows
        for name, outcomes in found.items():
            everything.setdefault(name, []).extend(outcomes)
    for name, outcomes in everything.items():
        report.results.append(scored(EVERY_ARM, name, score(outcomes)))


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, prompts=True)
    parser.sized("--num-prompts", 20, 3, "of each kind")
    parser.sized("--max-tokens", 128, 48, "per prompt")
    options = parser.parse_args(argv)
    if options.num_prompts < LEAST_PROMPTS:
        parser.error(
            f"--num-prompts is {options.num_prompts}; allowed: {LEAST_PROMPTS} or more: priors "
            "are fitted to every other prompt, and the rest judges"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
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
    judge(logs, prompts, report)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
