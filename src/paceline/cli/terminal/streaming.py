"""One answer, shown as it is made and counted. Knows no prompt's text and no conversation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.api.outputs import Completion, GenerationOutput
from paceline.cli.terminal.display import OriginSplitter, Screen, cut_line
from paceline.cli.terminal.report import Figures
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM


def stream_answer(
    llm: LLM,
    prompt: list[int],
    params: SamplingParams,
    screen: Screen,
    figures: Figures,
    interrupt_ends_it: bool = False,
    lora: str | None = None,
) -> GenerationOutput:
    """Show an answer as it is made, and count it."""
    completion = Completion(0)
    splitter = OriginSplitter(llm.checkpoint.tokenizer, prompt)
    llm.reset_stats()
    began = time.perf_counter()
    try:
        for output in llm.stream(prompt, params, lora=lora):
            if completion.time_to_first_token is None:
                completion.time_to_first_token = time.perf_counter() - began
            completion.add(output)
            screen.write(splitter.split(output.token_ids, output.origins, output.text))
    except KeyboardInterrupt:
        if not interrupt_ends_it:
            raise
        completion.finish_reason = "abort"
    seconds = time.perf_counter() - began
    completion.counters = llm.stats().speculation
    answer = GenerationOutput(prompt, [completion])
    figures.add(seconds, [answer])
    return answer


def tell_cut(llm: LLM, answer: GenerationOutput, params: SamplingParams, screen: Screen) -> None:
    """Say where an answer was cut, if it was."""
    assert llm.config.max_model_len is not None
    cut = cut_line(answer.completions[0], params, llm.config.max_model_len)
    if cut is not None:
        screen.note(cut)
