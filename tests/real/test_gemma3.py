"""Gemma 3 270M, a base model in Q4_K_M with sliding windows: it continues texts as it should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.api.llm import LLM
from paceline.request.sampling_params import SamplingParams
from tests.real.conftest import RealModel

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
CONTEXT = "The capital of Germany is Berlin. The capital of Italy is Rome. "
CAPITAL = "The capital of France is"
# transformers' own reading of the file, in float32: the likeliest tokens after CAPITAL.
TOP = {506: -1.6540, 496: -2.1979, 9079: -2.4768, 886: -2.6325, 3224: -2.9616}


@pytest.fixture(scope="module", params=["auto", "float32"])
def gemma(request: pytest.FixtureRequest, real_model: RealModel) -> Iterator[LLM]:
    real_model("gemma3-270m")
    with LLM("gemma3-270m", speculative_config=[], dtype=request.param) as llm:
        yield llm


@pytest.mark.parametrize(
    "prompt", [CONTEXT + CAPITAL, "The capital of France is the city of", "Italy: Rome\nFrance:"]
)
def test_it_knows_the_capital_of_france(gemma: LLM, prompt: str) -> None:
    assert gemma.generate(prompt, GREEDY).text.startswith(" Paris")


def test_its_log_probabilities_are_those_of_another_implementation(gemma: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=len(TOP))
    (found,) = gemma.generate(CAPITAL, params).completions[0].logprobs
    close = 1e-3 if gemma.config.dtype == "float32" else 0.5
    top = dict(found.top)
    assert max(top, key=top.__getitem__) == 506
    if gemma.config.dtype == "float32":
        assert list(top) == list(TOP)
    for token, logprob in top.items():
        if token in TOP:
            assert logprob == pytest.approx(TOP[token], abs=close)


def test_drafts_change_no_token(gemma: LLM) -> None:
    if not gemma.promises_identity:
        pytest.skip(f"{gemma.config.dtype} on {gemma.backend} promises identity up to rounding")
    prompts = [CONTEXT * 4 + CAPITAL, "1, 2, 3, 1, 2, 3, 1, 2,", "def add(a, b):\n    return a +"]
    params = SamplingParams(max_tokens=32, temperature=0.0)
    drafts = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    plain = gemma.generate(prompts, params)
    with LLM(
        gemma.checkpoint, dtype=gemma.config.dtype, speculative_config=drafts, planner="fixed"
    ) as llm:
        drafted = llm.generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert sum(o.completions[0].counters.num_accepted_tokens for o in drafted) > 0
