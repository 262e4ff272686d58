"""A budget of thoughts with and without drafts: closed at the same token, within no character."""

from __future__ import annotations

import pytest

from paceline.api.llm import LLM
from paceline.request.sampling_params import SamplingParams
from paceline.request.structured_outputs import StructuredOutputs, ThoughtMarks

pytest.importorskip("llguidance")
PROMPTS = ("Once upon a time", "def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "\u65e5")
CLOSING = "\n</think>\n"


def params(budget: int, temperature: float) -> SamplingParams:
    after = ThoughtMarks("<think>", CLOSING, opened=True, budget=budget)
    return SamplingParams(
        max_tokens=40,
        temperature=temperature,
        seed=3,
        structured_outputs=StructuredOutputs(free=True, after=after),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(temperature: float) -> None:
    """The default drafts, prompt lookup and a draft model among them."""
    wishes = [params(budget, temperature) for budget in (0, 1, 7) for _ in PROMPTS]
    prompts = [*PROMPTS] * 3
    with LLM("embedded", speculative_config=[]) as plain:
        expected = plain.generate(prompts, wishes)
        free = plain.generate(PROMPTS, SamplingParams(max_tokens=7, temperature=0.0))
        closing = plain.tokenizer.encode(CLOSING, add_special_tokens=False)
        texts = [plain.tokenizer.decode(each.token_ids[:7]) for each in free]
    with LLM("embedded") as llm:
        found = llm.generate(prompts, wishes)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for number, output in enumerate(expected):
        budget = (0, 1, 7)[number // len(PROMPTS)]
        thoughts, mark, _ = output.text.partition(CLOSING)
        assert mark, output.text
        assert "\ufffd" not in thoughts
        assert budget > 0 or not thoughts
        if budget == 7 and temperature == 0:
            assert thoughts.startswith(texts[number % len(PROMPTS)])
    assert len(closing) > 1, "it takes several tokens"
