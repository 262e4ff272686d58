"""``paceline doctor``: what this machine has, and what would make it faster. Owns the view."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.cli.options import EngineOptions, ModelOptions, option
from paceline.cli.settings import engine_options
from paceline.cli.terminal import Screen, printable
from paceline.config import EngineConfig
from paceline.core.installation import install_command
from paceline.loading.catalogue import EMBEDDED

if TYPE_CHECKING:
    from paceline.profiling.doctor import Diagnosis, DraftFacts, ModelFacts
    from paceline.profiling.machine import Machine


WIDTH = 100
INDENT = 16
TOKENS_PER_STEP = (3, 5, 8)
"""With drafts, for which a model's speed from disk is shown."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DoctorOptions(EngineOptions, ModelOptions):
    """Options of ``paceline doctor``."""

    json: bool = option(False, "Print one line of JSON instead.")

    @property
    def needs_model(self) -> bool:
        return False


def doctor_command(options: DoctorOptions) -> int:
    """The work of ``paceline doctor``."""
    from paceline.profiling.doctor import diagnose

    config = EngineConfig(**engine_options(options))
    diagnosis = diagnose(options.model or EMBEDDED, config)
    screen = Screen(json=options.json)
    if options.json:
        screen.document(asdict(diagnosis))
        return 0
    for name, text in facts(diagnosis):
        screen.say(_wrapped(name.ljust(INDENT), text))
    screen.say(
        "\nFaster, the greatest gain first:" if diagnosis.advice else "\nNothing to improve."
    )
    for number, text in enumerate(diagnosis.advice, start=1):
        screen.say(_wrapped(f"{number:2}. ", text))
    return 0


def facts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Names and texts of all that was found, in order."""
    machine, kernels, model = diagnosis.machine, diagnosis.kernels, diagnosis.model
    yield "processor", machine.processor
    if machine.instructions:
        yield "instructions", ", ".join(machine.instructions)
    yield "cores", _cores(machine)
    yield "memory", _memory(machine)
    roofs = diagnosis.roofs
    yield "measured", f"{roofs.read_gb_per_s:.1f} GB/s read, {roofs.gflop_per_s:.0f} GFLOP/s"
    if kernels.problem is None:
        yield "kernels", f"native, {kernels.level} (of {', '.join(kernels.levels)})"
    else:
        yield "kernels", f"reference: {kernels.problem}"
    yield "model", _model(model)
    if model.problem is None:
        if model.packs_into:
            yield "packed", f"by the first run, into {model.packs_into}, about as follows"
        if model.disk_gb_per_s is not None:
            yield from streaming_rows(model, model.disk_gb_per_s)
        for draft in model.drafts:
            yield "draft", draft_text(draft)
        yield "profile", "measured" if model.has_profile else "none"
    for part in diagnosis.parts:
        versions = ", ".join(f"{name} {version}" for name, version in part.versions.items())
        missing = f"not installed: {install_command(part.extra)}"
        yield part.extra, f"{versions or missing} ({part.gives})"
    for place in diagnosis.places:
        yield "on disk", f"{place.num_bytes / 1e6:.1f} MB in {place.folder}: {place.holds}"


def _model(model: ModelFacts) -> str:
    if model.problem is not None:
        return f"{model.name} cannot be used: {model.problem}"
    promise = "bit for bit" if model.promises_identity else "up to rounding"
    text = (
        f"{model.name}: {model.dtype} on {model.backend}; answers with and without speculation are "
        f"the same {promise}; {model.weight_bytes / 1e6:.0f} MB of weights"
    )
    if model.best_plain_rate is None:
        return text
    return f"{text}, so plain decoding makes at most {model.best_plain_rate:.1f} tok/s"


def draft_text(draft: DraftFacts) -> str:
    """What a draft is, where it lies, and why it is not used, if it is not."""
    text = " in ".join(filter(None, (draft.method, draft.place)))
    return f"{text}: not used, {draft.problem}" if draft.problem else f"{text}: used"


def streaming_rows(model: ModelFacts, rate: float) -> Iterator[tuple[str, str]]:
    """What stays, what is read, and how fast that can be at most."""
    read, plain = model.streamed_bytes / 1e9, rate * 1e9 / max(1, model.streamed_bytes)
    faster = ", ".join(f"{n * plain:.1f} with {n}" for n in TOKENS_PER_STEP)
    if model.experts:
        parts, kept, number = "experts", model.kept_experts, model.experts
        row = "in a step of one row, if it chooses among all alike"
        faster = f"up to {faster}: each row of a step chooses experts of its own"
    else:
        parts, kept, number = "layers", model.layers - model.streamed_layers, model.layers
        row = f"in every step, {model.streamed_layers} layers"
    resident = model.resident_bytes / 1e9
    yield "in memory", f"{resident:.2f} GB: {kept} of {number} {parts}, and all but {parts}"
    yield "from disk", f"{read:.2f} GB at {rate:.2f} GB/s {row}"
    yield "plain", f"{plain:.1f} tok/s at most"
    yield "drafts", f"at most, by the tokens that a step makes: {faster}"


def _cores(machine: Machine) -> str:
    parts = [f"{machine.cores} usable"]
    if machine.physical_cores is not None and machine.physical_cores != machine.cores:
        parts.append(f"{machine.physical_cores} of them physical")
    if machine.cpu_quota is not None:
        parts.append(f"limited to {machine.cpu_quota:g} by the container")
    parts.append(f"{machine.threads} threads")
    if machine.load is not None:
        parts.append(f"load {machine.load:.1f}")
    if machine.governor is not None:
        parts.append(f"governor {machine.governor}")
    return ", ".join(parts)


def _memory(machine: Machine) -> str:
    if machine.memory_total is None or machine.memory_available is None:
        return "unknown"
    pages = f", huge pages: {machine.huge_pages}" if machine.huge_pages else ""
    total, available = machine.memory_total / 1e9, machine.memory_available / 1e9
    return f"{total:.1f} GB, {available:.1f} GB available{pages}"


def _wrapped(begin: str, text: str) -> str:
    return textwrap.fill(
        printable(text),
        WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )
