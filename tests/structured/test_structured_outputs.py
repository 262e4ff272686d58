"""Structured output through the Python API: a trained model, a real grammar library, all drafts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.api.llm import embedded_model
from paceline.core.errors import RequestError, UnservableRequestError
from paceline.structured import grammar

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reader", "writer", "administrator"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "tags", "active"],
    "additionalProperties": False,
}
SPECS: list[StructuredOutputs | None] = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=r"[A-Z][a-z]{2,9} \d{4}-\d{2}"),
    None,
    StructuredOutputs(choice=["positive", "negative", "neutral"]),
    StructuredOutputs(grammar='start: ("def " NAME "(self):\\n")+\nNAME: /[a-z_]{3,9}/'),
]
WORD = {"type": "regex", "pattern": "[a-z]{2,9}"}
SPECS.append(
    StructuredOutputs(
        structural_tag={
            "format": {
                "type": "tags_with_separator",
                "tags": [
                    {"begin": "<name>", "content": WORD, "end": "</name>"},
                    {"begin": "<note>", "content": {"type": "any_text"}, "end": "</note>"},
                ],
                "separator": "\n",
                "at_least_one": True,
            }
        }
    )
)
SPECULATION: dict[str, Any] = {
    "lookup": {"method": "prompt_lookup"},
    "grammar": {"method": "grammar"},
    "draft tree": {
        "model": embedded_model("draft"),
        "num_speculative_tokens": 5,
        "max_branching": 2,
    },
    "all": [{"method": "ngram"}, {"model": embedded_model("draft")}],
}


def wishes() -> list[SamplingParams]:
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5, "n": 2, "frequency_penalty": 0.4},
    ]
    return [
        SamplingParams(max_tokens=64, structured_outputs=spec, logprobs=1, **option)
        for option in options
        for spec in SPECS
    ]


def outputs(llm: LLM) -> list[Any]:
    params = wishes()
    return [
        [
            (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs)
            for c in output.completions
        ]
        for output in llm.generate(["# A record of one person:\n"] * len(params), params)
    ]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with LLM("embedded", speculative_config=[]) as llm:
        return outputs(llm)


@pytest.mark.parametrize(
    ("speculation", "planner"),
    [
        ("grammar", "fixed"),
        ("all", "auto"),
        pytest.param("lookup", "auto", marks=pytest.mark.slow),
        pytest.param("draft tree", "fixed", marks=pytest.mark.slow),
    ],
)
def test_plain_equals_speculative(speculation: str, planner: str, plain: list[Any]) -> None:
    with LLM("embedded", speculative_config=SPECULATION[speculation], planner=planner) as llm:
        assert outputs(llm) == plain
        assert "grammar" in llm.proposers
        counters = llm.stats().speculation
        assert counters.num_accepted_by_origin["grammar"] > 0
        assert llm.stats().num_proposer_failures == 0


def test_outputs_have_the_shape_that_was_asked_for(plain: list[Any]) -> None:
    for group, params in zip(plain, wishes(), strict=True):
        for _, text, reason, *_ in group:
            check_shape(params.structured_outputs, text, reason)


def check_shape(spec: StructuredOutputs | None, text: str, reason: str) -> None:
    if spec is None or reason != "stop":
        return
    if spec.json is not None:
        assert list(json.loads(text)) == list(SCHEMA["properties"])  # type: ignore[call-overload]
    if spec.regex is not None:
        assert re.fullmatch(spec.regex, text)
    if spec.choice is not None:
        assert text in spec.choice
    if spec.structural_tag is not None:
        part = r"<name>[a-z]{2,9}</name>|<note>((?!</note>)[^$])*</note>"
        assert re.fullmatch(rf"({part})(\n({part}))*", text)
    if spec.grammar is not None:
        assert re.fullmatch(r"(def [a-z_]{3,9}\(self\):\n)+", text)


def test_most_of_a_record_needs_no_step() -> None:
    params = SamplingParams(
        temperature=0, max_tokens=90, structured_outputs=StructuredOutputs(json=SCHEMA)
    )
    with LLM("embedded", speculative_config={"method": "grammar"}, planner="fixed") as llm:
        output = llm.generate("# A record of one person:\n", params)
        assert str(output.finish_reason) == "stop"
        assert llm.stats().num_target_forwards < 0.6 * len(output.token_ids)


@pytest.mark.parametrize(
    "spec", [StructuredOutputs(choice=["zebra"]), StructuredOutputs(regex=r"(a|b)*")]
)
def test_contradictions_are_the_request_s_own_fault(spec: StructuredOutputs) -> None:
    params = SamplingParams(structured_outputs=spec, allowed_token_ids=(5,))
    with (
        LLM("embedded", speculative_config=[]) as llm,
        pytest.raises(UnservableRequestError, match="no token is left"),
    ):
        llm.generate("a", params)


def test_a_grammar_that_passes_its_limits_later_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("embedded", speculative_config=[]) as llm:
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
        # The process in which it is tried out has started, with the honest limits.
        monkeypatch.setitem(grammar.LIMITS, "step_lexer_fuel", 10)
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="(x|y)*a[xy]{3}z"))
        with pytest.raises(UnservableRequestError, match="the grammar failed after 0 tokens"):
            llm.generate("a", params)


def test_a_refused_grammar_starts_nothing() -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
    with LLM("embedded", speculative_config=[]) as llm:
        with pytest.raises(RequestError, match=r"structured_outputs.regex"):
            llm.generate(["a", "b"], [SamplingParams(), bad])
        assert llm.stats().num_requests == 0
