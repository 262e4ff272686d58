"""``paceline demo``: the embedded models on a dozen prompts, shown, measured and compared.

The text that streams is for the eye. The figures come from silent runs in which the plain and the
speculative engine take turns, and the closing sentence is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from paceline.commands.compare import (
    EXIT_DIFFERENT,
    PAIR_HEADERS,
    Comparison,
    Pair,
    compare,
    pair_cells,
    verdict,
)
from paceline.commands.display import OriginSplitter, Screen, banner, table
from paceline.commands.options import DemoOptions
from paceline.commands.prompts import Prompt, read_prompts
from paceline.commands.resolve import default_speculative_config
from paceline.llm import LLM, embedded_model
from paceline.models.checkpoint import load_checkpoint
from paceline.sampling_params import SamplingParams

MAX_TOKENS = 96
QUICK_MAX_TOKENS = 48
REPEAT = 2
TAIL = 160
"""Characters of a prompt that are shown."""


def demo_command(options: DemoOptions) -> int:
    """Run the demonstration; 1 if an output differed, otherwise 0.

    Raises:
        PacelineError: the options or the embedded models cannot be used.
    """
    prompts = demo_prompts(options.quick)
    wanted = options.max_tokens
    if wanted is None:
        wanted = QUICK_MAX_TOKENS if options.quick else MAX_TOKENS
    params = SamplingParams(max_tokens=wanted, temperature=0.0)
    settings: dict[str, Any] = {"dtype": options.dtype, "num_threads": options.threads}
    source = load_checkpoint(embedded_model("target"))
    drafts = default_speculative_config(None)
    with (
        LLM(source, **settings) as plain,
        LLM(source, speculative_config=drafts, strict=True, **settings) as speculative,
    ):
        screen = Screen(speculative.proposers)
        screen.note(banner(speculative))
        screen.legend()
        ids = [speculative.tokenizer.encode(str(prompt.content)) for prompt in prompts]
        _stream(speculative, prompts, ids, params, screen)
        repeat = 1 if options.quick else REPEAT
        with screen.progress("measuring", repeat * len(ids)) as advance:
            comparison = compare(plain, speculative, ids, params, repeat=repeat, advance=advance)
        screen.say("")
        screen.say(demo_table(prompts, comparison))
        screen.say("")
        screen.say(verdict(comparison, speculative.promises_identity))
    return EXIT_DIFFERENT if comparison.differing else 0


def demo_prompts(quick: bool) -> list[Prompt]:
    """The embedded prompts; with ``quick`` the first one of each kind."""
    prompts = read_prompts(str(files("paceline") / "embedded" / "prompts.jsonl"))
    first = {prompt.kind: prompt for prompt in reversed(prompts)}
    return list(reversed(first.values())) if quick else prompts


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
        screen.say(("..." if len(text) > TAIL else "") + text[-TAIL:].rstrip("\n"), dim=True)
        splitter = OriginSplitter(llm.tokenizer, token_ids)
        for output in llm.stream(token_ids, params):
            screen.write(splitter.split(output.token_ids, output.origins, output.text))
        screen.end_line()


def demo_table(prompts: Sequence[Prompt], comparison: Comparison) -> str:
    """A row per kind of prompt, and one for all."""
    kinds: dict[str, Pair] = {}
    total = Pair(0)
    for prompt, pair in zip(prompts, comparison.pairs, strict=True):
        for sum_ in (kinds.setdefault(prompt.kind, Pair(0)), total):
            sum_.plain.add_figures(pair.plain)
            sum_.speculative.add_figures(pair.speculative)
            sum_.differing |= pair.differing
    rows = [[kind, *pair_cells(pair)] for kind, pair in [*kinds.items(), ("all", total)]]
    return table(["prompt kind", *PAIR_HEADERS], rows)
