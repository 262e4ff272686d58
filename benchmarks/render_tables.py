"""The documentation's tables, each from one benchmark's results. Reads no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ablation_report import tables as ablation_tables
from acceptance_report import tables as acceptance_tables
from acceptance_times import tables as acceptance_times_tables
from calibration_report import page_tables as calibration_tables
from curves_report import tables as curve_tables
from draft_length_report import page_tables as draft_length_tables
from fidelity import tables as fidelity_tables
from heterogeneous import tables as heterogeneous_tables
from host_time import PHASES
from kernels import tables as kernel_tables
from kv_dtypes import tables as kv_tables
from load_server import tables as load_tables
from loading import tables as loading_tables
from never_slower_cells import RUNS
from never_slower_replayed_report import summaries as replayed_summaries
from never_slower_tables import tables as never_slower_tables
from ngram_tables import tables as ngram_tables
from parallel_draft_report import tables as parallel_draft_tables
from peers_report import tables as peer_tables
from predicted import tables as predicted_tables
from proposer_sets import DEFAULT
from pruned_drafts import tables as pruned_draft_tables
from recommended_pairs_report import HEADERS as PAIR_HEADERS
from recommended_pairs_report import cells as pair_cells
from report import number
from sampler import tables as sampler_tables
from self_drafts_report import HEADERS as SELF_HEADERS
from self_drafts_report import cells as self_cells
from serve_peers import tables as server_tables
from serving_overhead import tables as serving_tables
from speedup import CONTROL
from suffix_time import tables as suffix_time_tables

Document = Mapping[str, Any]
Row = Mapping[str, Any]
Builder = Callable[[Document], list[str]]


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; the first column is text, the others are aligned to the right."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    lines = [headers, rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def provenance(document: Document) -> str:
    """Where and when, in one line, above the tables."""
    machine, config = document["machine"], document["config"]
    facts = [
        f"**{document['device']}**",
        f"torch threads: {machine['torch_threads']}",
        f"torch {machine['versions']['torch']}",
        f"commit `{document['commit']}`",
        document["date"],
    ]
    if "prompts" in config:
        facts.append(f"{config['prompts']} prompts")
    if config.get("quick"):
        facts.append("reduced run")
    if document["num_failed"]:
        facts.append(f"{document['num_failed']} failed samples")
    return ", ".join(facts) + "\n"


def target_lines(document: Document) -> str:
    rows = [
        [t["name"], number(t["value"]), f"{t['bound']} {t['target']:g}", _yes(t["met"])]
        for t in document["targets"]
    ]
    return markdown(["target", "measured", "wanted", "met"], rows)


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def _pick(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


# --- one function per marker ----------------------------------------------------------------------


def step_overhead(document: Document) -> list[str]:
    """Medians in microseconds: a line per case and number of requests."""
    parts = [*PHASES, "rest"]
    rows = []
    for row in _pick(document["results"], forward="real"):
        twin = _pick(
            document["results"], case=row["case"], requests=row["requests"], forward="scripted"
        )
        scripted = twin[0].get("host_us") if twin else None
        rows.append(
            [
                row["case"],
                row["requests"],
                number(row.get("host_us"), 0),
                number(row.get("host_us_with_draft"), 0),
                number(scripted, 0),
                *(number(row.get("phases_us", {}).get(part), 0) for part in parts),
                number(row.get("draft_forward_us"), 0),
            ]
        )
    headers = ["case", "requests", "host", "with draft", "scripted", *parts, "draft forwards"]
    return [markdown(headers, rows), target_lines(document)]


def speedup(document: Document) -> list[str]:
    """A line per kind of text, number of requests and temperature; a column per arm."""
    results = document["results"]
    arms = list(dict.fromkeys(row["arm"] for row in results))
    cells = dict.fromkeys((row["kind"], row["requests"], row["temperature"]) for row in results)
    rows = []
    for kind, requests, temperature in cells:
        here = _pick(results, kind=kind, requests=requests, temperature=temperature)
        found = {row["arm"]: row for row in here}
        plain = number(here[0].get("plain_tokens_per_second"), 1)
        ratios = [_ratio_cell(found.get(arm, {})) for arm in arms]
        identical = all(row.get("identical") for row in here)
        rows.append([kind, requests, temperature, plain, *ratios, _yes(identical)])
    names = ["control" if arm == CONTROL else arm for arm in arms]
    headers = ["text", "requests", "temperature", "plain tok/s", *names, "identical"]
    return [markdown(headers, rows), target_lines(document)]


def _ratio_cell(row: Row) -> str:
    ratio = row.get("speedup")
    return f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"


def busy_machine(document: Document) -> list[str]:
    """A line per number of loops and arm."""
    rows = [
        [
            row["loops"],
            row["arm"],
            number(row["tokens_per_second"], 0),
            number(row["over_one_thread"]),
            number(row["slowest_over_median"]),
        ]
        for row in document["results"]
    ]
    headers = ["loops", "arm", "tok/s", "over 1 thread", "slowest run over median"]
    return [markdown(headers, rows), target_lines(document)]


def structured(document: Document) -> list[str]:
    """One row per shape and temperature: times against plain ones, and tokens per step."""
    results = document["results"]
    cells = list(dict.fromkeys((row["shape"], row["temperature"]) for row in results))
    arms = list(dict.fromkeys(row["arm"] for row in results))
    rows = []
    for shape, temperature in cells:
        here = _pick(results, shape=shape, temperature=temperature)
        found = {row["arm"]: row for row in here}
        plain = number(here[0].get("plain_tokens_per_second"), 1)
        ratios = [_ratio_cell(found.get(arm, {})) for arm in arms]
        length = number(found.get(DEFAULT, {}).get("steps_ratio"))
        identical = all(row.get("identical") for row in here)
        rows.append([shape, temperature, plain, *ratios, length, _yes(identical)])
    names = ["control" if arm == CONTROL else arm for arm in arms]
    headers = ["shape", "temperature", "plain tok/s", *names, "tokens per step", "identical"]
    return [markdown(headers, rows), target_lines(document)]


def self_drafts(document: Document) -> list[str]:
    """A table per target."""
    results, parts = document["results"], []
    for target in dict.fromkeys(row["target"] for row in results):
        lines = [self_cells(row) for row in _pick(results, target=target)]
        parts += [f"Target `{target}`:\n", markdown(SELF_HEADERS, lines)]
    return [*parts, target_lines(document)]


def recommended_pairs(document: Document) -> list[str]:
    """A line per curve and who drafts; what was not measured has a dash there."""
    lines = [pair_cells(row) for row in document["results"]]
    return [markdown(PAIR_HEADERS, lines), target_lines(document)]


def printed(tables: Callable[[Sequence[Row]], list[str]]) -> Builder:
    """The tables as the program prints them, then the targets."""
    return lambda document: [
        "```\n" + "\n\n".join(tables(document["results"])) + "\n```\n",
        target_lines(document),
    ]


MODEL_NAMES = {"inflated": "half a billion parameters", "smollm2": "SmolLM2-135M-Instruct"}
BUSY_ARMS = {"all threads": "Paceline", "llama.cpp": "llama.cpp"}
GAIN_ROWS = {
    "code": ("code", 0.0),
    "prose": ("prose", 0.0),
    "edits of code": ("edit", 0.0),
    "code, sampled at 0.8": ("code", 0.8),
}
"""The rows of the short table: what they are called, kind of text and temperature."""


def gains(documents: Sequence[Document]) -> list[str]:
    """One request at a time, default configuration: a column per model and machine."""
    rows = []
    for name, (kind, temperature) in GAIN_ROWS.items():
        wanted = {"kind": kind, "temperature": temperature, "requests": 1, "arm": DEFAULT}
        rows.append([name, *(_gain_cell(_pick(d["results"], **wanted)) for d in documents)])
    names = [d["benchmark"].removeprefix("speedup-") for d in documents]
    models = [MODEL_NAMES.get(name, name) for name in names]
    above, columns = _with_devices(documents, models)
    return [above, markdown(["speed-up (tok/s)", *columns], rows)]


def _with_devices(documents: Sequence[Document], names: Sequence[str]) -> tuple[str, list[str]]:
    """A line for the device that all results are of and the names, or no line and longer names."""
    devices = [document["device"] for document in documents]
    if len(set(devices)) == 1:
        return f"**{devices[0]}**\n", list(names)
    return "", [f"{name}, {device}" for name, device in zip(names, devices, strict=True)]


def _gain_cell(found: Sequence[Row]) -> str:
    if not found or "speedup" not in found[0]:
        return "-"
    (row,) = found
    before, after = row["plain_tokens_per_second"], row["tokens_per_second"]
    mark = "" if row["identical"] else ", **not identical**"
    return f"**{row['speedup']['value']:.2f}x** ({before:.0f} to {after:.0f}){mark}"


def busy(documents: Sequence[Document]) -> list[str]:
    """Tokens per second beside endless loops: a line per machine and arm."""
    loops = sorted({row["loops"] for d in documents for row in d["results"]})
    above, devices = _with_devices(documents, [""] * len(documents))
    rows = []
    for document, device in zip(documents, devices, strict=True):
        for arm, name in BUSY_ARMS.items():
            cells = [_pick(document["results"], arm=arm, loops=count) for count in loops]
            speeds = [number(c[0]["tokens_per_second"], 0) if c else "-" for c in cells]
            rows.append([f"{name}{device}", *speeds])
    return [above, markdown(["tok/s", *map(str, loops)], rows)]


FILE_NAMES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3-270m-q4_k_m": "Gemma 3 270M"}
EQUAL_COLUMNS = {
    "one request, tok/s": {"measure": "parallel", "sequences": 1},
    "16 requests, tok/s": {"measure": "parallel", "sequences": 16},
    "checking 8 tokens, ms": {"measure": "forward", "context": 64, "width": 8},
    "reading 512 tokens, ms": {"measure": "prefill", "width": 512},
}


def equal_files(documents: Sequence[Document]) -> list[str]:
    """Paceline and llama.cpp on the very same Q4_K_M files: a line per file."""
    (document,) = documents
    rows = []
    for model, name in FILE_NAMES.items():
        cells = [_pair(document["results"], model, w) for w in EQUAL_COLUMNS.values()]
        rows.append([name, *cells])
    headers = ["Q4_K_M: Paceline / llama.cpp", *EQUAL_COLUMNS]
    return [f"**{document['device']}**\n", markdown(headers, rows)]


def _pair(results: Sequence[Row], model: str, wanted: Row) -> str:
    found = [
        _pick(results, model=model, engine=f"{engine} Q4_K_M", **wanted)
        for engine in ("paceline", "llama.cpp")
    ]
    values = [row.get("ms", row.get("tokens_per_second")) for rows in found for row in rows]
    return " / ".join(number(value, 0) for value in values)


BUILDERS: dict[str, tuple[str, Builder]] = {
    "step_overhead": ("step_overhead", step_overhead),
    "acceptance": ("acceptance", printed(acceptance_tables)),
    "acceptance_times": ("acceptance_times", printed(acceptance_times_tables)),
    "speedup": ("speedup", speedup),
    "speedup_real": ("speedup-*", speedup),
    "busy_machine": ("busy_machine*", busy_machine),
    "structured": ("structured", structured),
    "peers_real": ("peers_real", printed(peer_tables)),
    "peers_shapes": ("peers-*", printed(peer_tables)),
    "kv_dtypes": ("kv_dtypes*", printed(kv_tables)),
    "loading": ("loading", printed(loading_tables)),
    "fidelity": ("fidelity_*", printed(fidelity_tables)),
    "calibration": ("calibration", printed(calibration_tables)),
    "curves": ("curves", printed(curve_tables)),
    "draft_length": ("draft_length", printed(draft_length_tables)),
    "heterogeneous": ("heterogeneous", printed(heterogeneous_tables)),
    "kernels": ("kernels", printed(lambda rows: kernel_tables(rows, threads=1, ghz=None))),
    "parallel_draft": ("parallel_draft", printed(parallel_draft_tables)),
    "pruned_drafts": ("pruned_drafts", printed(pruned_draft_tables)),
    "predicted": ("predicted", printed(predicted_tables)),
    "recommended_pairs": ("recommended_pairs", recommended_pairs),
    "ngram_models": ("ngram_models", printed(ngram_tables)),
    "sampler": ("sampler", printed(sampler_tables)),
    "serving_overhead": ("serving_overhead", printed(serving_tables)),
    "serving_overhead_model": ("serving_overhead_model", printed(serving_tables)),
    "serve_peers": ("serve_peers", printed(server_tables)),
    "self_drafts": ("self_drafts", self_drafts),
    "suffix_time": ("suffix_time", printed(suffix_time_tables)),
    "load_server": ("load_server", printed(load_tables)),
    **{name: (name, printed(never_slower_tables)) for name in RUNS.values()},
    "ablation": ("ablation", printed(ablation_tables)),
    "never_slower_replayed": ("never_slower_replayed", printed(replayed_summaries)),
}
"""By marker: which benchmark's results it shows, and how. A star stands for the model."""

SUMMARIES: dict[str, tuple[str, Callable[[Sequence[Document]], list[str]]]] = {
    "gains": ("speedup-*", gains),
    "busy": ("busy_machine-*", busy),
    "equal_files": ("peers_real", equal_files),
}
"""By marker: tables that show the results of several machines and models side by side."""
