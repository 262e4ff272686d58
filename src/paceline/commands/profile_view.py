"""How a profile looks on a terminal: tables of figures."""

from __future__ import annotations

from dataclasses import replace

from paceline.commands.display import printable, table
from paceline.policy.cost_table import CostTable
from paceline.policy.host_time import NO_DRAFTING_HOST_TIME, NO_HOST_TIME, HostTime
from paceline.workbench.profile import Profile


def describe(profile: Profile) -> str:
    """What was measured, in a few lines."""
    lines = [printable(profile.table.name)]
    if profile.key is not None:
        key = profile.key
        lines.append(f"{key.dtype} on {key.device}, KV {key.kv_dtype}, ops backend {key.backend}")
        lines.append(f"{key.machine}; threads: {key.threads}; {key.version}")
    if profile.roofs is not None:
        roofs = profile.roofs
        lines.append(f"roofs: {roofs.read_gb_per_s:.1f} GB/s read, {roofs.gflop_per_s:.0f} GFLOP/s")
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


def tables(profile: Profile) -> list[str]:
    """One table of widths per context, then what other samples and several requests cost."""
    found = [_widths(profile, context) for context in profile.table.contexts]
    return found + [text for text in (_samples(profile.table), _requests(profile.table)) if text]


def _widths(profile: Profile, context: int) -> str:
    costs = profile.table
    unit = "plain steps" if costs.is_relative else "ms"
    rows = [
        {
            "width": str(point.width),
            unit: f"{point.ms:.3f}",
            "spread": f"{point.spread:.3f}",
            "cost ratio": f"{costs.cost_ratio(point.width, context):.3f}",
            **_achieved(point.width, context, point.ms, profile),
        }
        for point in costs.base_points(context)
    ]
    return f"one request, context {context}, all rows sampled\n{table(rows)}"


def _achieved(width: int, context: int, ms: float, profile: Profile) -> dict[str, str]:
    """How much of the machine a step uses, where that was measured."""
    roofs, work = profile.roofs, profile.work
    if roofs is None or work is None:
        return {}
    read = work.bytes_read(width, context) / ms / 1e6
    computed = work.operations(width, context) / ms / 1e6
    return {
        "GB/s": f"{read:.1f}",
        "of read roof": f"{read / roofs.read_gb_per_s:.0%}",
        "GFLOP/s": f"{computed:.1f}",
        "of compute roof": f"{computed / roofs.gflop_per_s:.0%}",
    }


def _samples(costs: CostTable) -> str:
    """The same width with all rows sampled, with one, and with none."""
    context = costs.contexts[0]
    single = {
        (p.width, p.samples): p.ms for p in costs.points if p.requests == 1 and p.context == context
    }
    widths = sorted({width for width, samples in single if samples == 0})
    rows = [
        {
            "width": str(width),
            "all sampled": _cell(single.get((width, width))),
            "one": _cell(single.get((width, 1))),
            "none": _cell(single.get((width, 0))),
        }
        for width in widths
    ]
    return f"sampled rows, context {context}, ms\n{table(rows)}" if rows else ""


def _requests(costs: CostTable) -> str:
    """Several requests beside one request with as many rows."""
    rows = [
        {
            "requests x width": f"{point.requests} x {point.width}",
            "context": str(point.context),
            "ms": _cell(point.ms),
            "as one request": _cell(
                costs.milliseconds(point.requests * point.width, point.context)
            ),
        }
        for point in costs.points
        if point.requests > 1
    ]
    return f"several requests\n{table(rows)}" if rows else ""


def _cell(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"
