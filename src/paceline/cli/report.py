"""What is reported of a run: its figures, lines about it, and its JSON document.

Counts, and derives every ratio. Shows an answer as it is made; knows no conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.api.outputs import Completion, GenerationOutput
from paceline.cli.terminal import OriginSplitter, Screen, printable
from paceline.core.speedup import Arm
from paceline.request.sampling_params import NEUTRAL, SamplingDefaults, SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM


COUNTERS = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
"""Of :class:`~paceline.request.engine_stats.SpeculationCounters`, those that figures sum up."""


@dataclass(slots=True)
class Figures:
    """What one arm did: wall seconds, and counters summed over its requests.

    Attributes:
        longest_steps: of the request with the most steps, summed over runs.
    """

    seconds: float = 0.0
    output_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    longest_steps: int = 0

    def add(self, seconds: float, outputs: Sequence[GenerationOutput]) -> None:
        """Count the outputs of a run that took this long."""
        self.seconds += seconds
        completions = [each for output in outputs for each in output.completions]
        for completion in completions:
            self.output_tokens += len(completion.token_ids)
            for name in COUNTERS:
                setattr(self, name, getattr(self, name) + getattr(completion.counters, name))
        self.longest_steps += max((each.counters.num_steps for each in completions), default=0)

    def measure(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_finished: Callable[[int], None] | None = None,
        lora: str | None = None,
    ) -> list[GenerationOutput]:
        """Answer prompts at once, and count the answers."""
        began = time.perf_counter()
        outputs: list[GenerationOutput] = llm.generate(
            prompts, params, on_finished=on_finished, lora=lora
        )
        self.add(time.perf_counter() - began, outputs)
        return outputs

    def add_figures(self, other: Figures) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return self.output_tokens / self.num_steps if self.num_steps else 0.0

    def over(self, faster: Figures) -> float | None:
        """How many times as long this took; None where the other took no time."""
        return self.seconds / faster.seconds if faster.seconds else None

    @property
    def arm(self) -> Arm:
        """What decides how much faster one arm was than another."""
        return Arm(self.seconds, self.num_steps, self.longest_steps, self.num_draft_tokens)

    def document(self) -> dict[str, Any]:
        """The counters and what follows from them, as JSON takes it."""
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
        }


def run_document(
    llm: LLM,
    settings: Mapping[str, Any],
    outputs: Sequence[GenerationOutput],
    plain: Figures | None = None,
    speculative: Figures | None = None,
    identical: bool | None = None,
) -> dict[str, Any]:
    """Everything that a run reports, as JSON takes it.

    Args:
        settings: further facts about the run, such as the seed.
        outputs: of the speculative arm if there is one, one per prompt.
        plain, speculative: of the arms that ran.
        identical: None unless both did.
    """
    return {
        **engine_facts(llm),
        "promises_identity": llm.promises_identity,
        **settings,
        "num_prompts": len(outputs),
        "plain": plain.document() if plain else None,
        "speculative": speculative.document() if speculative else None,
        "speedup": plain.over(speculative) if plain and speculative else None,
        "identical": identical,
        "outputs": [_output(i, output) for i, output in enumerate(outputs)],
    }


def _output(index: int, output: GenerationOutput) -> dict[str, Any]:
    document: dict[str, Any] = {
        "prompt_index": index,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
    }
    if output.error is not None:
        document["error"] = str(output.error)
    return document


def check_answered(outputs: Sequence[GenerationOutput]) -> list[GenerationOutput]:
    """The same outputs; raises the error of one that failed: its tokens are no measurement."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return list(outputs)


def engine_facts(llm: LLM) -> dict[str, Any]:
    """What every document says of the engine that made its figures."""
    return {
        "device": llm.config.device,
        "model": llm.model,
        "dtype": llm.config.dtype,
        "backend": llm.backend,
        "speculative_config": [asdict(config) for config in llm.config.speculative],
    }


def banner(llm: LLM) -> str:
    """Model, arithmetic, device, proposers, and which promise holds."""
    proposers = " + ".join(llm.proposers) or "no speculation"
    promise = (
        "output identical to plain decoding, bit for bit"
        if llm.promises_identity
        else "output as plain decoding up to rounding: near-ties may fall differently"
    )
    place = f"{llm.config.device} ({llm.backend})"
    dtype = llm.checkpoint.arithmetic(llm.config.dtype)
    return f"{printable(llm.model)} | {dtype} on {place} | {proposers} | {promise}"


def sampling_line(defaults: SamplingDefaults, params: SamplingParams) -> str:
    """How answers are sampled, and whose choice that is."""
    values = {name: getattr(params, name) for name in NEUTRAL}
    is_default = values == {**NEUTRAL, **defaults.values}
    shown = defaults if is_default else SamplingDefaults(values, "as asked")
    seed = "" if params.is_greedy or params.seed is None else f", seed {params.seed}"
    return f"sampling: {shown}{seed}"


def closing_line(figures: Figures) -> str:
    """Tokens, speed and acceptance of a run."""
    line = f"{figures.output_tokens} tokens, {figures.tokens_per_second:.1f} tok/s"
    if not figures.num_draft_tokens:
        return line
    return (
        f"{line}, acceptance rate {figures.acceptance_rate:.1%}, "
        f"mean acceptance length {figures.mean_acceptance_length:.2f}"
    )


def answer_line(figures: Figures, seconds_to_first: float | None) -> str:
    """Tokens and speed of one answer, and how many of its tokens drafts had guessed."""
    line = f"{figures.output_tokens} tokens, {figures.tokens_per_second:.1f} tok/s"
    if seconds_to_first is not None:
        line += f", first token after {seconds_to_first:.2f} s"
    if figures.num_draft_tokens:
        line += f", guessed {figures.num_accepted_tokens} of {figures.output_tokens}"
    return line


def cut_line(completion: Completion, params: SamplingParams, context: int) -> str | None:
    """What cut an answer of a model that holds ``context`` tokens; None where nothing did."""
    if completion.finish_reason != "length":
        return None
    if len(completion.token_ids) == params.max_tokens:
        return f"cut at the limit of {params.max_tokens} tokens"
    return f"cut at the end of the context of {context} tokens"


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
