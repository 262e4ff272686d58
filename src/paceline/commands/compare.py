"""The same prompts plainly and speculatively: identical or not, and how much faster.

The plain arm is an engine in which speculation was never configured. The arms take turns, prompt
by prompt, and the one that begins alternates. Both arms are measured by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.commands.compare_noise import Round, why_disturbed
from paceline.commands.display import Screen, banner, closing_line, table
from paceline.commands.options import DEFAULTS, RunOptions
from paceline.commands.prompts import Prompt, encoder_of
from paceline.commands.report import Figures, Report, check_answered
from paceline.commands.resolve import NO_MEMORY, engine_options, without_memory
from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError, PacelineError
from paceline.models.embedded import embedded_model
from paceline.outputs import GenerationOutput
from paceline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM

EXIT_DIFFERENT = 1
WARM_UP_TOKENS = 16


@dataclass(slots=True)
class Pair:
    """Both arms on one group of prompts, summed over repetitions, each of which is a round."""

    first_prompt: int
    plain: Figures = field(default_factory=Figures)
    speculative: Figures = field(default_factory=Figures)
    outputs: list[GenerationOutput] = field(default_factory=list)
    differing: set[int] = field(default_factory=set)
    rounds: list[Round] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        seconds = self.speculative.seconds
        return self.plain.seconds / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """All groups of a comparison, in order."""

    pairs: Sequence[Pair]

    @property
    def differing(self) -> list[int]:
        """Prompts whose outputs differ, counted from 0."""
        return sorted(index for pair in self.pairs for index in pair.differing)

    @property
    def disturbed(self) -> str | None:
        """Why no speed-up can be told; None where one can."""
        return why_disturbed([each for pair in self.pairs for each in pair.rounds])

    def report(self) -> Report:
        plain, speculative = Figures(), Figures()
        for pair in self.pairs:
            plain.add_figures(pair.plain)
            speculative.add_figures(pair.speculative)
        outputs = [output for pair in self.pairs for output in pair.outputs]
        return Report(outputs, plain, speculative, identical=not self.differing)


def compare(
    plain: LLM,
    speculative: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    repeat: int = 1,
    group_size: int = 1,
    advance: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Run prompts through both arms in turns, after a warm-up that is not counted.

    Args:
        params: of all, or of each; with a seed, so that both arms sample alike.
        group_size: prompts that run at once.
        advance: called with the number of groups that are done, repetitions counted.

    Raises:
        RequestError: a prompt cannot be served.
    """
    wishes = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    assert all(wish.is_greedy or wish.seed is not None for wish in wishes)
    longest = wishes[0].max_tokens or WARM_UP_TOKENS
    short = replace(wishes[0], max_tokens=min(WARM_UP_TOKENS, longest))
    for arm in (plain, speculative):
        arm.generate([prompts[0]], short)
    pairs = [Pair(first) for first in range(0, len(prompts), group_size)]
    done = 0
    for _ in range(repeat):
        for pair in pairs:
            part = slice(pair.first_prompt, pair.first_prompt + group_size)
            arms = [(plain, Figures()), (speculative, Figures())]
            _run_pair(pair, arms, list(prompts[part]), wishes[part], plain_first=done % 2 == 0)
            done += 1
            advance(done)
    return Comparison(pairs)


def _run_pair(
    pair: Pair,
    arms: Sequence[tuple[LLM, Figures]],
    group: list[list[int]],
    params: Sequence[SamplingParams],
    plain_first: bool,
) -> None:
    outputs = {}
    for llm, figures in arms if plain_first else reversed(arms):
        outputs[llm] = check_answered(figures.measure(llm, group, params))
    (plain, one_arm), (speculative, other_arm) = arms
    pair.plain.add_figures(one_arm)
    pair.speculative.add_figures(other_arm)
    pair.rounds.append((one_arm, other_arm))
    expected, found = outputs[plain], outputs[speculative]
    pair.outputs = pair.outputs or found
    for index, (one, other) in enumerate(zip(expected, found, strict=True), pair.first_prompt):
        if one.token_ids != other.token_ids or one.finish_reason != other.finish_reason:
            pair.differing.add(index)


@contextmanager
def open_arms(
    model: str | None,
    speculative: tuple[SpeculativeConfig, ...],
    settings: Mapping[str, Any],
    *,
    is_timed: bool = True,
    json: bool = False,
    **plainly: Any,
) -> Iterator[tuple[LLM, LLM, Screen]]:
    """A plain and a speculative engine on the weights of one checkpoint, and where to tell of them.

    Args:
        settings: of both engines.
        is_timed: every prompt is as if it were new. Prefix caches are off: with them only the first
            repetition would read its prompts. Nor does any proposer remember what was answered.
        json: standard output is for one document, as of :class:`Screen`.
        plainly: settings of the plain engine alone.

    Raises:
        ConfigError, ModelLoadError: the model or an option cannot be used.
        PacelineError: there is nobody to draft.
    """
    from paceline.llm import LLM
    from paceline.models.checkpoint import load_checkpoint

    if not speculative:
        raise ConfigError("--compare needs speculation: leave out --no-speculation")
    if settings.get("pipeline_stages"):
        raise ConfigError(
            "a stage serves one engine, and a comparison has two: leave --pipeline-stage away; "
            "--pipeline-parallel-size alone has stages on this machine, for each engine its own"
        )
    if is_timed:
        settings, speculative = (
            {**settings, "enable_prefix_caching": False},
            without_memory(speculative),
        )
    load_format = settings.get("load_format", DEFAULTS.load_format)
    source: Any = model or embedded_model("target")
    if settings.get("pipeline_parallel_size", 1) == 1:  # else each arm has processes, which load it
        source = load_checkpoint(source, load_format=load_format)
    with (
        LLM(source, speculative_config=[], **{**settings, **plainly}) as plain,
        LLM(source, speculative_config=speculative, **settings) as llm,
    ):
        screen = Screen(llm.proposers, json=json)
        screen.note(banner(llm))
        if is_timed:
            screen.note(NO_MEMORY)
        if not llm.proposers:
            raise PacelineError("no proposer could be built, so there is nothing to compare")
        yield plain, llm, screen


def compare_command(
    options: RunOptions,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    speculative: tuple[SpeculativeConfig, ...],
) -> int:
    """``paceline run --compare``; returns the exit code."""
    settings = engine_options(options)
    with open_arms(options.model, speculative, settings, json=options.json) as (plain, llm, screen):
        encoder = encoder_of(llm.checkpoint.tokenizer, options)
        ids, size = encoder.encode_all(prompts), options.max_num_seqs or 1
        groups = -(-len(ids) // size) * options.repeat
        with screen.progress("comparing", groups) as advance:
            comparison = compare(
                plain, llm, ids, params, repeat=options.repeat, group_size=size, advance=advance
            )
        _show(comparison, llm, screen)
        if options.json:
            facts: dict[str, Any] = {"seed": params.seed, "temperature": params.temperature}
            facts |= {"repeat": options.repeat, "disturbed": comparison.disturbed}
            screen.document(comparison.report().document(llm, facts))
        return EXIT_DIFFERENT if comparison.differing and llm.promises_identity else 0


def _show(comparison: Comparison, llm: LLM, screen: Screen) -> None:
    screen.say(comparison_table(comparison))
    report = comparison.report()
    assert report.plain is not None
    assert report.speculative is not None
    screen.say(f"plain: {closing_line(report.plain)}")
    screen.say(f"speculative: {closing_line(report.speculative)}")
    screen.say(verdict(comparison, llm.promises_identity))


def comparison_table(comparison: Comparison) -> str:
    """A row per group of prompts."""
    rows = []
    for pair in comparison.pairs:
        first, last = pair.first_prompt + 1, pair.first_prompt + len(pair.outputs)
        rows.append({"prompt": f"{first}" if first == last else f"{first}-{last}"} | cells(pair))
    return table(rows)


def cells(pair: Pair) -> dict[str, str]:
    """The figures of both arms in a table."""
    return {
        "plain tok/s": f"{pair.plain.tokens_per_second:.1f}",
        "speculative tok/s": f"{pair.speculative.tokens_per_second:.1f}",
        "speed-up": f"{pair.speedup:.2f}x",
        "acceptance length": f"{pair.speculative.mean_acceptance_length:.2f}",
        "identical": "NO" if pair.differing else "yes",
    }


def verdict(comparison: Comparison, promises_identity: bool) -> str:
    """One sentence: identical or not, faster or not, as measured, where that can be told."""
    report, disturbed = comparison.report(), comparison.disturbed
    speedup = report.speedup or 0.0
    rounded = f"{speedup:.2f}x"
    if disturbed is not None:
        speed = f"and no speed-up can be told, the machine was busy: {disturbed}; measure again"
    elif rounded == "1.00x":
        speed = "as fast as plain decoding"
    elif speedup > 1.0:
        speed = f"{rounded} faster"
    else:
        speed = f"slower: {rounded} the speed of plain decoding"
    different, total = len(comparison.differing), len(report.outputs)
    if not different:
        return f"identical output, {speed}"
    excuse = "" if promises_identity else " (this path promises identity up to rounding)"
    return f"DIFFERENT output for {different} of {total} prompts{excuse}, {speed}"
