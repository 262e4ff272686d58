"""How a fidelity report looks: its table, and what is said of llama.cpp. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.commands.display import table
from paceline.commands.quality_arms import CONTROL, PEER
from paceline.workbench.quality import REFERENCE, Quality
from paceline.workbench.quality_pairs import Excess, excess

HEADERS = ("arithmetic", "tokens", "perplexity", "ratio", "mean KL", "99 % KL", "top-1 agreement")


def quality_table(rows: Mapping[str, Quality]) -> str:
    return table(HEADERS, [_cells(name, row) for name, row in rows.items()])


def _cells(name: str, row: Quality) -> Sequence[str]:
    return [
        name,
        str(row.num_tokens),
        f"{row.perplexity:.4f}",
        f"{row.ratio:.5f}",
        f"{row.mean_kl:.3e}",
        f"{row.kl_99:.3e}",
        f"{row.top1_agreement:.2%}",
    ]


def pairs(rows: Mapping[str, Quality]) -> Iterator[tuple[str, str, Excess]]:
    """Each arithmetic of Paceline's against each of llama.cpp's that rounds, and by how much it
    diverges more."""
    others = [name for name in rows if name.startswith(PEER) and name != CONTROL]
    for name, row in rows.items():
        if name != REFERENCE and not name.startswith(PEER):
            yield from ((name, other, excess(row, rows[other])) for other in others)


def pair_line(own: str, other: str, found: Excess) -> str:
    line = (
        f"{own} against {other}: mean KL {found.difference:+.3e}, with 95 % confidence at most "
        f"{found.upper:+.3e}"
    )
    if found.relative is None or found.relative_upper is None:
        return line
    return f"{line}; that is {found.relative:+.1%}, at most {found.relative_upper:+.1%}"


def peer_line(name: str, facts: Mapping[str, Any]) -> str:
    return (
        f"{name}: {facts['version']}, {facts['library']}; flash attention "
        f"{facts['flash_attention']}, keys and values {facts['kv_type']}; {facts['system_info']}"
    )
