"""From the samples of ``peers.py`` to its rows, tables and targets. Measures nothing.

Paceline and llama.cpp are compared on the same file. A target over something that was not measured
has no value.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness import Sample, first_error
from peers_client import KINDS, LLAMA, OURS
from report import Row, Target, grid, number, pick, table

Rows = Sequence[Row]


# --- rows -----------------------------------------------------------------------------------------


def results_of(
    samples: Sequence[Sample],
    engines: Mapping[str, Mapping[str, Any]],
    memory: Mapping[str, Mapping[str, Any]],
    held: int,
) -> list[Row]:
    """One row per engine and thing measured.

    Args:
        memory: each worker's usage before any draft model was loaded.
        held: the most tokens whose keys and values were held at once until then.
    """
    groups: dict[tuple[str, Any], list[Sample]] = {}
    for sample in samples:
        item = ("generate",) if sample.item[0] == "generate" else sample.item  # type: ignore[index]
        groups.setdefault((sample.arm, item), []).append(sample)
    rows = []
    for (arm, item), group in groups.items():
        engine, _, mode = arm.partition(", ")
        kind, label = _KINDS[item[0]](item)
        row = {"engine": engine, "measure": item[0], **label, **({"mode": mode} if mode else {})}
        error = first_error(group)
        rows.append({**row, "error": error} if error else {**row, **kind(group)})
    _compare_with_plain(rows, samples)
    return rows + [_memory_row(name, memory[name], engines[name], held) for name in memory]


def _milliseconds(group: Sequence[Sample]) -> Row:
    return {"ms": 1000 * statistics.median(s.seconds or 0.0 for s in group)}


def _rate(group: Sequence[Sample]) -> Row:
    return {
        "tokens_per_second": statistics.median(s.facts["tokens"] / (s.seconds or 1) for s in group)
    }


def _generation(group: Sequence[Sample]) -> Row:
    """Tokens over the sum of each prompt's median time, with and without the prompt's reading."""
    prompts: dict[Any, list[Sample]] = {}
    for sample in group:
        prompts.setdefault(sample.item, []).append(sample)
    tokens, whole, decoding = 0.0, 0.0, 0.0
    for own in prompts.values():
        count = own[0].facts["tokens"]
        tokens += count
        whole += statistics.median(s.seconds or 0.0 for s in own)
        rest = statistics.median((s.seconds or 0.0) - s.facts["first"] for s in own)
        decoding += rest * count / max(1, count - 1)
    return {
        "tokens_per_second": tokens / whole,
        "decode_tokens_per_second": tokens / decoding if decoding else None,
    }


_KINDS: dict[str, Callable[[Any], tuple[Callable[[Sequence[Sample]], Row], Row]]] = {
    "forward": lambda item: (_milliseconds, {"context": item[1], "width": item[2]}),
    "prefill": lambda item: (_milliseconds, {"width": item[1]}),
    "parallel": lambda item: (_rate, {"sequences": item[1]}),
    "generate": lambda item: (_generation, {}),
}


def _compare_with_plain(rows: Sequence[Row], samples: Sequence[Sample]) -> None:
    """Give each mode its gain over the engine's own plain text, and whether that is equal."""
    texts = {(s.arm, s.item): s.facts.get("token_ids") for s in samples if not s.failed}
    for row in rows:
        plain = find(rows, engine=row["engine"], measure="generate", mode="plain")
        if row.get("mode") and "error" not in row and plain and "error" not in plain:
            row["speedup"] = row["tokens_per_second"] / plain["tokens_per_second"]
            arm = f"{row['engine']}, {row['mode']}"
            pairs = [
                (text, texts.get((f"{row['engine']}, plain", item)))
                for (of, item), text in texts.items()
                if of == arm and text is not None
            ]
            row["identical"] = all(a == b for a, b in pairs) if pairs else None


def _memory_row(
    name: str, used: Mapping[str, Any], facts: Mapping[str, Any], held: int
) -> dict[str, Any]:
    """What the process held at most, beside what it cannot do without.

    ``peak_bytes`` is all of it that was resident at once, anonymous memory and pages of files.
    ``loaded_bytes`` is that without ``baseline_bytes``, which the interpreter and the engine's
    libraries held before a model was loaded. ``needed_bytes`` are the weights and the keys and
    values of ``held`` tokens, each once; nothing is added for what is rounded up.
    """
    row: dict[str, Any] = {"engine": name, "measure": "memory", "peak_bytes": used["peak"]}
    row["baseline_bytes"] = used["baseline"]
    row["loaded_bytes"] = used["peak"] - used["baseline"]
    row["anonymous_bytes"], row["file_bytes"] = used["anonymous"], used["file"]
    if "weight_bytes" in facts:
        row["needed_bytes"] = facts["weight_bytes"] + held * facts["kv_bytes_per_token"]
    return row


def find(rows: Rows, **wanted: Any) -> Mapping[str, Any]:
    """The row that has these values; empty where nothing like it was measured."""
    return next(iter(pick(rows, **wanted)), {})


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def forward(rows: Rows, engine: str, width: int, context: int = 64) -> float | None:
    return find(rows, engine=engine, measure="forward", width=width, context=context).get("ms")


# --- tables ---------------------------------------------------------------------------------------


def tables(rows: Rows) -> list[str]:
    """Of each model: forwards, several sequences and memory, generation, and what is missing."""
    found = []
    for model in dict.fromkeys(row.get("model") for row in rows):
        own = [row for row in rows if row.get("model") == model]
        found += [*([f"{model}:"] if model else []), *_model_tables(own)]
    return found


def _model_tables(rows: Rows) -> list[str]:
    engines = list(dict.fromkeys(row["engine"] for row in rows if "missing" not in row))
    made = [_forward_table(rows, engines), _engine_table(rows, engines), _generate_table(rows)]
    missing = [[r["engine"], r.get("mode", "-"), r["missing"]] for r in rows if "missing" in r]
    missing += [
        [r["engine"], r.get("mode", r["measure"]), r["error"]] for r in rows if r.get("error")
    ]
    return made + ([table(["not measured", "what", "why"], missing)] if missing else [])


def _forward_table(rows: Rows, engines: Sequence[str]) -> str:
    some = [row for row in rows if row["measure"] == "forward"]
    widths = sorted({row["width"] for row in some})
    lines = []
    for context in sorted({row["context"] for row in some}):
        for engine in engines:
            times = [forward(rows, engine, width, context) for width in widths]
            costs = [number(ratio(time, times[0])) for time in times[1:]]
            lines.append([engine, context, *(number(time, 1) for time in times), *costs])
    headers = [f"w={width}" for width in widths] + [f"T({w})/T(1)" for w in widths[1:]]
    return table(["forward, ms", "context", *headers], lines)


def _engine_table(rows: Rows, engines: Sequence[str]) -> str:
    counts = sorted({row["sequences"] for row in rows if row.get("sequences")})
    lines = []
    for engine in engines:
        parallel = [
            find(rows, engine=engine, measure="parallel", sequences=count).get("tokens_per_second")
            for count in counts
        ]
        memory = find(rows, engine=engine, measure="memory")
        prefill = find(rows, engine=engine, measure="prefill").get("ms")
        cells = [number(prefill, 0), *(number(rate, 1) for rate in parallel)]
        held = [memory.get("loaded_bytes"), memory.get("peak_bytes")]
        cells += [number(each / 1e6 if each else None, 0) for each in held]
        lines.append([engine, *cells])
    headers = [f"{count} seq, tok/s" for count in counts]
    return table(["engine", "prefill 512, ms", *headers, "memory, MB", "with libraries"], lines)


def _generate_table(rows: Rows) -> str:
    columns = (
        ("code, greedy", "engine"),
        ("mode", "mode"),
        ("tok/s", "tokens_per_second", 1),
        ("without the prompt", "decode_tokens_per_second", 1),
        ("over plain", "speedup", 2),
        ("same text", lambda r: {True: "yes", False: "NO", None: "-"}[r.get("identical")]),
    )
    return table(*grid(pick(rows, measure="generate"), *columns))


WIDTHS_OF_8_BITS = {8: 1.3, 16: 2.0, 32: 3.8}
WIDTHS_OF_FEWER = {8: 1.5, 16: 2.7, 32: 5.2}
"""At a short context, where one 512-bit product takes two cycles; the time of fewer bits has less
reading and more unpacking in it."""
WIDTH_TARGETS = {"Q8_0": WIDTHS_OF_8_BITS, **dict.fromkeys(KINDS[1:], WIDTHS_OF_FEWER)}
PLAIN_TARGETS = {"Q8_0": 1.15, "Q6_K": 1.0, "Q4_K_M": 1.3, "Q4_0": 1.25}
LONG = 4096
"""Tokens of context from which on plain steps are a target of their own."""
_LEAST = "at least"


# --- targets --------------------------------------------------------------------------------------


def targets(
    rows: Rows, engines: Mapping[str, Mapping[str, Any]], roof: Mapping[str, Any]
) -> list[Target]:
    """Those of every type of file that an engine of ours has rows of."""
    named = {row["engine"] for row in rows}
    return [
        target
        for kind in PLAIN_TARGETS
        if (own := f"{OURS} {kind}") in named
        for target in [_roof_share(rows, own, engines.get(own, {}), roof), *_targets(rows, kind)]
    ]


def _targets(rows: Rows, kind: str) -> list[Target]:
    own, peer = f"{OURS} {kind}", f"{LLAMA} {kind}"
    short = min((row["context"] for row in rows if "context" in row), default=0)
    long = sorted({row["context"] for row in rows if row.get("context", 0) >= LONG})
    times = {width: forward(rows, own, width, short) for width in (1, *WIDTH_TARGETS[kind])}
    modes = [
        find(rows, engine=own, measure="generate", mode=mode).get("tokens_per_second")
        for mode in ("default", "plain")
    ]
    memory = find(rows, engine=own, measure="memory")
    used = ratio(memory.get("loaded_bytes"), memory.get("needed_bytes"))

    def over(name: str, wanted: float, key: str, **where: Any) -> Target:
        """Ours over the peer's; of times theirs over ours."""
        ours, theirs = (find(rows, engine=engine, **where).get(key) for engine in (own, peer))
        value = ratio(theirs, ours) if key == "ms" else ratio(ours, theirs)
        return Target(f"{name}, {own} over {peer}", value, wanted, _LEAST)

    step, plain = {"measure": "forward", "width": 1}, {"measure": "generate", "mode": "plain"}
    return [
        over("plain decoding", PLAIN_TARGETS[kind], "decode_tokens_per_second", **plain),
        *(
            Target(f"{own}, T({width})/T(1), context {short}", ratio(times[width], times[1]), most)
            for width, most in WIDTH_TARGETS[kind].items()
        ),
        *(
            over(f"plain step after {each} tokens", 1.1, "ms", **step, context=each)
            for each in long
        ),
        over("verifying 8 tokens", 3.0, "ms", measure="forward", width=8, context=64),
        over("prefill of 512", 2.5, "ms", measure="prefill"),
        Target(f"speculation over plain, {own}", ratio(*modes), 2.0, _LEAST),
        over("16 sequences", 3.0, "tokens_per_second", measure="parallel", sequences=16),
        Target(f"{own}, peak memory over weights and KV", used, 1.1),
    ]


def _roof_share(rows: Rows, name: str, facts: Mapping[str, Any], roof: Mapping[str, Any]) -> Target:
    """Bytes that a forward over one token must read, in its time, against the measured roof."""
    time, share = forward(rows, name, 1), None
    if time and facts:
        read = facts["weight_bytes"] + 64 * facts["kv_bytes_per_token"]
        share = ratio(read / (time / 1000), roof["bytes_per_second"])
    return Target(f"{name}, share of the read bandwidth at width 1", share, 0.85, _LEAST)
