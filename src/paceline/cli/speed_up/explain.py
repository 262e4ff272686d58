"""``paceline explain``: one prompt step by step, with what the planner saw and what came of it.

``paceline run --explain`` is the same with that command's options.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.cli.options.options import (
    JSON_HELP,
    TRACE_HELP,
    EngineOptions,
    ModelOptions,
    RunOptions,
    SamplingOptions,
    SpeculationOptions,
    chat_template_kwargs,
    option,
    token_limit,
)
from paceline.cli.options.prompts import Prompt, encoder_of
from paceline.cli.options.resolve import engine_options, sampling_params, speculative_config
from paceline.cli.speed_up.profile import numbers
from paceline.cli.terminal.display import Screen, banner, wants_colour
from paceline.cli.terminal.report import engine_facts
from paceline.config import SpeculativeConfig
from paceline.core.checks import check_output
from paceline.core.errors import ConfigError
from paceline.profiling.explain_steps import StepRecord, cost_error, summarise
from paceline.request.request import Constraint
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.profiling.explain_run import Explanation
    from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(EngineOptions, SpeculationOptions, SamplingOptions, ModelOptions):
    """Options of ``paceline explain``."""

    prompt: str = option(..., "Text of the prompt.", "-p")
    chat: bool | None = option(
        None, "Apply the chat template (default: if the model has one).", both=True
    )
    system: str | None = option(None, "System message before the prompt.")
    no_thinking: bool = option(False, "Ask the chat template to turn thinking off.")
    default_chat_template_kwargs: str | None = chat_template_kwargs()
    max_tokens: int | None = token_limit(64)
    steps: str | None = option(None, "Show only these steps, e.g. 3-10 (default: all).")
    plot: str | None = option(
        None, "Plot costs, widths and draft tokens to a .png, .svg or .pdf file."
    )
    trace: str | None = option(None, TRACE_HELP)
    json: bool = option(False, JSON_HELP)


def explain_command(options: ExplainOptions) -> int:
    """The work of ``paceline explain``."""
    from paceline.profiling.explain import MAX_STEPS
    from paceline.profiling.plots import check_plot

    wanted = numbers("--steps", options.steps, 1, MAX_STEPS)
    if options.plot is not None:  # before minutes are spent
        check_plot(options.plot)
    speculative = speculative_config(options, options.model)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    params, prompt = sampling_params(options, seed), Prompt(options.prompt)
    return explain_prompt(options, prompt, params, speculative, wanted, options.plot)


def explain_prompt(
    options: ExplainOptions | RunOptions,
    prompt: Prompt,
    params: SamplingParams,
    speculative: tuple[SpeculativeConfig, ...],
    wanted: Sequence[int] = (),
    plot: str | None = None,
) -> int:
    """Answer a prompt and show its steps, as the options say; returns the exit code.

    Args:
        params: with a seed.
        speculative: who drafts.
        wanted: numbers of the steps that are shown, from 1; none is all.
        plot: the file to draw into.

    Raises:
        PacelineError: the options, the prompt or the model cannot be used.
    """
    from paceline.api.llm import LLM
    from paceline.cli.speed_up.explain_view import verdict_lines
    from paceline.profiling.chrome_trace import write_trace
    from paceline.profiling.explain_run import explain
    from paceline.profiling.plots import plot_steps

    if not speculative:
        raise ConfigError("explain needs speculation: leave out --no-speculation")
    if options.trace is not None:
        check_output(options.trace)
    with LLM(options.model, speculative_config=speculative, **engine_options(options)) as llm:
        screen = Screen(llm.proposers, json=options.json)
        screen.note(banner(llm))
        encoder = encoder_of(llm.tokenizer, options)
        ids, constraints = encoder.encode(prompt.content), _constraints(llm, params)
        with screen.progress("answering", 2 * (params.max_tokens or 0)) as advance:
            run = llm.call(lambda engine: explain(engine, ids, params, advance, constraints))
        pieces = token_texts(llm.tokenizer, run)
        _show(run, llm, pieces, wanted, screen)
        if plot is not None:
            texts = ["".join(pieces[run.emitted_by(record)]) for record in run.records]
            title = f"How {llm.model} answered, step by step"
            plot_steps(run.records, texts, plot, title, next(verdict_lines(run)))
        if options.trace is not None:
            runs = {"speculative": run.speculative.steps, "plain": run.plain.steps}
            write_trace(options.trace, runs)
        if options.json:
            settings = {"seed": params.seed, "temperature": params.temperature}
            screen.document(_document(run, llm, pieces) | settings)
    return 0


def _constraints(llm: LLM, params: SamplingParams) -> Sequence[Constraint]:
    """One for each of the two runs; none where the answer may be anything."""
    from paceline.structured.grammar import GrammarCompiler

    if params.structured_outputs is None:
        return ()
    shape = llm.checkpoint.config
    compiler = GrammarCompiler(llm.tokenizer, shape.vocab_size, shape.eos_token_ids)
    try:
        return compiler.constraints(params.structured_outputs, 2)
    finally:
        compiler.close()


def token_texts(tokenizer: Tokenizer, run: Explanation) -> list[str]:
    """What each token of the answer adds to its text."""
    from paceline.text.detokenizer import IncrementalDecoder

    decoder = IncrementalDecoder(tokenizer, run.prompt_token_ids)
    pieces = [decoder.push(token_id) for token_id in run.token_ids]
    if pieces:
        pieces[-1] += decoder.flush()
    return pieces


def _show(
    run: Explanation, llm: LLM, pieces: Sequence[str], wanted: Sequence[int], screen: Screen
) -> None:
    from paceline.cli.speed_up.explain_view import StepView, summary_lines, verdict_lines

    prompt, text_of = llm.tokenizer.decode(run.prompt_token_ids), _readable(llm.tokenizer)
    view = StepView(run, prompt, pieces, text_of, wants_colour(screen.out), _expert_bytes(llm))
    for line in verdict_lines(run):
        screen.say(line)
    screen.say("")
    for line in view.lines(wanted):
        screen.say(line)
    last = run.records[-1].index + 1
    if wanted and wanted[-1] > last:
        screen.note(f"the last step is step {last}: there is no step {wanted[-1]}")
    screen.say("")
    for line in summary_lines(run):
        screen.say(line)


def _expert_bytes(llm: LLM) -> float:
    from paceline.profiling.profile_machine import Work

    checkpoint, config = llm.checkpoint, llm.config
    work = Work.of(checkpoint.config, config.dtype, config.kv_cache_dtype, checkpoint.num_bytes)
    return work.expert_bytes


def _readable(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Texts of single tokens; those that are no text of their own by their names."""

    def text(token_id: int) -> str:
        decoded = tokenizer.decode([token_id], skip_special_tokens=False)
        is_partial = not decoded or "\ufffd" in decoded
        return (tokenizer.id_to_token(token_id) or decoded) if is_partial else decoded

    return text


def _document(run: Explanation, llm: LLM, pieces: Sequence[str]) -> dict[str, Any]:
    from paceline.cli.speed_up.explain_view import verdict_lines

    speedups, summaries = run.speedups(), summarise(run.records)
    text_of = _readable(llm.tokenizer)
    return {
        **engine_facts(llm),
        "verdict": list(verdict_lines(run)),
        "planner": llm.config.planner,
        "objective": asdict(llm.config.objective),
        "num_prompt_tokens": len(run.prompt_token_ids),
        "token_ids": run.token_ids,
        "text": "".join(pieces),
        "expert_bytes": _expert_bytes(llm),
        "identical": run.is_identical,
        "speedup": speedups[-1] if speedups else None,
        "cost_error": cost_error(run.records),
        "proposers": [asdict(each) for each in summaries],
        "steps": [
            _step(record, "".join(pieces[run.emitted_by(record)]), text_of)
            for record in run.records
        ],
    }


def _step(record: StepRecord, text: str, text_of: Callable[[int], str]) -> dict[str, Any]:
    found = asdict(record) | {"shape": record.shape._asdict(), "text": text}
    for part in found["requests"]:
        for node in part["nodes"]:
            node["text"] = text_of(node["token_id"])
    return found
