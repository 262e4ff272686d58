"""Requests of a load and their answers when each runs alone, plainly, in this process.

A bounded set of distinct requests over every kind of sampling option, so that all answers can be
known before the load begins. Knows no HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prompt_sets import load_prompts

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.outputs import Completion

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "is_open": {"type": "boolean"}},
    "required": ["name", "is_open"],
    "additionalProperties": False,
}
OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.9, "presence_penalty": 1.0, "logit_bias": {267: 3.0, 300: -5.0}},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.6, "logprobs": 0, "min_tokens": 12, "n": 3},
    {"temperature": 0.0, "stop": ["return", "\n\n"]},
    {"temperature": 0.9, "stop": ["e"], "include_stop_str_in_output": True},
    {"temperature": 0.8, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0.5, "structured_outputs": {"regex": "[a-z]{3,20} (yes|no)"}},
)
LENGTHS = (1, 8, 24, 48, 96, 160)
LONG = {"temperature": 0.8, "n": 4, "logprobs": 5, "ignore_eos": True, "max_tokens": 200}
"""Answers too large for the buffers between server and client."""
PROMPT_CHARACTERS = (60, 200, 500)


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample of an answer, in what every way of asking can be compared by."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Known:
    """A request, and its answer.

    Attributes:
        body: fields of ``/v1/completions`` without those that do not change the answer.
        prompt_ids: the prompt, encoded.
    """

    body: Mapping[str, Any]
    prompt_ids: Sequence[int]
    choices: Sequence[Choice]


def bodies(count: int, source: str) -> list[dict[str, Any]]:
    """Distinct requests: options in turn, with prompts and lengths drawn from a fixed seed."""
    rng = random.Random(0)
    sets = load_prompts(source)
    prompts = [text for kind in ("code", "prose", "edit") for text in sets.kind(kind)]
    found = []
    for index in range(count):
        options = LONG if index % 16 == 15 else OPTIONS[index % len(OPTIONS)]
        body = {
            "prompt": rng.choice(prompts)[: rng.choice(PROMPT_CHARACTERS)],
            "seed": index,
            "top_p": 1.0,
            "max_tokens": rng.choice(LENGTHS),
            **options,
        }
        found.append(body)
    return found


def params(body: Mapping[str, Any]) -> SamplingParams:
    fields = {name: value for name, value in body.items() if name != "prompt"}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputs(**fields["structured_outputs"])
    return SamplingParams(**fields)


def answered(wanted: Sequence[Mapping[str, Any]], **engine: Any) -> list[Known]:
    """The answers, one request at a time, of an engine without speculation.

    Args:
        engine: options of :class:`~paceline.llm.LLM`.
    """
    found = []
    with LLM(speculative_config=[], **engine) as llm:
        for body in wanted:
            ids = llm.encode(body["prompt"])
            output = llm.generate(ids, params(body))
            found.append(Known(body, ids, [_choice(each) for each in output.completions]))
    return found


def _choice(completion: Completion) -> Choice:
    return Choice(
        completion.text,
        tuple(completion.token_ids),
        tuple(entry.logprob for entry in completion.logprobs),
        None if completion.finish_reason is None else str(completion.finish_reason),
        completion.stop_reason,
    )
