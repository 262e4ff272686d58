"""What the comparison aims at, judged on its rows. Measures nothing.

Engines are compared at equal bits per weight. A target over something that was not measured has no
value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers_report import Rows, find, forward, ratio
from report import Target

INT8, INT4 = "paceline int8", "paceline int4"
Q8, Q4, OPENVINO = "llama.cpp Q8_0", "llama.cpp Q4_0", "openvino int8"
PEERS = {8: (Q8, OPENVINO), 4: (Q4,)}
WIDTH_TARGETS = {64: {8: 1.25, 16: 1.7, 32: 3.2}, 512: {8: 1.4, 16: 2.0, 32: 3.6}}
_LEAST = "at least"


def plain(rows: Rows, engine: str, key: str = "tokens_per_second") -> float | None:
    return find(rows, engine=engine, measure="generate", mode="plain").get(key)


def best(rows: Rows, engines: Sequence[str], *methods: str) -> float | None:
    """The highest rate of the modes whose names begin so; of all speculation if none is named."""
    rates = [
        row["tokens_per_second"]
        for row in rows
        if row["engine"] in engines
        and row.get("tokens_per_second")
        and row.get("mode", "plain") != "plain"
        and (not methods or row["mode"].split()[0] in methods)
    ]
    return max(rates, default=None)


def targets(
    rows: Rows, engines: Mapping[str, Mapping[str, Any]], roof: Mapping[str, Any]
) -> list[Target]:
    found = [
        Target(
            f"plain decoding, {own} over {peer}",
            ratio(
                plain(rows, own, "decode_tokens_per_second"),
                plain(rows, peer, "decode_tokens_per_second"),
            ),
            wanted,
            _LEAST,
        )
        for own, peer, wanted in ((INT8, Q8, 1.15), (INT4, Q4, 1.0))
    ]
    found += [_roof_share(rows, name, engines.get(name, {}), roof) for name in (INT8, INT4)]
    for context, wanted_by_width in WIDTH_TARGETS.items():
        for width, wanted in wanted_by_width.items():
            cost = ratio(forward(rows, INT8, width, context), forward(rows, INT8, 1, context))
            found.append(Target(f"{INT8}, T({width})/T(1), context {context}", cost, wanted))
    for own, peer, wanted in ((INT8, Q8, 3.5), (INT8, OPENVINO, 2.3), (INT4, Q4, 3.5)):
        gain = ratio(forward(rows, peer, 8), forward(rows, own, 8))
        found.append(Target(f"verifying 8 tokens, {own} over {peer}", gain, wanted, _LEAST))
    prefill = [find(rows, engine=name, measure="prefill").get("ms") for name in (Q8, INT8)]
    found.append(Target(f"prefill of 512, {INT8} over {Q8}", ratio(*prefill), 2.5, _LEAST))
    return found + _speculation(rows) + _serving(rows)


def _roof_share(rows: Rows, name: str, facts: Mapping[str, Any], roof: Mapping[str, Any]) -> Target:
    """Bytes that a forward over one token must read, in its time, against the measured roof."""
    time = forward(rows, name, 1)
    share = None
    if time and facts:
        read = facts["weight_bytes"] + 64 * facts["kv_bytes_per_token"]
        share = read / (time / 1000) / roof["bytes_per_second"]
    return Target(f"{name}, share of the read bandwidth at width 1", share, 0.85, _LEAST)


def _speculation(rows: Rows) -> list[Target]:
    """Our best way of using the same draft model against the best of theirs."""
    four = INT4 if plain(rows, INT4) else INT8
    own = {name: best(rows, [name], "draft", "tree") for name in (INT8, four)}
    return [
        Target(
            f"draft model, {INT8} over the best 8-bit peer's",
            ratio(own[INT8], best(rows, PEERS[8], "draft")),
            2.0,
            _LEAST,
        ),
        Target(
            f"draft model, {four} over {Q4} plain",
            ratio(own[four], plain(rows, Q4)),
            2.0,
            _LEAST,
        ),
        Target(
            f"speculation over plain, {INT8}",
            ratio(best(rows, [INT8]), plain(rows, INT8)),
            2.0,
            _LEAST,
        ),
    ]


def _serving(rows: Rows) -> list[Target]:
    rates = [
        find(rows, engine=name, measure="parallel", sequences=16).get("tokens_per_second")
        for name in (INT8, Q8)
    ]
    memory = find(rows, engine=INT8, measure="memory")
    used = ratio(memory.get("loaded_bytes"), memory.get("needed_bytes"))
    return [
        Target(f"16 sequences, {INT8} over {Q8}", ratio(*rates), 3.5, _LEAST),
        Target(f"{INT8}, peak memory over weights and KV", used, 1.1),
    ]
