"""What is refused before it becomes a request, and how soon."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from paceline.core.errors import RequestError
from paceline.engine.admission import check_prompt
from paceline.request.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 1000


@pytest.mark.parametrize("bad", [-1, VOCAB, 1.5, None, True])
def test_what_is_no_token_is_named(bad: object) -> None:
    with pytest.raises(RequestError, match=str(bad)):
        check_prompt([*range(5, 50), bad], GREEDY, 100, VOCAB)  # type: ignore[list-item]


@pytest.mark.timing
def test_a_long_prompt_holds_nobody_up() -> None:
    """The engine's thread looks at it, so it does not look at every token by itself."""
    prompt = list(range(VOCAB)) * 100

    def check() -> None:
        check_prompt(prompt, GREEDY, len(prompt) + 1, VOCAB)

    def one_by_one() -> None:
        for token in prompt:
            assert type(token) is int and 0 <= token < VOCAB  # noqa: PT018

    pairs = [(processor_seconds(check), processor_seconds(one_by_one)) for _ in range(15)]
    assert min(one for one, _ in pairs) < 0.5 * min(other for _, other in pairs)


def processor_seconds(work: Callable[[], None]) -> float:
    """Other processes do not lengthen it as they do the time that passes."""
    began = time.thread_time()
    work()
    return time.thread_time() - began
