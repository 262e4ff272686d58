"""What the comparison aims at, judged on its rows. Measures nothing.

Paceline and llama.cpp are compared on the same file. A target over something that was not measured
has no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers_client import LLAMA, OPENVINO, OURS
from peers_report import Rows, find, forward, ratio
from report import Target

WIDTHS_OF_8_BITS = {8: 1.3, 16: 2.0, 32: 3.8}
WIDTHS_OF_FEWER = {8: 1.5, 16: 2.7, 32: 5.2}
"""At a short context, where one 512-bit product takes two cycles; the time of fewer bits has less
reading and more unpacking in it."""
PLAIN_TARGETS = {"Q8_0": 1.15, "Q6_K": 1.0, "Q4_K_M": 1.3, "Q4_0": 1.25}
LONG = 4096
"""Tokens of context from which on plain steps are a target of their own."""
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
    """Those of every type of file that an engine of ours has rows of."""
    named = {row["engine"] for row in rows}
    found: list[Target] = []
    for kind, wanted in PLAIN_TARGETS.items():
        own, peer = f"{OURS} {kind}", f"{LLAMA} {kind}"
        if own in named:
            found.append(_plain(rows, own, peer, wanted))
            found.append(_roof_share(rows, own, engines.get(own, {}), roof))
            found += [*_widths(rows, own), *_long_contexts(rows, own, peer)]
            found += [*_reading(rows, own, peer), *_speculation(rows, own, peer)]
            found += _serving(rows, own, peer)
    return found


def _plain(rows: Rows, own: str, peer: str, wanted: float) -> Target:
    rates = [plain(rows, name, "decode_tokens_per_second") for name in (own, peer)]
    return Target(f"plain decoding, {own} over {peer}", ratio(*rates), wanted, _LEAST)


def _widths(rows: Rows, own: str) -> list[Target]:
    short = min((row["context"] for row in rows if "context" in row), default=0)
    wanted = WIDTHS_OF_8_BITS if own.endswith("Q8_0") else WIDTHS_OF_FEWER
    return [
        Target(
            f"{own}, T({width})/T(1), context {short}",
            ratio(forward(rows, own, width, short), forward(rows, own, 1, short)),
            most,
        )
        for width, most in wanted.items()
    ]


def _long_contexts(rows: Rows, own: str, peer: str) -> list[Target]:
    contexts = {row["context"] for row in rows if row.get("context", 0) >= LONG}
    return [
        Target(
            f"plain step after {context} tokens, {own} over {peer}",
            ratio(forward(rows, peer, 1, context), forward(rows, own, 1, context)),
            1.1,
            _LEAST,
        )
        for context in sorted(contexts)
    ]


def _reading(rows: Rows, own: str, peer: str) -> list[Target]:
    """Several tokens of one text at once: what a draft's verification costs, and a prompt."""
    others = [(peer, 3.0), *([(OPENVINO, 2.3)] if own.endswith("Q8_0") else [])]
    found = [
        Target(
            f"verifying 8 tokens, {own} over {other}",
            ratio(forward(rows, other, 8), forward(rows, own, 8)),
            wanted,
            _LEAST,
        )
        for other, wanted in others
    ]
    prefill = [find(rows, engine=name, measure="prefill").get("ms") for name in (peer, own)]
    return [*found, Target(f"prefill of 512, {own} over {peer}", ratio(*prefill), 2.5, _LEAST)]


def _roof_share(rows: Rows, name: str, facts: Mapping[str, Any], roof: Mapping[str, Any]) -> Target:
    """Bytes that a forward over one token must read, in its time, against the measured roof."""
    time = forward(rows, name, 1)
    share = None
    if time and facts:
        read = facts["weight_bytes"] + 64 * facts["kv_bytes_per_token"]
        share = read / (time / 1000) / roof["bytes_per_second"]
    return Target(f"{name}, share of the read bandwidth at width 1", share, 0.85, _LEAST)


def _speculation(rows: Rows, own: str, peer: str) -> list[Target]:
    """Our best way of using the same draft model against the best of theirs."""
    others = [peer, *([OPENVINO] if own.endswith("Q8_0") else [])]
    gains = {
        f"draft model, {own} over the best of {', '.join(others)}": (
            best(rows, [own], "draft", "tree"),
            best(rows, others, "draft"),
        ),
        f"speculation over plain, {own}": (best(rows, [own]), plain(rows, own)),
    }
    return [Target(name, ratio(*rates), 2.0, _LEAST) for name, rates in gains.items()]


def _serving(rows: Rows, own: str, peer: str) -> list[Target]:
    rates = [
        find(rows, engine=name, measure="parallel", sequences=16).get("tokens_per_second")
        for name in (own, peer)
    ]
    memory = find(rows, engine=own, measure="memory")
    used = ratio(memory.get("loaded_bytes"), memory.get("needed_bytes"))
    return [
        Target(f"16 sequences, {own} over {peer}", ratio(*rates), 3.0, _LEAST),
        Target(f"{own}, peak memory over weights and KV", used, 1.1),
    ]
