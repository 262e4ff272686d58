"""What ``calibration.py`` judges by: which proposers draft on which prompts, and the log of it."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prompt_sets import load_prompts, spread
from proposer_sets import chain, draft_model, tree

from paceline import LLM, SamplingParams
from paceline.workbench.estimators_log import Log, Recorder

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
