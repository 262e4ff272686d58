"""SmolLM2-135M-Instruct, a chat model in Q4_1: it answers, and drafts change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.api.llm import LLM
from paceline.cli.demo import real_model as demonstration
from paceline.cli.prompts import Encoder
from paceline.request.sampling_params import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
# Without its second half the answer begins with a near tie: of `The` and `L`, 0.08 nats in float32.
QUESTION = [{"role": "user", "content": "What is the capital of France, and what is it known for?"}]


def test_it_knows_the_capital_of_france(smollm2: LLM) -> None:
    (output,) = smollm2.generate([QUESTION], SamplingParams(max_tokens=128, temperature=0.0))
    assert "The capital of France is Paris" in output.text
    assert output.finish_reason == "stop"


def test_it_is_called_by_its_name(smollm2: LLM) -> None:
    assert smollm2.model == "smollm2"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(smollm2: LLM, drafted_smollm2: LLM, temperature: float) -> None:
    prompts = demonstration().prompts(quick=False)
    ids = Encoder(smollm2.tokenizer).encode_all(prompts)
    params = SamplingParams(max_tokens=64, temperature=temperature, seed=7)
    plain = smollm2.generate(ids, params)
    drafted = drafted_smollm2.generate(ids, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert [o.finish_reason for o in drafted] == [o.finish_reason for o in plain]
    accepted = sum(o.completions[0].counters.num_accepted_tokens for o in drafted)
    assert accepted > 20, "hardly a draft was accepted, so little was tested"


def test_drafts_change_no_log_probability(smollm2: LLM, drafted_smollm2: LLM) -> None:
    (prompt, *_) = demonstration().prompts(quick=True)
    ids = Encoder(smollm2.tokenizer).encode_all([prompt])
    params = replace(SamplingParams(max_tokens=48, temperature=0.0), logprobs=2)
    (plain,), (drafted,) = smollm2.generate(ids, params), drafted_smollm2.generate(ids, params)
    assert drafted.completions[0].logprobs == plain.completions[0].logprobs


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def test_it_calls_a_tool_and_tells_what_that_said(smollm2: LLM) -> None:
    """It was not trained to: its template for tools leads it, so that clients can be tried."""
    chat: list[dict[str, object]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = smollm2.tokenizer.apply_chat_template(chat, tools=[WEATHER])
    usual = smollm2.sampling_defaults.params()
    wishes = [replace(usual, max_tokens=60, seed=seed) for seed in range(10)]
    answers = smollm2.generate([asked] * 10, wishes)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert sum(answer.text.strip() == call for answer in answers) >= 8
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    chat += [
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "18 degrees, sunny"},
    ]
    told = smollm2.tokenizer.apply_chat_template(chat, tools=[WEATHER])
    answers = smollm2.generate([told] * 10, wishes)
    assert sum("18 degrees" in answer.text for answer in answers) >= 7
