"""What ``paceline tune`` needs before it can search: answers, costs and drafts.

Answers and profiles are made by what makes them for the commands of these names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from paceline.checks import check_output
from paceline.commands.display import Screen, printable
from paceline.commands.options import EngineOptions
from paceline.commands.resolve import (
    DEFAULT_MAX_NUM_SEQS,
    engine_options,
)
from paceline.commands.simulate import check_concurrency
from paceline.commands.simulate_costs import costs_of
from paceline.commands.trace import trace_command
from paceline.commands.trace_options import TraceOptions
from paceline.commands.tune_drafts import target_model
from paceline.commands.tune_options import TuneOptions
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.errors import ConfigError
from paceline.workbench.profile import measure_profiles
from paceline.workbench.profile_plot import check_plot
from paceline.workbench.profile_store import store_profile
from paceline.workbench.simulate import Simulator
from paceline.workbench.simulate_setup import Opened, open_simulator
from paceline.workbench.tune import Drafts, wanted_configs


def check_files(options: TuneOptions) -> None:
    """Before minutes are spent."""
    if options.prompts is None and options.traces is None:
        raise ConfigError("tune needs --prompts FILE, or --traces FOLDER with answers in it")
    for path in filter(None, (options.output, options.plot)):
        check_output(path)
    if options.plot is not None:
        check_plot(options.plot)
    check_concurrency(options)


def traced(options: TuneOptions, spare: str) -> str:
    """The folder of the answers, which are made if there is a file of prompts."""
    if options.prompts is None:
        assert options.traces is not None
        return options.traces
    engine = {field.name: getattr(options, field.name) for field in fields(EngineOptions)}
    wish = TraceOptions(
        **engine | {"max_num_seqs": None},
        model=target_model(options),
        prompts=options.prompts,
        output=options.traces or spare,
        top_logprobs=1,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        chat=options.chat,
        no_thinking=options.no_thinking,
    )
    trace_command(wish)
    return wish.output


def simulator_for(
    options: TuneOptions, folder: str, drafts: Drafts, screen: Screen
) -> tuple[Simulator, list[str]]:
    """The simulator; what its costs would have to assume is measured, unless they were named."""
    opened = _opened(options, folder, drafts, screen)
    if options.cost is None and opened.assumed:
        models = [draft for draft in drafts.values() if draft.needs_forwards]
        measured = [] if options.draft_cost else models
        for remark in _profile(options, measured, screen):
            screen.note(printable(remark))
        opened = _opened(options, folder, drafts, screen)
    return opened.simulator, [*opened.answers, *opened.assumed]


def _opened(options: TuneOptions, folder: str, drafts: Drafts, screen: Screen) -> Opened:
    table, draft_table = costs_of(options.cost, options.draft_cost)
    with screen.progress("drafting", 100) as advance:
        return open_simulator(
            folder,
            target_model(options),
            EngineConfig(**engine_options(options)),
            wanted_configs(drafts),
            table=table,
            draft_table=draft_table,
            advance=lambda share: advance(int(share * 100)),
        )


def _profile(
    options: TuneOptions, drafts: Iterable[SpeculativeConfig], screen: Screen
) -> list[str]:
    """Measure and keep what steps cost here; returns remarks."""
    remarks: list[str] = []
    # For any number of requests: the profile serves more than this command.
    config = EngineConfig(**engine_options(options) | {"max_num_seqs": DEFAULT_MAX_NUM_SEQS})
    models: list[SpeculativeConfig | None] = [*drafts] or [None]
    for model in models:
        with screen.progress("measuring", 100) as advance:
            profiles, found = measure_profiles(
                target_model(options), config, model, None, lambda share: advance(int(share * 100))
            )
        remarks += found
        for profile in profiles:
            store_profile(profile)
    return remarks
