"""``paceline run``: answers to one prompt, to a file of them, or in a conversation.

Owns where prompts come from and the order of things; what is shown is the display's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.api.outputs import GenerationOutput
from paceline.cli.chat import PromptHistory, TerminalChat, talk
from paceline.cli.compare import compare_command
from paceline.cli.options import RunOptions
from paceline.cli.prompts import Prompt, asked_prompt, encoder_of, read_prompts
from paceline.cli.report import (
    Figures,
    banner,
    closing_line,
    run_document,
    sampling_line,
    stream_answer,
    tell_cut,
)
from paceline.cli.settings import (
    adapter_of,
    open_llm,
    sampling_params,
    speculative_config,
    structured_outputs,
)
from paceline.cli.terminal import OriginSplitter, Screen, Terminal
from paceline.config.speculative import without_memory
from paceline.core.checks import check_output
from paceline.core.errors import ConfigError
from paceline.profiling.chrome_trace import StepClock, write_trace
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM


EXIT_FAILED = 2


def run_command(options: RunOptions) -> int:
    """The work of ``paceline run``."""
    prompts = _prompts(options)
    if options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    assert options.seed is not None
    shape = structured_outputs(options)
    params = replace(sampling_params(options, options.seed), structured_outputs=shape)
    speculative = speculative_config(options, options.model)
    if options.lora is not None and (options.explain or options.compare):
        raise ConfigError("--lora cannot be used with --explain or --compare")
    if options.explain:
        from paceline.cli.explain import explain_prompt  # other runs need not wait for it

        return explain_prompt(options, _only_prompt(options, prompts or []), params, speculative)
    if options.trace is not None:
        if options.compare:
            raise ConfigError("--trace and --compare cannot be used together: tracing takes time")
        check_output(options.trace)
    if options.compare:
        return compare_command(options, prompts or [], params, speculative)
    if options.repetitions > 1:
        speculative = without_memory(speculative)
    with open_llm(options, speculative) as llm:
        default = replace(llm.sampling_defaults.params(), structured_outputs=shape)
        params = sampling_params(options, options.seed, default)
        screen = Screen(llm.proposers, json=options.json)
        screen.note(banner(llm))
        screen.note(sampling_line(llm.sampling_defaults, params))
        tokenizer = llm.checkpoint.tokenizer
        knows_thinking = tokenizer is not None and tokenizer.template_knows("enable_thinking")
        if options.no_thinking and not knows_thinking:
            screen.note("--no-thinking has no effect: the chat template does not know thinking")
        encoder = encoder_of(tokenizer, options)
        clock = llm.call(lambda engine: StepClock(engine).start()) if options.trace else None
        if prompts is None:
            code = _talk(TerminalChat(llm, encoder, params, screen, adapter_of(options)))
        else:
            code = _answer(llm, encoder.encode_all(prompts), params, options, screen)
        if options.trace is not None and clock is not None:
            write_trace(options.trace, {"run": list(clock.steps)})
        return code


def _talk(conversation: TerminalChat) -> int:
    history = PromptHistory()
    try:
        terminal = Terminal(history.texts())
    except ImportError:
        return talk(conversation, input)

    def remember(text: str) -> None:
        terminal.remember(text)
        history.add(text)

    return talk(conversation, terminal.read, remember)


def _prompts(options: RunOptions) -> list[Prompt] | None:
    """What to answer; None means to ask the person at the terminal."""
    if options.prompts is not None:
        if options.prompt is not None or options.question:
            raise ConfigError("--prompts and a prompt on the command line cannot be used together")
        return read_prompts(options.prompts)
    asked = asked_prompt(options.prompt, options.question)
    if asked is not None:
        return [Prompt(asked)]
    if options.json or options.compare or options.explain:
        raise ConfigError(
            "--json, --compare and --explain need prompts: give one after MODEL, --prompts, or a "
            "pipe"
        )
    return None


def _only_prompt(options: RunOptions, prompts: Sequence[Prompt]) -> Prompt:
    """The prompt that is explained; what cannot be combined with that is refused."""
    if options.compare:
        raise ConfigError(
            "--explain and --compare cannot be used together: --explain compares already"
        )
    if options.repetitions > 1:
        raise ConfigError("--explain and --repeat cannot be used together: --explain shows one run")
    if len(prompts) != 1:
        raise ConfigError(
            f"--explain shows one prompt, and {options.prompts} has {len(prompts)}: give -p or a "
            "file of one row"
        )
    return prompts[0]


def _answer(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    options: RunOptions,
    screen: Screen,
) -> int:
    figures, lora = Figures(), adapter_of(options)
    if len(prompts) == 1:
        screen.legend()
        outputs = [stream_answer(llm, prompts[0], params, screen, figures, lora=lora)]
        tell_cut(llm, outputs[0], params, screen)
    else:
        outputs = _answer_batch(llm, prompts, params, screen, figures, lora)
    for _ in range(options.repetitions - 1):
        figures.measure(llm, prompts, params, lora=lora)
    screen.end_line()
    screen.note(closing_line(figures))
    if options.json:
        settings = {"seed": params.seed, "temperature": params.temperature}
        arms = (None, figures) if llm.config.speculative else (figures, None)
        screen.document(run_document(llm, settings, outputs, *arms))
    return EXIT_FAILED if any(output.error for output in outputs) else 0


def _answer_batch(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    screen: Screen,
    figures: Figures,
    lora: str | None,
) -> list[GenerationOutput]:
    """Answer all as one batch, then show them in their order."""
    with screen.progress("answering", len(prompts)) as advance:
        outputs = figures.measure(llm, prompts, params, advance, lora)
    screen.legend()
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        screen.note(f"--- prompt {number}")
        show(llm, prompt, output, screen)
        tell_cut(llm, output, params, screen)
    return outputs


def show(llm: LLM, prompt: Sequence[int], output: GenerationOutput, screen: Screen) -> None:
    """Print a finished answer, coloured as if it streamed; its error if it has one."""
    answer = output.completions[0]
    splitter = OriginSplitter(llm.checkpoint.tokenizer, prompt)
    screen.write(splitter.split(answer.token_ids, answer.origins, answer.text))
    screen.end_line()
    if output.error is not None:
        screen.note(f"error: {output.error}")
