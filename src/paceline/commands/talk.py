"""A conversation on a terminal: a chat with history, or texts that the model continues.

Ctrl-C ends an answer, Ctrl-D the conversation. Knows no options.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.commands.display import OriginSplitter, Screen, closing_line
from paceline.commands.prompts import Encoder
from paceline.commands.report import Figures
from paceline.errors import RequestError
from paceline.outputs import Completion, GenerationOutput
from paceline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM

PROMPT = "> "


def talk(llm: LLM, encoder: Encoder, params: SamplingParams, screen: Screen) -> int:
    """Ask, answer and remember until the end of input; returns the exit code."""
    # Importing it gives input() line editing and a history.
    import readline  # noqa: F401

    subject = "chat" if encoder.uses_chat else "texts to continue (the model has no chat template)"
    screen.note(f"{subject}; Ctrl-C ends an answer, Ctrl-D leaves")
    screen.legend()
    history: list[dict[str, Any]] = []
    while True:
        try:
            text = input(PROMPT)
        except EOFError:
            screen.say("")
            return 0
        except KeyboardInterrupt:
            screen.say("")
            continue
        if not text.strip():
            continue
        question = {"role": "user", "content": text}
        try:
            prompt = encoder.encode([*history, question] if encoder.uses_chat else text)
            answer = _answer(llm, prompt, params, screen)
        except RequestError as error:
            screen.note(f"error: {error}")
            continue
        history += [question, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, prompt: list[int], params: SamplingParams, screen: Screen) -> str:
    """Stream one answer up to its end or an interrupt; returns its text."""
    completion = Completion(0)
    splitter = OriginSplitter(llm.checkpoint.tokenizer, prompt)
    llm.reset_stats()
    began = time.perf_counter()
    try:
        for output in llm.stream(prompt, params):
            completion.add(output)
            screen.write(splitter.split(output.token_ids, output.origins, output.text))
    except KeyboardInterrupt:
        completion.finish_reason = "abort"
    seconds = time.perf_counter() - began
    completion.counters = llm.stats().speculation
    figures = Figures()
    figures.add(seconds, [GenerationOutput(prompt, [completion])])
    screen.note(closing_line(figures))
    return completion.text
