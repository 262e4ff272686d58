"""``paceline profile``: what a step costs on this machine, measured or imported, shown and kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.build.default_drafts import default_speculative_config, drafts_of
from paceline.cli.options import JSON_HELP, EngineOptions, ModelOptions, option
from paceline.cli.settings import engine_options, method_of, self_draft
from paceline.cli.terminal import Screen, printable, table
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.checks import check_number, check_output
from paceline.core.errors import ConfigError, ProfileError
from paceline.core.files import write_json
from paceline.models.heads import MTP
from paceline.planner.cost_table import (
    NO_DRAFTING_HOST_TIME,
    NO_HOST_TIME,
    CostPoint,
    HostTime,
)

if TYPE_CHECKING:
    from paceline.profiling.profile import Profile


MAX_WIDTH = 4096
MAX_CONTEXT = 1 << 20
MAX_NUMBERS = 1000
LEAST_SECONDS, MOST_SECONDS = 0.001, 86_400.0
"""Of measuring."""
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProfileOptions(EngineOptions, ModelOptions):
    """Options of ``paceline profile``."""

    draft: str | None = option(
        None,
        "Draft model or head to measure too (default: the model's MTP layer, or the draft of "
        "the embedded model).",
    )
    draft_layers: int | None = option(
        None, "Measure this many of the model's own first layers as a draft.", min=1
    )
    draft_dtype: str | None = option(
        None, "Measure the model itself in this lower precision as a draft."
    )
    widths: str | None = option(
        None,
        "Widths to measure, in tokens per step, e.g. 1-16,32 (default: 1-33, and coarser up to "
        "512).",
    )
    contexts: str | None = option(None, "Context lengths to measure at (default: 64,512,2048).")
    budget: float = option(30.0, "Seconds to measure for; it always runs a few rounds.", min=0.001)
    import_file: str | None = option(
        None,
        "Import instead of measuring: the output of llama-batched-bench --output-format jsonl, "
        "or a JSON file of cost curves.",
        "--import",
    )
    output: str | None = option(None, "Also write the JSON document to this file.", "-o")
    plot: str | None = option(None, "Plot the curves to a .png, .svg or .pdf file.")
    json: bool = option(False, JSON_HELP)

    @property
    def needs_model(self) -> bool:
        return self.import_file is None


def profile_command(options: ProfileOptions) -> int:
    """The work of ``paceline profile``."""
    from paceline.profiling.plots import check_plot, plot_tables
    from paceline.profiling.profile import draft_sentences
    from paceline.profiling.profile_store import keep_profiles, to_document

    screen = Screen(json=options.json)
    if options.output is not None:  # before minutes are spent
        check_output(options.output)
    if options.plot is not None:
        check_plot(options.plot)
    imported = options.import_file is not None
    profiles, notes = _imported(options) if imported else _measured(options, screen)
    for note in notes:
        screen.note(printable(note))
    for text in profile_texts(profiles):
        screen.say(text + "\n")
    kept, remarks = keep_profiles(profiles)
    stored = [str(path) for path in kept]
    for remark in [*(f"kept in {path}" for path in stored), *remarks]:
        screen.note(printable(remark))
    sentences = draft_sentences(profiles[0].table)
    for sentence in sentences:
        screen.say(sentence)
    document = {
        "profiles": [to_document(profile) for profile in profiles],
        "notes": [*notes, *remarks],
        "files": stored,
        "sentences": sentences,
    }
    if options.plot is not None:
        plot_tables([profile.table for profile in profiles], options.plot)
    if options.output is not None:
        write_json(options.output, document, ProfileError, make_folder=True)
    if options.json:
        screen.document(document)
    return 0


def _imported(options: ProfileOptions) -> tuple[list[Profile], list[str]]:
    from paceline.profiling.profile import Profile
    from paceline.profiling.profile_store import import_tables

    if options.model or options.draft is not None:
        raise ConfigError("--import measures nothing: leave out MODEL and --draft")
    assert options.import_file is not None
    return [Profile(table) for table in import_tables(options.import_file)], []


def _measured(options: ProfileOptions, screen: Screen) -> tuple[list[Profile], list[str]]:
    from paceline.profiling.profile import ProfileSettings, measure_profiles
    from paceline.profiling.profile_steps import CONTEXTS, WIDTHS

    check_number("--budget", options.budget, LEAST_SECONDS, MOST_SECONDS, float)
    settings = ProfileSettings(
        widths=numbers("--widths", options.widths, 1, MAX_WIDTH) or WIDTHS,
        contexts=numbers("--contexts", options.contexts, 1, MAX_CONTEXT) or CONTEXTS,
        budget_seconds=options.budget,
        proposers=default_speculative_config(options.model),
    )
    config = EngineConfig(**engine_options(options))
    with screen.progress("measuring", 100) as advance:
        return measure_profiles(
            options.model,
            config,
            draft_config(options),
            settings,
            lambda share: advance(int(share * 100)),
        )


def draft_config(options: ProfileOptions) -> SpeculativeConfig | None:
    """The draft model or head as a proposer runs it: what was named, or the command line's own."""
    layers, dtype = options.draft_layers, options.draft_dtype
    if layers is not None or dtype is not None:
        if options.draft is not None:
            raise ConfigError(
                "--draft-layers and --draft-dtype are of the model itself: leave out --draft"
            )
        return self_draft(layers, dtype)
    if options.draft is not None:
        return SpeculativeConfig(method=method_of(options.draft), model=options.draft)
    drafts = drafts_of(options.model)
    return next((config for config in drafts if config.method in ("draft_model", MTP)), None)


def numbers(option: str, text: str | None, least: int, most: int) -> list[int]:
    """Whole numbers out of ``1-4,8``, ascending; none where nothing was said."""
    chosen: set[int] = set()
    for part in text.split(",") if text else ():
        match = _NUMBERS.fullmatch(part.strip())
        low = int(match[1]) if match else 0
        high = int(match[2] or match[1]) if match else 0
        if not match or not least <= low <= high <= most:
            raise ConfigError(
                f"{option} has {part.strip()!r}; write numbers from {least} to {most} and ranges "
                "of them with commas between, such as 1-16,32"
            )
        chosen.update(range(low, high + 1) if high - low < MAX_NUMBERS else ())
        if high - low >= MAX_NUMBERS or len(chosen) > MAX_NUMBERS:
            raise ConfigError(f"{option} has more than {MAX_NUMBERS} numbers")
    return sorted(chosen)


def profile_texts(profiles: Sequence[Profile]) -> Iterator[str]:
    """What was measured of each model, and its steps by width."""
    for profile in profiles:
        yield describe(profile)
        for context in profile.table.contexts:
            yield _widths(profile, context)


def describe(profile: Profile) -> str:
    """What was measured, in a few lines."""
    lines = [printable(profile.table.name)]
    if profile.key is not None:
        key = profile.key
        lines.append(f"{key.dtype} on {key.device}, KV {key.kv_dtype}, ops backend {key.backend}")
        if key.from_disk:
            lines.append(f"{key.from_disk} come from disk")
        lines.append(f"{key.machine}; threads: {key.threads}; {key.version}")
    if profile.roofs is not None:
        roofs = profile.roofs
        lines.append(f"roofs: {roofs.read_gb_per_s:.1f} GB/s read, {roofs.gflop_per_s:.0f} GFLOP/s")
    if profile.work is not None and profile.work.may_be_cached:
        megabytes = profile.work.weight_bytes / 1e6
        lines.append(f"{megabytes:.1f} MB of weights may stay in caches, beyond the read roof")
    if profile.table.experts is not None:
        of = profile.table.experts
        lines.append(
            f"experts: {of.per_token} of {of.number} per row in each of {of.layers} layers, "
            f"{of.ms:.4f} ms to read one"
        )
    return "\n".join([*lines, *_host(profile.table.host)])


def _host(host: HostTime) -> list[str]:
    """What the host takes for a target, and for a draft; of what was measured."""
    lines, drafting = [], host.drafting
    if replace(host, drafting=NO_DRAFTING_HOST_TIME) != NO_HOST_TIME:
        lines.append(
            f"host, ms per step: {host.step:.3f}, {host.request:.3f} per further request; with a "
            f"draft {host.draft:.3f} more, {host.further_draft:.3f} per further one, "
            f"{host.node:.4f} per node; planning {host.ask:.3f}, merging {host.merge:.4f}"
        )
        calls = ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(host.calls.items()))
        lines.append(f"host, ms per call: {printable(calls)}")
    if drafting != NO_DRAFTING_HOST_TIME:
        lines.append(
            f"host, ms per call as a draft: {drafting.call:.3f}, {drafting.level:.3f} per further "
            f"level; {drafting.request:.3f} per further request, {drafting.node:.3f} per further "
            "node of a level"
        )
    return lines


def _widths(profile: Profile, context: int) -> str:
    costs = profile.table
    unit = "plain steps" if costs.is_relative else "ms"
    rows = [
        {
            "width": str(point.width),
            unit: f"{point.ms:.3f}",
            "spread": f"{point.spread:.3f}",
            "cost ratio": f"{costs.cost_ratio(point.width, context):.3f}",
            **({"experts": str(point.experts)} if costs.experts else {}),
            **_achieved(point, context, profile),
        }
        for point in costs.base_points(context)
    ]
    return f"one request, context {context}, all rows sampled\n{table(rows)}"


def _achieved(point: CostPoint, context: int, profile: Profile) -> dict[str, str]:
    """How much of the machine a step uses, where that was measured."""
    roofs, work = profile.roofs, profile.work
    if roofs is None or work is None:
        return {}
    read = work.bytes_read(point.width, context, point.experts) / point.ms / 1e6
    computed = work.operations(point.width, context) / point.ms / 1e6
    # A step can beat the best run that a busy machine gave a roof.
    of_read, of_compute = min(1.0, read / roofs.read_gb_per_s), computed / roofs.gflop_per_s
    return {
        "GB/s": f"{read:.1f}",
        "of read roof": "cached" if work.may_be_cached else f"{of_read:.0%}",
        "GFLOP/s": f"{computed:.1f}",
        "of compute roof": f"{min(1.0, of_compute):.0%}",
    }
