"""What ``paceline tune`` needs before it can search: its options, answers, costs and drafts.

Answers and profiles are made by what makes them for the commands of these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.build.default_drafts import default_speculative_config, drafts_of
from paceline.cli.options import (
    DEFAULTS,
    JSON_HELP,
    EngineOptions,
    ModelOptions,
    option,
    token_limit,
)
from paceline.cli.settings import engine_options, is_ngram_model, method_of, self_draft, values_of
from paceline.cli.terminal import Screen, printable
from paceline.config import EngineConfig, SpeculativeConfig, parse_speculative_config
from paceline.config.speculative import HEAD_METHODS
from paceline.core.checks import check_output
from paceline.core.errors import ConfigError
from paceline_lab.simulate.command import check_concurrency, open_traces
from paceline_lab.trace.command import AnsweringOptions, TraceOptions, trace_command

if TYPE_CHECKING:
    from paceline.loading.checkpoint import Checkpoint
    from paceline.profiling.profile import Profile
    from paceline_lab.simulate.setup import Opened
    from paceline_lab.simulate.simulator import Simulator
    from paceline_lab.tune.tuning import Drafts


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TuneOptions(EngineOptions, AnsweringOptions, ModelOptions):
    """Options of ``paceline tune``."""

    prompts: str | None = option(None, "JSONL file of your usual prompts, as for paceline run.")
    traces: str | None = option(
        None, "Folder to keep the answers in. Without --prompts, the answers in it are used."
    )
    draft: list[str] | None = option(
        None,
        "Draft to try: a draft model, which may have another vocabulary or draft in parallel, "
        "or an n-gram file; can be given several times (default: the drafts that come with the "
        "model).",
    )
    draft_layers: int | None = option(
        None, "Also try this many of the model's own first layers as a draft.", min=1
    )
    draft_dtype: str | None = option(
        None, "Also try the model itself in this lower precision as a draft."
    )
    max_tokens: int = token_limit(128)
    cost: str | None = option(
        None,
        "Costs of a step: file of a profile, or name of an imported curve (default: the profile "
        "on this machine, measured if there is none).",
    )
    draft_cost: str | None = option(
        None, "The same for every draft model, or milliseconds per step."
    )
    max_num_seqs: int = option(1, "Number of requests at a time.", "--concurrency")
    planner: str = option("auto", "Planners to try: auto tries both, fixed only the fixed one.")
    budget: float = option(
        120.0,
        "Seconds to search for. Answering, profiling and drafting come before and are not counted.",
        min=0.001,
    )
    output: str | None = option(
        None, "Write the best settings to this file, for paceline run --config.", "-o"
    )
    plot: str | None = option(
        None, "Plot speed-up against node budget to a .png, .svg or .pdf file."
    )
    json: bool = option(False, JSON_HELP)

    @property
    def needs_model(self) -> bool:
        """Traces alone say whose they are."""
        return self.prompts is not None or self.traces is None


def with_traced_model(options: TuneOptions) -> TuneOptions:
    """With the model of the traces where only traces are named."""
    from paceline_lab.simulate.setup import meta_in
    from paceline_lab.trace.requests import traced_model

    if options.model or options.prompts is not None or options.traces is None:
        return options
    return replace(options, model=traced_model(meta_in(options.traces)))


def check_files(options: TuneOptions) -> None:
    """Before minutes are spent."""
    from paceline.profiling.plots import check_plot

    if options.prompts is None and options.traces is None:
        raise ConfigError("tune needs --prompts FILE, or --traces FOLDER with answers in it")
    if options.output is not None:
        check_output(options.output)
    if options.plot is not None:
        check_plot(options.plot)
    check_concurrency(options)


def traced(options: TuneOptions, spare: str) -> str:
    """The folder of the answers, which are made if there is a file of prompts."""
    if options.prompts is None:
        assert options.traces is not None
        return options.traces
    wish = TraceOptions(
        **values_of(options, EngineOptions)
        | values_of(options, AnsweringOptions)
        | {"max_num_seqs": None},
        model=options.model,
        prompts=options.prompts,
        output=options.traces or spare,
        top_logprobs=1,
    )
    trace_command(wish, is_kept=options.traces is not None)
    return wish.output


def simulator_for(
    options: TuneOptions, folder: str, drafts: Drafts, screen: Screen
) -> tuple[Simulator, list[str]]:
    """The simulator; what its costs would have to assume is measured, unless they were named."""
    opened = _opened(options, folder, drafts, screen)
    if options.cost is None and opened.assumed:
        everyone = dict.fromkeys([*drafts.values(), *usual_proposers(options.model)])
        models = [draft for draft in everyone if draft.needs_forwards]
        measured = _profile(options, [] if options.draft_cost else models, screen)
        opened = _opened(options, folder, drafts, screen, measured)
    simulator, notes = _held_out(opened)
    return simulator, [*opened.answers, *notes, *opened.assumed]


def _held_out(opened: Opened) -> tuple[Simulator, list[str]]:
    """Without answers that a draft has learnt, where enough others are left; remarks on both."""
    from paceline_lab.tune.tuning import LEAST_ANSWERS

    simulator, left = opened.simulator, opened.simulator.unlearnt()
    if not opened.learnt:
        return simulator, []
    if len(left.traces) < LEAST_ANSWERS:
        few = f"fewer than {LEAST_ANSWERS} prompts are left without these: rows with a * are not"
        return simulator, [*opened.learnt, f"{few} recommended"]
    num_held = len(simulator.traces) - len(left.traces)
    names = ", ".join(Path(file).name for file in simulator.learnt)
    return left, [
        f"{num_held} of {len(simulator.traces)} prompts are held out of the search, because "
        f"{names} was trained on answers to them"
    ]


def usual_proposers(model: str) -> tuple[SpeculativeConfig, ...]:
    """Who drafts where nothing is configured."""
    return tuple(default_speculative_config(model))


def _opened(
    options: TuneOptions,
    folder: str,
    drafts: Drafts,
    screen: Screen,
    measured: Sequence[Profile] = (),
) -> Opened:
    from paceline_lab.tune.tuning import wanted_configs

    wanted = wanted_configs(drafts, usual_proposers(options.model))
    return open_traces(options, options.model, folder, wanted, screen, measured)


def _profile(
    options: TuneOptions, drafts: Iterable[SpeculativeConfig], screen: Screen
) -> list[Profile]:
    """Measure what steps cost here, and keep what is certain enough."""
    from paceline.profiling.profile import measure_profiles
    from paceline.profiling.profile_store import keep_profiles

    kept: list[Profile] = []
    # For any number of requests: the profile serves more than this command.
    config = EngineConfig(**engine_options(options) | {"max_num_seqs": DEFAULTS.max_num_seqs})
    models: list[SpeculativeConfig | None] = [*drafts] or [None]
    for model in models:
        with screen.progress("measuring", 100) as advance:
            profiles, remarks = measure_profiles(
                options.model, config, model, None, lambda share: advance(int(share * 100))
            )
        kept += profiles
        for remark in [*remarks, *keep_profiles(profiles)[1]]:
            screen.note(printable(remark))
    return kept


def drafts_to_try(options: TuneOptions) -> Drafts:
    """Who drafts besides ``suffix``, by names for people.

    Raises:
        ConfigError, ModelLoadError: one cannot draft for the target.
    """
    from paceline.loading.checkpoint import load_checkpoint
    from paceline.proposers.draft_model.loading import num_draft_layers

    target = load_checkpoint(options.model)
    own = () if options.draft else drafts_of(options.model)
    by_name: dict[str, SpeculativeConfig] = {
        config.method: config for config in own if config.model is None and config.needs_forwards
    }
    named = options.draft or [config.model for config in own if config.model is not None]
    for path in dict.fromkeys(named):
        name, config = _draft(path, target)
        by_name[path if name in by_name else name] = config
    layers, dtype = options.draft_layers, options.draft_dtype
    if layers is not None or dtype is not None:
        config = self_draft(layers, dtype)
        num_draft_layers(config, target.config.num_layers)
        said = [f"{layers} layers"] if layers is not None else []
        by_name[", ".join(["self", *said, *([dtype] if dtype else [])])] = config
    return by_name


def _draft(path: str, target: Checkpoint) -> tuple[str, SpeculativeConfig]:
    """The name and the kind of a draft: a file of n-grams, or a model that is looked into."""
    from paceline.build.build import resolve_config, target_info
    from paceline.loading.checkpoint import load_checkpoint
    from paceline.proposers import check_fit
    from paceline.proposers.draft_model.loading import check_unread_vocabulary
    from paceline.proposers.ngram_model import read_tables

    if is_ngram_model(path):
        fingerprint = target.tokenizer.fingerprint if target.tokenizer else None
        read_tables(path).check_fits(path, target.config.vocab_size, fingerprint)
        return Path(path).name, _parsed(method="ngram_model", model=path)
    method = method_of(path)
    if method in HEAD_METHODS:
        config = _parsed(method=method, model=path)
        built, _ = resolve_config(EngineConfig(), target)
        check_fit(config, target_info(target, built, 0))
        return Path(path).name, config
    draft = load_checkpoint(path)
    if draft.tokenizer is None or target.tokenizer is None:
        has_tokenizer = target.tokenizer is not None
        check_unread_vocabulary(draft, target.config.vocab_size, has_tokenizer)
    elif draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
        _check_translation(draft, target)
        return draft.name, _parsed(method="draft_model", model=path, use_heterogeneous_vocab=True)
    is_parallel = draft.config.mask_token_id is not None
    return draft.name, _parsed(
        method="parallel_draft" if is_parallel else "draft_model", model=path
    )


def _parsed(**said: object) -> SpeculativeConfig:
    (config,) = parse_speculative_config(said)
    return config


def _check_translation(draft: Checkpoint, target: Checkpoint) -> None:
    """Raise :class:`ConfigError` where texts of one are none of the other, before answers are."""
    from paceline.proposers.draft_model.translation import Vocabulary, VocabularyPair

    assert draft.tokenizer is not None
    assert target.tokenizer is not None
    VocabularyPair(
        Vocabulary(target.tokenizer, target.config.vocab_size),
        Vocabulary(draft.tokenizer, draft.config.vocab_size),
        (),
    )
