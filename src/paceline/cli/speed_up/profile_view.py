"""How a profile looks on a terminal: what was measured, and a table for each context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cli.terminal.display import printable, table
from paceline.planner.host_time import NO_DRAFTING_HOST_TIME, NO_HOST_TIME, HostTime

if TYPE_CHECKING:
    from paceline.planner.cost_points import CostPoint
    from paceline.profiling.profile import Profile


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
    return {
        "GB/s": f"{read:.1f}",
        "of read roof": f"{read / roofs.read_gb_per_s:.0%}",
        "GFLOP/s": f"{computed:.1f}",
        "of compute roof": f"{computed / roofs.gflop_per_s:.0%}",
    }
