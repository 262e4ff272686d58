"""How a profile looks on a terminal: tables of figures, and the curve as bars."""

from __future__ import annotations

from dataclasses import replace
from typing import TextIO

from paceline.commands.display import printable, table
from paceline.policy.cost_table import CostTable
from paceline.policy.host_time import NO_DRAFTING_HOST_TIME, NO_HOST_TIME, HostTime
from paceline.workbench.profile import Profile
from paceline.workbench.profile_machine import Roofs, Work

BAR_WIDTHS = 64
"""Wider steps have no bar: prefill chunks would flatten those of verification."""
BAR_CELLS = 50
ROOFED = ("GB/s", "of read roof", "GFLOP/s", "of compute roof")


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
    costs, roofs, work = profile.table, profile.roofs, profile.work
    unit = "plain steps" if costs.is_relative else "ms"
    headers = ["width", unit, "spread", "cost ratio"]
    has_roofs = roofs is not None and work is not None
    rows = []
    for point in costs.base_points(context):
        ratio = costs.cost_ratio(point.width, context)
        row = [str(point.width), f"{point.ms:.3f}", f"{point.spread:.3f}", f"{ratio:.3f}"]
        if roofs is not None and work is not None:
            row += _achieved(point.width, context, point.ms, roofs, work)
        rows.append(row)
    text = table(headers + list(ROOFED if has_roofs else ()), rows)
    return f"one request, context {context}, all rows sampled\n{text}"


def _achieved(width: int, context: int, ms: float, roofs: Roofs, work: Work) -> list[str]:
    """The cells of :data:`ROOFED`."""
    read = work.bytes_read(width, context) / ms / 1e6
    computed = work.operations(width, context) / ms / 1e6
    return [
        f"{read:.1f}",
        f"{read / roofs.read_gb_per_s:.0%}",
        f"{computed:.1f}",
        f"{computed / roofs.gflop_per_s:.0%}",
    ]


def _samples(costs: CostTable) -> str:
    """The same width with all rows sampled, with one, and with none."""
    context = costs.contexts[0]
    single = {
        (p.width, p.samples): p.ms for p in costs.points if p.requests == 1 and p.context == context
    }
    widths = sorted({width for width, samples in single if samples == 0})
    rows = [
        [str(width), *(_cell(single.get((width, samples))) for samples in (width, 1, 0))]
        for width in widths
    ]
    text = table(["width", "all sampled", "one", "none"], rows)
    return f"sampled rows, context {context}, ms\n{text}" if rows else ""


def _requests(costs: CostTable) -> str:
    """Several requests beside one request with as many rows."""
    rows = []
    for point in costs.points:
        if point.requests > 1:
            count = point.requests * point.width
            alone = costs.milliseconds(count, point.context)
            step = f"{point.requests} x {point.width}"
            rows.append([step, str(point.context), _cell(point.ms), _cell(alone)])
    text = table(["requests x width", "context", "ms", "as one request"], rows)
    return f"several requests\n{text}" if rows else ""


def _cell(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"


def draw_bars(costs: CostTable, out: TextIO) -> None:
    """The cost ratio of every width as a bar, at the shortest context."""
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    context = costs.contexts[0]
    points = [point for point in costs.base_points(context) if point.width <= BAR_WIDTHS]
    plain = points[0].ms
    most = max(point.ms for point in points)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(width=BAR_CELLS)
    grid.add_column(justify="right")
    for point in points:
        bar = Bar(most, 0, point.ms, width=BAR_CELLS)
        grid.add_row(str(point.width), bar, f"{point.ms / plain:.2f}")
    console = Console(file=out, highlight=False)
    console.print(f"cost ratio to width 1, context {context}")
    console.print(grid)
