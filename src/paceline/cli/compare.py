"""The same prompts plainly and speculatively: identical or not, and how much faster.

The plain arm is an engine in which speculation was never configured. The arms take turns, prompt
by prompt, and the one that begins alternates, also from one repetition of a prompt to the next.
Both arms are measured by the same code; :mod:`paceline.core.speedup` says what may be claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline.api.outputs import GenerationOutput
from paceline.cli.options import DEFAULTS, RunOptions
from paceline.cli.prompts import Prompt, encoder_of
from paceline.cli.report import Figures, banner, check_answered, closing_line, run_document
from paceline.cli.settings import NO_MEMORY, engine_options
from paceline.cli.terminal import Screen, table
from paceline.config import SpeculativeConfig
from paceline.config.speculative import without_memory
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.machine import Load, current_load
from paceline.core.speedup import Claim, Round, claim
from paceline.models.threads import cores
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM


EXIT_DIFFERENT = 1
WARM_UP_TOKENS = 16
PATIENCE = 20.0
"""Seconds after which prompts are not repeated once more, unless an option says how often."""
MOST_REPETITIONS = 12
"""Of short answers, whose interval stays wide."""


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
        """As measured, by whatever disturbed it too."""
        return self.plain.over(self.speculative) or 0.0

    @property
    def claim(self) -> Claim:
        """What may be claimed of it."""
        return claim([self.rounds])


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """All groups of a comparison, in order.

    Attributes:
        repetitions: of each group.
        load: of the machine before it began.
    """

    pairs: Sequence[Pair]
    repetitions: int = 1
    load: Load | None = None

    @property
    def differing(self) -> list[int]:
        """Prompts whose outputs differ, counted from 0."""
        return sorted(index for pair in self.pairs for index in pair.differing)

    @property
    def claim(self) -> Claim:
        return claim([pair.rounds for pair in self.pairs])

    def facts(self) -> dict[str, Any]:
        """What a document says of how certain the speed-up is."""
        speed_up = self.claim
        claimed = {name: value for name, value in asdict(speed_up).items() if name != "untold"}
        return {
            "repeat": self.repetitions,
            "disturbed": speed_up.untold,
            "claim": claimed if speed_up.untold is None else None,
            "load": None if self.load is None else asdict(self.load),
        }

    @property
    def outputs(self) -> list[GenerationOutput]:
        return [output for pair in self.pairs for output in pair.outputs]

    def arms(self) -> tuple[Figures, Figures]:
        """The plain and the speculative arm, over all groups."""
        plain, speculative = Figures(), Figures()
        for pair in self.pairs:
            plain.add_figures(pair.plain)
            speculative.add_figures(pair.speculative)
        return plain, speculative

    def document(self, llm: LLM, settings: Mapping[str, Any]) -> dict[str, Any]:
        """As :func:`~paceline.cli.report.run_document`, with :meth:`facts`."""
        settings = {**settings, **self.facts()}
        return run_document(llm, settings, self.outputs, *self.arms(), identical=not self.differing)


def compare(
    plain: LLM,
    speculative: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    repeat: int | None = 1,
    group_size: int = 1,
    advance: Callable[[int], None] = lambda done: None,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.perf_counter,
) -> ArmComparison:
    """Run prompts through both arms in turns, after a warm-up that is not counted.

    Args:
        params: of all, or of each; with a seed, so that both arms sample alike.
        repeat: how often; None: until the speed-up is certain, or ``patience`` seconds are over.
        group_size: prompts that run at once.
        advance: called with the number of groups that are done, repetitions counted.
    """
    wishes = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    assert all(wish.is_greedy or wish.seed is not None for wish in wishes)
    longest = wishes[0].max_tokens or WARM_UP_TOKENS
    short = replace(wishes[0], max_tokens=min(WARM_UP_TOKENS, longest))
    for arm in (plain, speculative):
        arm.generate([prompts[0]], short)
    load = current_load(cores())
    pairs = [Pair(first) for first in range(0, len(prompts), group_size)]
    began, done = clock(), count(1)
    for repetition in count(1):
        for place, pair in enumerate(pairs):
            part = slice(pair.first_prompt, pair.first_prompt + group_size)
            arms = [(plain, Figures()), (speculative, Figures())]
            plain_first = (place + repetition) % 2 == 1
            _run_pair(pair, arms, list(prompts[part]), wishes[part], plain_first=plain_first)
            advance(next(done))
        comparison = ArmComparison(pairs, repetition, load)
        if _is_enough(comparison, repeat, clock() - began, patience):
            return comparison
    raise AssertionError  # counting does not end


def _is_enough(
    comparison: ArmComparison, repeat: int | None, seconds: float, patience: float
) -> bool:
    """Whether to stop; one more repetition would take as long as those before did."""
    done = comparison.repetitions
    if repeat is not None:
        return done >= repeat
    is_over = done >= MOST_REPETITIONS or seconds * (1 + 1 / done) > patience
    return is_over or comparison.claim.is_certain


def _run_pair(
    pair: Pair,
    arms: Sequence[tuple[LLM, Figures]],
    group: list[list[int]],
    params: Sequence[SamplingParams],
    plain_first: bool,
) -> None:
    answered = []
    for llm, figures in arms if plain_first else reversed(arms):
        answered.append(check_answered(figures.measure(llm, group, params)))
    expected, drafted = answered if plain_first else reversed(answered)
    (_, one_arm), (_, other_arm) = arms
    pair.plain.add_figures(one_arm)
    pair.speculative.add_figures(other_arm)
    pair.rounds.append(Round(one_arm.arm, other_arm.arm))
    pair.outputs = pair.outputs or drafted
    for index, (one, other) in enumerate(zip(expected, drafted, strict=True), pair.first_prompt):
        if one.token_ids != other.token_ids or one.finish_reason != other.finish_reason:
            pair.differing.add(index)


@contextmanager
def open_arms(
    model: str,
    speculative: tuple[SpeculativeConfig, ...],
    settings: Mapping[str, Any],
    *,
    is_timed: bool = True,
    json: bool = False,
    **plainly: Any,
) -> Iterator[tuple[LLM, LLM, Screen]]:
    """A plain and a speculative engine on the weights of one checkpoint, and a screen.

    Args:
        settings: of both engines; ``plainly`` has those of the plain one alone.
        is_timed: every prompt is as if it were new: prefixes are not cached, and no proposer
            remembers earlier answers.
        json: as of :class:`Screen`.

    Raises:
        PacelineError: the model or an option cannot be used, or no proposer could be built.
    """
    from paceline.api.llm import LLM
    from paceline.loading.checkpoint import load_checkpoint

    if not speculative:
        raise ConfigError("--compare needs speculation: leave out --no-speculation")
    if settings.get("pipeline_stages"):
        raise ConfigError(
            "a stage serves one engine, and a comparison has two: leave out --pipeline-stage; "
            "with --pipeline-parallel-size alone, each engine gets stages of its own here"
        )
    if is_timed:
        settings, speculative = (
            {**settings, "enable_prefix_caching": False},
            without_memory(speculative),
        )
    load_format = settings.get("load_format", DEFAULTS.load_format)
    source: Any = model
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
    arms = open_arms(options.model, speculative, engine_options(options), json=options.json)
    with arms as (plain, llm, screen):
        encoder = encoder_of(llm.checkpoint.tokenizer, options)
        ids, size = encoder.encode_all(prompts), options.max_num_seqs or 1
        groups = -(-len(ids) // size) * options.repetitions
        with screen.progress("comparing", groups) as advance:
            comparison = compare(
                plain, llm, ids, params, repeat=options.repeat, group_size=size, advance=advance
            )
        _show(comparison, llm, screen)
        if options.json:
            settings = {"seed": params.seed, "temperature": params.temperature}
            screen.document(comparison.document(llm, settings))
        return EXIT_DIFFERENT if comparison.differing and llm.promises_identity else 0


def _show(comparison: ArmComparison, llm: LLM, screen: Screen) -> None:
    screen.say(comparison_table(comparison))
    for name, figures in zip(("plain", "speculative"), comparison.arms(), strict=True):
        screen.say(f"{name}: {closing_line(figures)}")
    screen.say(verdict(comparison, llm.promises_identity))


def comparison_table(comparison: ArmComparison) -> str:
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
        "speed-up": f"{pair.claim.value:.2f}x",
        "acceptance length": f"{pair.speculative.mean_acceptance_length:.2f}",
        "identical": "NO" if pair.differing else "yes",
    }


def verdict(comparison: ArmComparison, promises_identity: bool) -> str:
    """One sentence: identical or not, faster or not, as far as the measurement shows."""
    speed_up, total = comparison.claim, sum(len(pair.outputs) for pair in comparison.pairs)
    speed = ("" if speed_up.untold is None else "and ") + speed_up.sentence(comparison.load)
    different = len(comparison.differing)
    if not different:
        return f"identical output, {speed}"
    excuse = "" if promises_identity else " (this path promises identity up to rounding)"
    return f"DIFFERENT output for {different} of {total} prompts{excuse}, {speed}"
