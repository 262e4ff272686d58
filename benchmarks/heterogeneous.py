"""What draft models of another vocabulary bring: each of three small models drafts for each.

The models speak the same domain in vocabularies of 2048, 512 and 105 tokens; they lie outside the
repository. Beside what an engine accepted stands what the same draft would reach if it had the
target's vocabulary (:mod:`heterogeneous_reference`), and what drafts of the target's vocabulary
reach that can be run: the target itself, and the target without its last layer. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import arguments, note, run_sample
from heterogeneous_reference import foreseen, steps_over
from prompt_sets import data_folder
from report import Report, Target, number, table

from paceline import LLM, SamplingParams

MODELS = {"2048": "tinystories-656k", "512": "stories260k", "105": "babyllama-tok105"}
OWN_LAYERS = "first layers"
"""The draft that is the target without its last layer."""
LAYERS = {"2048": 1, "512": 4, "105": 4}
STORIES = "corpora/tinystories_1000.json"
MAX_MODEL_LEN = 256
CHAIN = 4
ARMS: Mapping[str, Mapping[str, Any]] = {
    f"chain of {CHAIN}": {"num_speculative_tokens": CHAIN},
    "tree of 16": {"num_speculative_tokens": 6, "max_tree_nodes": 16, "max_branching": 3},
}
TEMPERATURES = (0.0, 0.8)
PROMPT_CHARACTERS = 60
FIRST_STORY = 5
REFERENCE_ARM = f"chain of {CHAIN}"
WANTED = 0.4


def prompts(count: int) -> list[str]:
    """Beginnings of stories, cut before a word."""
    stories = json.loads((data_folder() / STORIES).read_text(encoding="utf-8"))
    chosen = stories[FIRST_STORY : FIRST_STORY + count]
    return [story[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] for story in chosen]


def generate(
    model: Path, config: Mapping[str, Any] | None, options: argparse.Namespace, temperature: float
) -> dict[str, Any]:
    """All prompts at once through an engine that verifies whatever was drafted."""
    texts = prompts(options.num_prompts)
    params = [
        SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=seed)
        for seed in range(len(texts))
    ]
    with LLM(
        str(model),
        speculative_config=config,
        planner="fixed",
        device=options.device,
        max_model_len=MAX_MODEL_LEN,
        strict=True,
    ) as llm:
        outputs = llm.generate(texts, params)
        counters = llm.stats().speculation
        return {
            "answers": [list(output.token_ids) for output in outputs],
            "prompts": [llm.encode(text) for text in texts],
            "steps": counters.num_steps,
            "emitted": counters.num_emitted_tokens,
            "drafted": counters.num_draft_tokens,
            "accepted": counters.num_accepted_tokens,
        }


# --- rows -----------------------------------------------------------------------------------------


class Runs:
    """Runs engines, and keeps what they counted as samples of the report."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self.folder = data_folder() / "models"

    def take(
        self, target: str, draft: str | None, arm: str, temperature: float
    ) -> dict[str, Any] | None:
        """What one engine did with all prompts; None when it failed."""
        config: dict[str, Any] | None = None
        if draft == OWN_LAYERS:
            config = {"method": "self", "draft_layers": LAYERS[target], **ARMS[arm]}
        elif draft is not None:
            model = str(self.folder / MODELS[draft])
            config = {"model": model, "use_heterogeneous_vocab": True, **ARMS[arm]}
        found: dict[str, Any] = {}

        def run() -> dict[str, Any]:
            found.update(generate(self.folder / MODELS[target], config, self.options, temperature))
            return found

        item = f"{target} < {draft}, {temperature}"
        note(f"{item}, {arm}")
        sample = run_sample(arm, item, run, counted)
        self.report.samples.append(replace(sample, seconds=None))
        return None if sample.failed else found

    def target(self, name: str, temperature: float) -> None:
        """Plain answers of one target, then every draft for it."""
        plain = self.take(name, None, "plain", temperature)
        if plain is None:
            return
        for draft in (*MODELS, OWN_LAYERS):
            reference = None
            if temperature == 0.0 and draft not in (name, OWN_LAYERS):
                reference = self.reference(name, draft, plain)
            for arm in ARMS:
                row = {"target": name, "draft": draft, "arm": arm, "temperature": temperature}
                found = self.take(name, draft, arm, temperature)
                if found is not None:
                    row |= rates(found) | {"identical": found["answers"] == plain["answers"]}
                if found is not None and reference is not None and arm == REFERENCE_ARM:
                    row |= {"same_vocabulary": reference}
                    row["share"] = row["accepted_per_step"] / reference
                self.report.results.append(row)

    def reference(self, target: str, draft: str, plain: Mapping[str, Any]) -> float:
        """Accepted tokens per step, were the draft's vocabulary the target's."""
        prompt_lens = [len(ids) for ids in plain["prompts"]]
        tokens = [a + b for a, b in zip(plain["prompts"], plain["answers"], strict=True)]
        models = self.folder / MODELS[target], self.folder / MODELS[draft]
        flags = foreseen(*models, tokens, prompt_lens)
        taken = [steps_over(each, CHAIN) for each in flags]
        return sum(accepted for _, accepted in taken) / sum(steps for steps, _ in taken)


def counted(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("steps", "emitted", "drafted", "accepted")}


def rates(result: Mapping[str, Any]) -> dict[str, float]:
    return {
        "accepted_per_step": result["accepted"] / result["steps"],
        "acceptance_rate": result["accepted"] / max(1, result["drafted"]),
    }


def targets(results: Sequence[Mapping[str, Any]]) -> list[Target]:
    shares = [row["share"] for row in results if "share" in row]
    same = [bool(row.get("identical")) for row in results]
    return [
        Target(
            "least share of what a draft of the target's vocabulary reaches",
            min(shares, default=None),
            WANTED,
            "at least",
        ),
        Target(
            "share of rows with identical output",
            sum(same) / len(same) if same else None,
            1.0,
            "at least",
        ),
    ]


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    headers = ["target", "draft", "temperature", *ARMS, "same vocabulary", "share", "identical"]
    rows = []
    for key in dict.fromkeys((row["target"], row["draft"], row["temperature"]) for row in results):
        found = {r["arm"]: r for r in results if (r["target"], r["draft"], r["temperature"]) == key}
        chain = found[REFERENCE_ARM]
        rows.append(
            [
                *key,
                *(_cell(found.get(arm, {})) for arm in ARMS),
                number(chain.get("same_vocabulary")),
                f"{chain['share']:.0%}" if "share" in chain else "-",
                "yes" if all(row.get("identical") for row in found.values()) else "NO",
            ]
        )
    return [table(headers, rows)]


def _cell(row: Mapping[str, Any]) -> str:
    if "accepted_per_step" not in row:
        return "-"
    return f"{row['accepted_per_step']:.2f} ({row['acceptance_rate']:.0%})"


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--num-prompts", type=int, help="stories to go on with (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=80, help="per answer (default: 80)")
    options = parser.parse_args(argv)
    options.num_prompts = options.num_prompts or (2 if options.quick else 8)
    options.temperatures = TEMPERATURES[:1] if options.quick else TEMPERATURES
    if not (data_folder() / STORIES).is_file():
        parser.error(f"{data_folder() / STORIES} is missing: set PACELINE_TEST_DATA")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    config = {
        "models": MODELS,
        "arms": {name: dict(shape) for name, shape in ARMS.items()},
        "max_model_len": MAX_MODEL_LEN,
        "quick": options.quick,
        "prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
    }
    report = Report("heterogeneous", config)
    runs = Runs(options, report)
    for temperature in options.temperatures:
        for name in MODELS:
            runs.target(name, temperature)
    report.targets = targets(report.results)
    return report.finish(options, tables(report.results))


if __name__ == "__main__":
    sys.exit(main())
